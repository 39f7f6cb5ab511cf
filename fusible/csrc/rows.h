// Loops over the rows of tensors, in parallel, and sums over them, the same bits for any number of threads.
#pragma once

#include <cmath>

#include "convert.h"
#include "tensors.h"

namespace tensors {

// Memory for the time of a call.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(static_cast<T*>(memory::allocate(size_t(count) * sizeof(T)))) {}
  ~Scratch() { memory::release(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

// Loops take pointers, so what belongs together must fit.
inline void check_same(const Tensor& t, const Tensor& x, int64_t numel, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.numel() == numel, "fusible: ", what,
                  " must have the dtype of x and ", numel, " elements, but has ", t.numel());
}

// The words below which an element is dropped, for a scale of 1 / (1 - p).
inline uint32_t threshold_of(double scale) {
  return uint32_t(std::min(std::nearbyint((1 - 1 / scale) * 4294967296.0), 4294967295.0));
}

// A bias in arithmetic form, converted here where it has x's dtype: torch's own copy costs more than all the rest of a
// small call.
inline std::optional<Tensor> bias_of(const std::optional<Tensor>& bias, ScalarType dtype) {
  const bool narrow = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  if (!bias || !narrow || bias->scalar_type() != dtype || !bias->is_contiguous()) return gain(bias, wide(dtype), false);
  Tensor out = empty(*bias, ScalarType::Float);
  float* to = static_cast<float*>(out.mutable_data_ptr());
  if (dtype == ScalarType::Half)
    FUSIBLE_ISA::load(static_cast<const f16*>(bias->const_data_ptr()), bias->numel(), to);
  else
    FUSIBLE_ISA::load(static_cast<const bf16*>(bias->const_data_ptr()), bias->numel(), to);
  return out;
}

// As rows of one element where tiles need not end with a row.
inline Rows elements(const Tensor& t) {
  if (!t.is_contiguous()) return rows(t);
  return {t, t.const_data_ptr(), t.numel(), 1, 1};
}

// Adds the rows of [chunks, w] to the first one, in their order.
inline void add_chunks(double* total, int64_t chunks, int64_t w) {
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t i = 0; i < w; ++i) total[i] += total[c * w + i];
}

// Rounds w sums to the elements of a contiguous tensor.
inline void rounded(const double* sums, int64_t w, Tensor& out) {
  void* to = out.mutable_data_ptr();
  const auto round = [&](auto* result, auto convert) {
    for (int64_t i = 0; i < w; ++i) result[i] = convert(sums[i]);
  };
  switch (storage(out.scalar_type())) {
    case kFloat: round(static_cast<float*>(to), [](double v) { return float(v); }); break;
    case kDouble: round(static_cast<double*>(to), [](double v) { return v; }); break;
    case kBFloat16: round(static_cast<bf16*>(to), [](double v) { return FUSIBLE_ISA::to_bf16(float(v)); }); break;
    default: round(static_cast<f16*>(to), [](double v) { return FUSIBLE_ISA::to_f16(float(v)); });
  }
}

// The sum over n rows as a tensor [w] of `dtype`; `loop(begin, end, sums)` adds its rows' to `sums`, of type A. Chunks of
// rows run in parallel. Each is summed in blocks of rows, and those in double, so that errors do not grow with their
// number.
template <class A, class F>
Tensor sum_of_rows(int64_t n, int64_t w, int64_t block, ScalarType dtype, const F& loop) {
  const int64_t chunk = chunk_rows(n, w), chunks = std::max<int64_t>(1, (n + chunk - 1) / chunk);
  const Scratch<double> totals(chunks * w);
  const Scratch<A> parts(chunks * w);
  double* total = totals.get();
  A* part = parts.get();
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      double* sum = total + c * w;
      A* of_block = part + c * w;
      std::fill(sum, sum + w, 0);
      const int64_t last = std::min(n, (c + 1) * chunk);
      for (int64_t r = c * chunk; r < last; r += block) {
        std::fill(of_block, of_block + w, A(0));
        loop(r, std::min(r + block, last), of_block);
        for (int64_t i = 0; i < w; ++i) sum[i] += of_block[i];
      }
    }
  });
  add_chunks(total, chunks, w);
  Tensor out = empty(&w, 1, dtype);
  rounded(total, w, out);
  return out;
}
template <class F>
Tensor sum_of_rows(int64_t n, int64_t w, int64_t block, ScalarType arithmetic, ScalarType dtype, const F& loop) {
  return arithmetic == ScalarType::Double ? sum_of_rows<double>(n, w, block, dtype, loop)
                                          : sum_of_rows<float>(n, w, block, dtype, loop);
}

// Runs `loop(begin, end)` over n rows; in this thread where starting others costs more than it brings.
template <class F>
void for_rows(int64_t n, int64_t w, const F& loop) {
  const int64_t grain = row_grain(w);
  if (n <= grain) {
    if (n > 0) loop(0, n);
  } else {
    torch::stable::parallel_for(0, n, grain, loop);
  }
}

}  // namespace tensors
