// Rows taken in tiles that stay in the first-level cache, so that a step of a loop finds what the step before it left.
#pragma once

#include <cstdint>

#include "isa.h"

namespace FUSIBLE_ISA {

constexpr int64_t kTile = 256;

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

}  // namespace FUSIBLE_ISA
