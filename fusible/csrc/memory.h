// A caching allocator for large CPU tensors. Fresh large memory costs more than the arithmetic on it: each page is faulted
// in again at each call. Blocks come back when their tensor dies and are handed out again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memory {

struct Stats {
  int64_t in_use, cached, peak, hits, misses, limit;
};

void* allocate(size_t bytes);  // begins at a page, at a huge page if it can hold one; throws std::runtime_error
void release(void* data);      // any thread
void empty_cache();
void set_limit(int64_t bytes);  // of the cache; at once
void set_fill(bool on);         // fresh memory holds NaN in every float type, for tests
Stats stats();

}  // namespace memory
