#include "memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#define FUSIBLE_MMAP 1
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace memory {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kMost = size_t(1) << 62;

// As torch's own allocator fails, by a RuntimeError.
[[noreturn]] void out_of_memory(size_t bytes) {
  throw std::runtime_error("fusible: out of memory: the system does not give " + std::to_string(bytes) + " bytes");
}

// Sizes in quarter powers of two, so that a block serves many shapes and wastes a quarter at most; powers of two, the most
// usual of all, waste nothing.
size_t size_class(size_t bytes) {
  size_t power = kPage;
  while (power * 2 <= bytes) power *= 2;
  const size_t step = std::max(power / 4, kPage);
  return std::max((bytes + step - 1) / step * step, kPage);
}

void unmap_block(void* base, size_t block) {
  ASAN_UNPOISON_MEMORY_REGION(base, block);  // the addresses may become another's
#if FUSIBLE_MMAP
  munmap(base, block);
#else
  ::operator delete(base, std::align_val_t(kPage));
#endif
}

// Fresh memory or null. What can hold a huge page starts at one, so that the system has a reason to give it.
void* map_block(size_t block) {
#if FUSIBLE_MMAP
  const size_t slack = block >= kHuge ? kHuge - kPage : 0;
  void* mapped = mmap(nullptr, block + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* base = static_cast<char*>(mapped);
  if (slack) {
    const size_t before = (kHuge - reinterpret_cast<uintptr_t>(base) % kHuge) % kHuge;
    if (before) munmap(base, before);
    if (slack > before) munmap(base + before + block, slack - before);
    base += before;
#ifdef MADV_HUGEPAGE
    madvise(base, block, MADV_HUGEPAGE);
#endif
  }
  return base;
#else
  return ::operator new(block, std::align_val_t(kPage), std::nothrow);
#endif
}

struct Pool {
  std::mutex mutex;
  std::map<size_t, std::vector<void*>> free;  // by block size
  std::unordered_map<void*, size_t> live;     // sizes of the blocks in use
  Stats stats{0, 0, 0, 0, 0, int64_t(1) << 30};
  bool fill = false;

  // A cached block of this size, or null.
  void* cached(size_t block) {
    auto found = free.find(block);
    if (found == free.end()) return nullptr;
    void* base = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) free.erase(found);
    stats.cached -= int64_t(block);
    return base;
  }

  // Gives cached blocks back, the largest first, until at most `bytes` are cached.
  void trim(int64_t bytes) {
    while (stats.cached > bytes && !free.empty()) {
      const size_t block = std::prev(free.end())->first;
      unmap_block(cached(block), block);
    }
  }
};

// Never destroyed: tensors may outlive everything.
Pool& pool() {
  static Pool* instance = [] {
    Pool* made = new Pool();
#if FUSIBLE_MMAP
    // A child gets the pool as no thread is in it.
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
#endif
    return made;
  }();
  return *instance;
}

// Made when the library is loaded, so that no fork meets it half made.
[[maybe_unused]] const Pool& made_at_once = pool();

}  // namespace

void* allocate(size_t bytes) {
  if (bytes > kMost) out_of_memory(bytes);
  const size_t block = size_class(bytes);
  Pool& p = pool();
  std::unique_lock<std::mutex> lock(p.mutex);
  void* base = p.cached(block);
  const bool hit = base != nullptr;
  if (!hit) base = map_block(block);
  if (!base) {  // make room and try again
    p.trim(0);
    base = map_block(block);
  }
  if (!base) out_of_memory(bytes);
  try {
    p.live.emplace(base, block);
  } catch (...) {
    unmap_block(base, block);
    throw;
  }
  ++(hit ? p.stats.hits : p.stats.misses);
  p.stats.in_use += int64_t(block);
  p.stats.peak = std::max(p.stats.peak, p.stats.in_use);
  const bool fill = p.fill;
  lock.unlock();
  ASAN_UNPOISON_MEMORY_REGION(base, bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(base) + bytes, block - bytes);
  if (fill) std::memset(base, 0xff, bytes);
  return base;
}

void release(void* data) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  const auto found = p.live.find(data);
  const size_t block = found->second;
  p.live.erase(found);
  p.stats.in_use -= int64_t(block);
  try {
    p.free[block].push_back(data);
  } catch (const std::bad_alloc&) {  // a tensor's end must not throw
    const auto empty = p.free.find(block);
    if (empty != p.free.end() && empty->second.empty()) p.free.erase(empty);
    return unmap_block(data, block);
  }
  ASAN_POISON_MEMORY_REGION(data, block);
  p.stats.cached += int64_t(block);
  p.trim(p.stats.limit);
}

void empty_cache() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.trim(0);
}

void set_limit(int64_t bytes) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.stats.limit = bytes;
  p.trim(bytes);
}

void set_fill(bool on) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.fill = on;
}

Stats stats() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  return p.stats;
}

}  // namespace memory
