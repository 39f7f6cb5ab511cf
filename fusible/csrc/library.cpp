// Chooses the instruction set once, and registers the operators that belong to no family.
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "tensors.h"

#if defined(FUSIBLE_X86)
namespace avx2 {
void fill(Loops&);
}
namespace avx512 {
void fill(Loops&);
}
#endif

// As torch's own kernels do, ours obey ATEN_CPU_CAPABILITY: "default" for plain loops, "avx2" for no more than that.
static bool allowed(const char* set) {
  const char* most = std::getenv("ATEN_CPU_CAPABILITY");
  if (!most || std::strcmp(most, "avx512") == 0) return true;
  return std::strcmp(most, set) == 0;
}

const Loops& loops() {
  static const Loops table = [] {
    Loops filled{};
#if defined(FUSIBLE_X86)
    __builtin_cpu_init();
    if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      avx512::fill(filled);
      return filled;
    }
    if (allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      avx2::fill(filled);
      return filled;
    }
#endif
    base::fill(filled);
    return filled;
  }();
  return table;
}

namespace {

// A fresh contiguous tensor, from the caching allocator if it is large.
Tensor empty_(std::vector<int64_t> sizes, ScalarType dtype) {
  return tensors::empty(sizes.data(), int64_t(sizes.size()), dtype);
}

// A digest of the files that this library was built from.
int64_t sources() { return FUSIBLE_SOURCES; }

void set_pool_from(int64_t bytes) { tensors::pool_from() = bytes; }

void set_limit(int64_t bytes) { memory::set_limit(bytes); }

void empty_cache() { memory::empty_cache(); }

void set_fill(bool on) { memory::set_fill(on); }

// (in_use, cached, peak, hits, misses, limit)
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> stats() {
  const memory::Stats s = memory::stats();
  return {s.in_use, s.cached, s.peak, s.hits, s.misses, s.limit};
}

bool isa(int64_t which) { return loops().isa[3] == (which == 512 ? '5' : which == 2 ? '2' : 'e'); }

}  // namespace

STABLE_TORCH_LIBRARY(fusible, m) {
  m.def("empty(int[] sizes, ScalarType dtype) -> Tensor");
  m.def("set_pool_from(int bytes) -> ()");
  m.def("set_limit(int bytes) -> ()");
  m.def("empty_cache() -> ()");
  m.def("set_fill(bool on) -> ()");
  m.def("stats() -> (int, int, int, int, int, int)");
  m.def("isa(int which) -> bool");
  m.def("sources() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fusible, CompositeExplicitAutograd, m) {
  m.impl("empty", TORCH_BOX(&empty_));
  m.impl("set_pool_from", TORCH_BOX(&set_pool_from));
  m.impl("set_limit", TORCH_BOX(&set_limit));
  m.impl("empty_cache", TORCH_BOX(&empty_cache));
  m.impl("set_fill", TORCH_BOX(&set_fill));
  m.impl("stats", TORCH_BOX(&stats));
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("sources", TORCH_BOX(&sources));
}
