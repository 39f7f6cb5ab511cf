#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#define FUSIBLE_MMAP 1
#endif

namespace memory {
namespace {

constexpr size_t kHeader = 64;  // in front of the data; keeps it aligned
constexpr size_t kPage = 4096;
constexpr size_t kHuge = size_t(2) << 20;

struct Header {
  size_t block;  // bytes of the whole block
};

// Sizes in quarter powers of two, so that a block serves many shapes and wastes a quarter at most.
size_t size_class(size_t bytes) {
  size_t power = kPage;
  while (power * 2 <= bytes) power *= 2;
  const size_t step = std::max(power / 4, kPage);
  return (bytes + step - 1) / step * step;
}

void* map_block(size_t block) {
#if FUSIBLE_MMAP
  void* base = mmap(nullptr, block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (block >= kHuge) madvise(base, block, MADV_HUGEPAGE);
#endif
  return base;
#else
  return std::malloc(block);
#endif
}

void unmap_block(void* base, size_t block) {
#if FUSIBLE_MMAP
  munmap(base, block);
#else
  std::free(base);
#endif
}

struct Pool {
  std::mutex mutex;
  std::map<size_t, std::vector<void*>> free;  // by block size
  Stats stats{0, 0, 0, 0, 0, int64_t(1) << 30};

  // Gives cached blocks back, the largest first, until at most `bytes` are cached.
  void trim(int64_t bytes) {
    while (stats.cached > bytes && !free.empty()) {
      auto last = std::prev(free.end());
      unmap_block(last->second.back(), last->first);
      stats.cached -= int64_t(last->first);
      last->second.pop_back();
      if (last->second.empty()) free.erase(last);
    }
  }
};

// Never destroyed: tensors may outlive everything.
Pool& pool() {
  static Pool* instance = [] {
    Pool* made = new Pool();
#if FUSIBLE_MMAP
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
#endif
    return made;
  }();
  return *instance;
}

}  // namespace

void* allocate(size_t bytes) {
  const size_t block = size_class(bytes + kHeader);
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  void* base = nullptr;
  auto found = p.free.find(block);
  if (found != p.free.end()) {
    base = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) p.free.erase(found);
    p.stats.cached -= int64_t(block);
    ++p.stats.hits;
  } else {
    base = map_block(block);
    if (!base) {  // make room and try again
      p.trim(0);
      base = map_block(block);
    }
    if (!base) throw std::bad_alloc();
    ++p.stats.misses;
  }
  static_cast<Header*>(base)->block = block;
  p.stats.in_use += int64_t(block);
  p.stats.peak = std::max(p.stats.peak, p.stats.in_use);
  return static_cast<char*>(base) + kHeader;
}

void release(void* data) {
  void* base = static_cast<char*>(data) - kHeader;
  const size_t block = static_cast<Header*>(base)->block;
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.stats.in_use -= int64_t(block);
  p.free[block].push_back(base);
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

Stats stats() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  return p.stats;
}

}  // namespace memory
