// Rotates pairs of elements of the first heads of each row, and copies the others; parts of a row may lie apart.
#include "rotary.h"

#include <algorithm>

#include "convert.h"
#include "loops.h"

namespace FUSIBLE_ISA {

constexpr int64_t kPairs = 128;

// Pairs (i, half + i) of one head.
template <class T, class A>
static inline void halves(const T* x, T* y, const A* cosines, const A* sines, int64_t half, A sign) {
  if constexpr (std::is_same_v<T, A>) {
    const T *a = x, *b = x + half;
    T *ya = y, *yb = y + half;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const A c = cosines[i], s = sign * sines[i], p = a[i], q = b[i];
      ya[i] = p * c - q * s;
      yb[i] = q * c + p * s;
    }
  } else {
    alignas(64) A first[kPairs], second[kPairs];
    for (int64_t at = 0; at < half; at += kPairs) {
      const int64_t n = std::min(kPairs, half - at);
      load(x + at, n, first);
      load(x + half + at, n, second);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const A c = cosines[at + i], s = sign * sines[at + i], p = first[i], q = second[i];
        first[i] = p * c - q * s;
        second[i] = q * c + p * s;
      }
      store(first, n, y + at);
      store(second, n, y + half + at);
    }
  }
}

// Pairs (2i, 2i + 1) of one head.
template <class T, class A>
static inline void neighbours(const T* x, T* y, const A* cosines, const A* sines, int64_t half, A sign) {
  alignas(64) A in[2 * kPairs], out[2 * kPairs];
  for (int64_t at = 0; at < half; at += kPairs) {
    const int64_t n = std::min(kPairs, half - at);
    const A* pair = row(x + 2 * at, 2 * n, in);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const A c = cosines[at + i], s = sign * sines[at + i], p = pair[2 * i], q = pair[2 * i + 1];
      out[2 * i] = p * c - q * s;
      out[2 * i + 1] = q * c + p * s;
    }
    store(out, 2 * n, y + 2 * at);
  }
}

template <class T>
static void loop(const Rotary& r, int64_t begin, int64_t end) {
  using A = wide<T>;
  const int64_t half = r.turned / 2;
  const A sign = r.inverse ? A(-1) : A(1);
  for (int64_t n = begin; n < end; ++n) {
    const A* cosines = static_cast<const A*>(r.table) + n % r.period * r.turned;
    const A* sines = cosines + half;
    T* y = static_cast<T*>(r.y) + n * r.y_stride;
    int64_t left = r.heads;
    for (int64_t p = 0; p < r.count; ++p) {
      const T* x = static_cast<const T*>(r.parts[p].data) + n * r.parts[p].stride;
      const int64_t turning = std::min(left, r.parts[p].heads), resting = r.parts[p].heads - turning;
      for (int64_t h = 0; h < turning; ++h, x += r.head, y += r.head) {
        if (r.interleaved)
          neighbours(x, y, cosines, sines, half, sign);
        else
          halves(x, y, cosines, sines, half, sign);
        if (!r.in_place && r.turned < r.head) std::copy(x + r.turned, x + r.head, y + r.turned);
      }
      if (!r.in_place) std::copy(x, x + resting * r.head, y);
      y += resting * r.head;
      left -= turning;
    }
  }
}

void add_rotary(Loops& loops) {
  loops.rotary[kFloat] = loop<float>;
  loops.rotary[kDouble] = loop<double>;
  loops.rotary[kBFloat16] = loop<bf16>;
  loops.rotary[kHalf] = loop<f16>;
}

}  // namespace FUSIBLE_ISA
