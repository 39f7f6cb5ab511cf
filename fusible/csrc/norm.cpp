// LayerNorm, RMSNorm and L2 normalisation, forward and backward; a residual may be added in before.
#include "norm.h"

#include <cmath>
#include <vector>

#include "convert.h"
#include "loops.h"

namespace FUSIBLE_ISA {

template <class T>
static void forward(const NormForward& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  const int64_t w = a.width;
  std::vector<A> scratch(3 * size_t(w));
  const A* gain = static_cast<const A*>(a.gain);
  const A* bias = static_cast<const A*>(a.bias);
  for (int64_t r = begin; r < end; ++r) {
    const A* x = row(static_cast<const T*>(a.x) + r * a.x_stride, w, scratch.data());
    if (a.residual) {
      const A* other = row(static_cast<const T*>(a.residual) + r * a.residual_stride, w, scratch.data() + w);
      T* out = static_cast<T*>(a.sum) + r * w;
      A* total = place(out, scratch.data() + 2 * w);
      for (int64_t i = 0; i < w; ++i) total[i] = x[i] + other[i];
      finish(out, w, total);
      x = row<T>(out, w, scratch.data());  // what backward will see, rounded as it is stored
    }
    A mean = 0;
    if (a.mean) {
      mean = sum<A>(w, [&](int64_t i) { return x[i]; }) / A(w);
      static_cast<A*>(a.mean)[r] = mean;
    }
    A square = sum<A>(w, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
    A rstd = A(1) / std::sqrt(square * A(a.scale) + A(a.eps));
    static_cast<A*>(a.rstd)[r] = rstd;
    T* out = static_cast<T*>(a.y) + r * w;
    A* y = place(out, scratch.data() + w);
    if (gain && bias) {
      for (int64_t i = 0; i < w; ++i) y[i] = (x[i] - mean) * rstd * gain[i] + bias[i];
    } else if (gain) {
      for (int64_t i = 0; i < w; ++i) y[i] = (x[i] - mean) * rstd * gain[i];
    } else {
      for (int64_t i = 0; i < w; ++i) y[i] = (x[i] - mean) * rstd;
    }
    finish(out, w, y);
  }
}

template <class T>
static void backward(const NormBackward& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  const int64_t w = a.width;
  std::vector<A> scratch(4 * size_t(w));
  const A* gain = static_cast<const A*>(a.gain);
  std::vector<A> ones(gain ? 0 : size_t(w), A(1));
  if (!gain) gain = ones.data();
  for (int64_t c = begin; c < end; ++c) {
    A* dgain = a.dgain ? static_cast<A*>(a.dgain) + c * w : nullptr;
    A* dbias = a.dbias ? static_cast<A*>(a.dbias) + c * w : nullptr;
    for (int64_t i = 0; dgain && i < w; ++i) dgain[i] = 0;
    for (int64_t i = 0; dbias && i < w; ++i) dbias[i] = 0;
    const int64_t last = (c + 1) * a.chunk < a.rows ? (c + 1) * a.chunk : a.rows;
    for (int64_t r = c * a.chunk; r < last; ++r) {
      const A* dy = row(static_cast<const T*>(a.dy) + r * a.dy_stride, w, scratch.data());
      const A* x = row(static_cast<const T*>(a.x) + r * a.x_stride, w, scratch.data() + w);
      const A mean = a.mean ? static_cast<const A*>(a.mean)[r] : A(0);
      const A rstd = static_cast<const A*>(a.rstd)[r];
      if (dgain && dbias) {
        for (int64_t i = 0; i < w; ++i) {
          dgain[i] += dy[i] * ((x[i] - mean) * rstd);
          dbias[i] += dy[i];
        }
      } else if (dgain) {
        for (int64_t i = 0; i < w; ++i) dgain[i] += dy[i] * ((x[i] - mean) * rstd);
      } else if (dbias) {
        for (int64_t i = 0; i < w; ++i) dbias[i] += dy[i];
      }
      if (!a.dx) continue;
      const A dot = sum<A>(w, [&](int64_t i) { return dy[i] * gain[i] * (x[i] - mean); });
      const A total = a.mean ? sum<A>(w, [&](int64_t i) { return dy[i] * gain[i]; }) : A(0);
      const A along = dot * rstd * rstd * A(a.scale), shift = total * A(a.scale);
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
    }
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
