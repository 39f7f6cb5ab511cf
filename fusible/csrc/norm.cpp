// LayerNorm, RMSNorm and L2 normalisation, forward and backward; a residual, and dropout before it, may be taken in.
#include "norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "convert.h"
#include "loops.h"
#include "tiles.h"

namespace FUSIBLE_ISA {

// The mean, and the sum of squares about it. Both in one pass about a pivot near the mean; in a second pass where the pivot
// is so far from it that digits cancel.
template <class A>
static void moments(const A* x, int64_t w, A& mean, A& square) {
  const int64_t some = std::min<int64_t>(w, 16);
  A pivot = 0;
  for (int64_t i = 0; i < some; ++i) pivot += x[i];
  pivot /= A(std::max<int64_t>(some, 1));
  A total, squares;
  sums<A>(w, total, squares, [&](int64_t i, A& a, A& b) {
    const A d = x[i] - pivot;
    a += d, b += d * d;
  });
  const A shift = total / A(w), excess = total * shift;
  mean = pivot + shift;
  square = squares - excess;
  if (!(excess <= square)) {  // with NaN too
    square = sum<A>(w, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  }
}

// x behind the mask, the rows' elements from number `first`. A product, so that NaN and infinities stay.
template <class A>
static void drop(const Mask& mask, int64_t first, const A* x, int64_t n, A* out) {
  alignas(64) uint32_t words[kTile + 2 * philox::kElements];
  const A scale = A(mask.scale);
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t count = std::min(kTile, n - i);
    const uint32_t* word = random_words(mask.seed, first + i, count, words);
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) out[i + k] = x[i + k] * (word[k] < mask.threshold ? A(0) : scale);
  }
}

// y = (x - mean) rstd gain + bias; gain and bias may be null.
template <class A>
static void normalized(const A* x, int64_t w, A mean, A rstd, const A* gain, const A* bias, A* y) {
  if (gain && bias) {
#pragma omp simd
    for (int64_t i = 0; i < w; ++i) y[i] = (x[i] - mean) * rstd * gain[i] + bias[i];
  } else if (gain) {
#pragma omp simd
    for (int64_t i = 0; i < w; ++i) y[i] = (x[i] - mean) * rstd * gain[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < w; ++i) y[i] = (x[i] - mean) * rstd;
  }
}

template <class T>
static void forward(const NormForward& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  const int64_t w = a.width;
  std::vector<A> scratch((a.mask.on ? 4 : 3) * size_t(w));
  const A* gain = static_cast<const A*>(a.gain);
  const A* bias = static_cast<const A*>(a.bias);
  for (int64_t r = begin; r < end; ++r) {
    const A* x = row(static_cast<const T*>(a.x) + r * a.x_stride, w, scratch.data());
    if (a.residual) {
      const A* other = row(static_cast<const T*>(a.residual) + r * a.residual_stride, w, scratch.data() + w);
      T* out = static_cast<T*>(a.sum) + r * w;
      A* total = place(out, scratch.data() + 2 * w);
      if (a.mask.on) {
        A* kept = scratch.data() + 3 * w;
        drop(a.mask, r * w, x, w, kept);
        x = kept;
      }
      for (int64_t i = 0; i < w; ++i) total[i] = x[i] + other[i];
      finish(out, w, total);
      x = row<T>(out, w, scratch.data());  // what backward will see, rounded as it is stored
    }
    A mean = 0, square = 0;
    if (a.mean) {
      moments(x, w, mean, square);
      static_cast<A*>(a.mean)[r] = mean;
    } else {
      square = sum<A>(w, [&](int64_t i) { return x[i] * x[i]; });
    }
    A rstd = A(1) / std::sqrt(square * A(a.scale) + A(a.eps));
    static_cast<A*>(a.rstd)[r] = rstd;
    T* out = static_cast<T*>(a.y) + r * w;
    A* y = place(out, scratch.data() + w);
    normalized(x, w, mean, rstd, gain, bias, y);
    finish(out, w, y);
  }
}

// A row's part of the sums: those over the row, and its addends to those over the rows.
template <class A>
struct Row {
  const A *dy, *x, *gain;
  A *dgain, *dbias;
  A mean, rstd;
  int64_t w;
};
template <bool want_gain, bool want_bias, class A>
static void reduce(const Row<A>& r, A& dot, A& total) {
  sums<A>(r.w, dot, total, [&](int64_t i, A& a, A& b) {
    const A d = r.dy[i], h = r.x[i] - r.mean, g = d * r.gain[i];
    a += g * h, b += g;
    if constexpr (want_gain) r.dgain[i] += d * (h * r.rstd);
    if constexpr (want_bias) r.dbias[i] += d;
  });
}
template <class A>
static void reduce(const Row<A>& r, A& dot, A& total) {
  if (r.dgain && r.dbias)
    reduce<true, true>(r, dot, total);
  else if (r.dgain)
    reduce<true, false>(r, dot, total);
  else if (r.dbias)
    reduce<false, true>(r, dot, total);
  else
    reduce<false, false>(r, dot, total);
}

// Rows that are summed in arithmetic form; their sums are added in double, so that errors do not grow with the rows.
constexpr int64_t kBlock = 16;
template <class A>
static void flush(A* block, int64_t w, double* total) {
  if (!block) return;
#pragma omp simd
  for (int64_t i = 0; i < w; ++i) {
    total[i] += block[i];
    block[i] = 0;
  }
}

template <class T>
static void backward(const NormBackward& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  const int64_t w = a.width;
  std::vector<A> scratch(5 * size_t(w));
  const A* gain = static_cast<const A*>(a.gain);
  std::vector<A> ones(gain ? 0 : size_t(w), A(1));
  if (!gain) gain = ones.data();
  std::vector<A> blocks((a.dgain ? w : 0) + (a.dbias ? w : 0));
  A* dgain = a.dgain ? blocks.data() : nullptr;
  A* dbias = a.dbias ? blocks.data() + (a.dgain ? w : 0) : nullptr;
  for (int64_t c = begin; c < end; ++c) {
    double* dgains = a.dgain ? a.dgain + c * w : nullptr;
    double* dbiases = a.dbias ? a.dbias + c * w : nullptr;
    if (dgains) std::fill_n(dgains, w, 0.0);
    if (dbiases) std::fill_n(dbiases, w, 0.0);
    const int64_t first = c * a.chunk, last = std::min(first + a.chunk, a.rows);
    for (int64_t r = first; r < last; ++r) {
      if ((r - first) % kBlock == 0) {
        flush(dgain, w, dgains);
        flush(dbias, w, dbiases);
      }
      const A* dy = row(static_cast<const T*>(a.dy) + r * a.dy_stride, w, scratch.data());
      const A* x = row(static_cast<const T*>(a.x) + r * a.x_stride, w, scratch.data() + w);
      const A mean = a.mean ? static_cast<const A*>(a.mean)[r] : A(0);
      const A rstd = static_cast<const A*>(a.rstd)[r];
      A dot, total;
      reduce<A>({dy, x, gain, dgain, dbias, mean, rstd, w}, dot, total);
      if (!a.dx) continue;
      const A along = dot * rstd * rstd * A(a.scale), shift = a.mean ? total * A(a.scale) : A(0);
      T* out = static_cast<T*>(a.dx) + r * w;
      A* dx = place(out, scratch.data() + 2 * w);
      if (a.extra) {
        const A* extra = row(static_cast<const T*>(a.extra) + r * a.extra_stride, w, scratch.data() + 3 * w);
        for (int64_t i = 0; i < w; ++i)
          dx[i] = rstd * (dy[i] * gain[i] - shift - (x[i] - mean) * along) + extra[i];
      } else {
        for (int64_t i = 0; i < w; ++i) dx[i] = rstd * (dy[i] * gain[i] - shift - (x[i] - mean) * along);
      }
      finish(out, w, dx);
      if (a.dropped) {
        T* dropped_out = static_cast<T*>(a.dropped) + r * w;
        A* dropped = place(dropped_out, scratch.data() + 4 * w);
        drop(a.mask, r * w, dx, w, dropped);
        finish(dropped_out, w, dropped);
      }
      if (a.y) {
        T* y_out = static_cast<T*>(a.y) + r * w;
        A* y = place(y_out, scratch.data() + 4 * w);
        normalized(x, w, mean, rstd, static_cast<const A*>(a.gain), static_cast<const A*>(a.bias), y);
        finish(y_out, w, y);
      }
    }
    flush(dgain, w, dgains);
    flush(dbias, w, dbiases);
  }
}

void add_norm(Loops& loops) {
  loops.norm_forward[kFloat] = forward<float>;
  loops.norm_forward[kDouble] = forward<double>;
  loops.norm_forward[kBFloat16] = forward<bf16>;
  loops.norm_forward[kHalf] = forward<f16>;
  loops.norm_backward[kFloat] = backward<float>;
  loops.norm_backward[kDouble] = backward<double>;
  loops.norm_backward[kBFloat16] = backward<bf16>;
  loops.norm_backward[kHalf] = backward<f16>;
}

}  // namespace FUSIBLE_ISA
