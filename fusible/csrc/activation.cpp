// Pointwise activations, forward and backward, with the bias before them and its gradient.
#include "activation.h"

#include "convert.h"
#include "loops.h"
#include "math.h"
#include "tiles.h"

namespace FUSIBLE_ISA {

// Gradients of what backward knows by its output: d f'(x) by y = f(x).
struct SigmoidOfOutput : Sigmoid {
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A y) {
    return d * ((1 - y) * y);
  }
};
struct TanhOfOutput : Tanh {
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A y) {
    return d * (1 - y * y);
  }
};

// `omp simd` says that elements are independent although two pointers may be one tile.
template <class A>
struct Steps {
  void (*value)(int64_t n, const A* x, A* y);
  void (*gradient)(int64_t n, const A* dy, const A* record, A* dx);
  void (*both)(int64_t n, const A* dy, const A* x, A* dx, A* y);
};
template <class F, class A>
static constexpr Steps<A> steps() {
  return {[](int64_t n, const A* x, A* y) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = F::value(x[i]);
          },
          [](int64_t n, const A* dy, const A* record, A* dx) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) dx[i] = F::gradient(dy[i], record[i]);
          },
          [](int64_t n, const A* dy, const A* x, A* dx, A* y) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
              const A d = dy[i], v = x[i];  // read once, so that both can share what they compute
              dx[i] = F::gradient(d, v);
              y[i] = F::value(v);
            }
          }};
}

// In the order of `Activation`.
template <class A>
static constexpr Steps<A> kSteps[kActivations] = {
    steps<Gelu, A>(),  steps<GeluTanh, A>(), steps<QGelu, A>(),           steps<Relu, A>(),
    steps<SRelu, A>(), steps<Silu, A>(),     steps<SigmoidOfOutput, A>(), steps<TanhOfOutput, A>()};

template <class T>
static void forward(const ActivationForward& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  alignas(64) A x_tile[kTile], pre_tile[kTile], y_tile[kTile], bias_tile[kTile];
  alignas(64) T rounded_tile[kTile];
  const auto value = kSteps<A>[a.which].value;
  const int64_t w = a.width;
  const bool dense = a.x_stride == w, group = grouped(w, dense);
  const A* bias = static_cast<const A*>(a.bias);
  if (bias && group) repeat(bias, w, bias_tile);
  for_tiles(begin, end, w, dense, [&](int64_t r, int64_t c, int64_t n) {
    const A* x = row(static_cast<const T*>(a.x) + r * a.x_stride + c, n, x_tile);
    if (bias) {
      const A* b = group ? bias_tile : bias + c;
      T* out = a.pre ? static_cast<T*>(a.pre) + r * w + c : rounded_tile;
      A* pre = place(out, pre_tile);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) pre[i] = x[i] + b[i];
      finish(out, n, pre);
      x = row<T>(out, n, x_tile);  // rounded as it is stored, which is what backward will see
    }
    T* out = static_cast<T*>(a.y) + r * w + c;
    A* y = place(out, y_tile);
    value(n, x, y);
    finish(out, n, y);
  });
}

// `sums`: [w] in arithmetic form, to which the sum of dx over the rows is added, or null.
template <class T>
static void backward(const ActivationBackward& a, int64_t begin, int64_t end, void* sums) {
  using A = wide<T>;
  alignas(64) A dy_tile[kTile], record_tile[kTile], dx_tile[kTile], y_tile[kTile], sum_tile[kTile];
  const Steps<A>& steps = kSteps<A>[a.which];
  const int64_t w = a.width;
  const bool dense = a.dy_stride == w && a.record_stride == w, group = grouped(w, dense);
  A* total = static_cast<A*>(sums);
  if (total && group)
    for (A& v : sum_tile) v = 0;
  for_tiles(begin, end, w, dense, [&](int64_t r, int64_t c, int64_t n) {
    const A* dy = row(static_cast<const T*>(a.dy) + r * a.dy_stride + c, n, dy_tile);
    const A* record = row(static_cast<const T*>(a.record) + r * a.record_stride + c, n, record_tile);
    T* out = static_cast<T*>(a.dx) + r * w + c;
    A* dx = place(out, dx_tile);
    if (a.y) {
      T* y_out = static_cast<T*>(a.y) + r * w + c;
      A* y = place(y_out, y_tile);
      steps.both(n, dy, record, dx, y);
      finish(y_out, n, y);
    } else {
      steps.gradient(n, dy, record, dx);
    }
    if (total) {
      A* sum = group ? sum_tile : total + c;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sum[i] += dx[i];
    }
    finish(out, n, dx);
  });
  if (total && group) fold(sum_tile, w, total);
}

void add_activation(Loops& loops) {
  loops.activation_forward[kFloat] = forward<float>;
  loops.activation_forward[kDouble] = forward<double>;
  loops.activation_forward[kBFloat16] = forward<bf16>;
  loops.activation_forward[kHalf] = forward<f16>;
  loops.activation_backward[kFloat] = backward<float>;
  loops.activation_backward[kDouble] = backward<double>;
  loops.activation_backward[kBFloat16] = backward<bf16>;
  loops.activation_backward[kHalf] = backward<f16>;
}

}  // namespace FUSIBLE_ISA
