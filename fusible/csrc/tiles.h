// Rows taken in tiles that stay in the first-level cache, so that a step of a loop finds what the step before it left.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"
#include "isa.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace FUSIBLE_ISA {

constexpr int64_t kTile = 512;

// Whether tiles of several rows are taken; their columns then repeat every w elements.
inline bool grouped(int64_t w, bool dense) { return dense && 2 * w <= kTile; }

// Calls f(row, column, elements) for the rows from `begin` to `end`. Groups of rows start at column 0.
template <class F>
inline void for_tiles(int64_t begin, int64_t end, int64_t w, bool dense, const F& f) {
  if (w == 0) return;
  if (grouped(w, dense)) {
    const int64_t step = kTile / w;
    for (int64_t r = begin; r < end; r += step) f(r, 0, (r + step < end ? step : end - r) * w);
    return;
  }
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < w; c += kTile) f(r, c, c + kTile < w ? kTile : w - c);
}

// A row of w elements repeated over a tile of a group.
template <class A>
inline void repeat(const A* row, int64_t w, A* tile) {
  for (int64_t i = 0; i < kTile / w * w; ++i) tile[i] = row[i % w];
}

// Adds a group's tile, summed over its rows, to `row`.
template <class A>
inline void fold(const A* tile, int64_t w, A* row) {
  double sums[kTile / 2] = {};
  for (int64_t k = 0; k < kTile / w; ++k)
    for (int64_t i = 0; i < w; ++i) sums[i] += tile[k * w + i];
  for (int64_t i = 0; i < w; ++i) row[i] += A(sums[i]);
}

// Copies a tile to where nobody will read soon, past the caches, which saves reading the old content of its lines.
inline void stream(const void* tile, int64_t bytes, void* out) {
  const char* from = static_cast<const char*>(tile);
  char* to = static_cast<char*>(out);
#if defined(__x86_64__)
  constexpr int64_t line = 64;
  const int64_t head = int64_t(-reinterpret_cast<uintptr_t>(to) & (line - 1));
  if (bytes >= head + line) {
    std::memcpy(to, from, size_t(head));
    int64_t i = head;
    for (; i + line <= bytes; i += line) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#else
      for (int64_t k = i; k < i + line; k += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
#endif
    }
    from += i, to += i, bytes -= i;
  }
#endif
  std::memcpy(to, from, size_t(bytes));
}

// A result, tile by tile: `at` says where to write one in arithmetic form, `finish` brings it to its place.
template <class T>
class Result {
 public:
  explicit Result(bool streamed) : streamed_(streamed) {}
  ~Result() {
#if defined(__x86_64__)
    if (streamed_) _mm_sfence();  // other threads see what was streamed
#endif
  }
  wide<T>* at(T* out) {
    out_ = out;
    return streamed_ ? tile_ : place(out, tile_);
  }
  void finish(int64_t n) {
    if (!streamed_) return FUSIBLE_ISA::finish(out_, n, tile_);
    if constexpr (std::is_same_v<T, wide<T>>) {
      stream(tile_, n * int64_t(sizeof(T)), out_);
    } else {
      store(tile_, n, narrow_);
      stream(narrow_, n * int64_t(sizeof(T)), out_);
    }
  }

 private:
  bool streamed_;
  T* out_ = nullptr;
  alignas(64) wide<T> tile_[kTile];
  alignas(64) T narrow_[std::is_same_v<T, wide<T>> ? 1 : kTile];
};

}  // namespace FUSIBLE_ISA
