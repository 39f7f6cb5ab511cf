// Cross entropy of rows of logits, forward and backward, and both at once.
//
// With z the logits (behind the cap), p their softmax, w the classes' weights, t a row's target, s the smoothing and
// L = log sum exp z:
//
//   loss = (1 - s) w_t (L - z_t) + s/v sum_j w_j (L - z_j) + z_loss w_t L²
//   dz_j = p_j ((1 - s) w_t + s/v sum w + 2 z_loss w_t L) - s/v w_j - [j = t] (1 - s) w_t
#include "cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "convert.h"
#include "loops.h"
#include "math.h"

namespace FUSIBLE_ISA {

// The largest element; NaN is passed over.
template <class A>
static A largest(const A* z, int64_t n) {
  constexpr int64_t lanes = 64;
  A most[lanes];
  for (A& m : most) m = -std::numeric_limits<A>::infinity();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
#pragma omp simd
    for (int64_t k = 0; k < lanes; ++k) most[k] = z[i + k] > most[k] ? z[i + k] : most[k];
  }
  for (int64_t k = 0; i + k < n; ++k) most[k] = z[i + k] > most[k] ? z[i + k] : most[k];
  for (int64_t half = lanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) most[k] = most[k + half] > most[k] ? most[k + half] : most[k];
  return most[0];
}

// One row. `z` and what the gradient is written to may be one array unless there is a cap.
template <class A>
struct Logits {
  const A *z, *weight;
  int64_t v, target;
  A cap;

  A of_class(int64_t j) const { return weight ? weight[j] : A(1); }

  // The sum of exponentials, which go to `e` unless that is null, and, if asked for, the weighted sum of z - most.
  void exponentials(A most, bool smooth, A* e, A& sum_exp, A& distance) const {
    const auto each = [&](auto store, auto along) {
      sums<A>(v, sum_exp, distance, [&](int64_t j, A& a, A& b) {
        const A below = z[j] - most, exponential = exp_negative(below);
        if constexpr (store) e[j] = exponential;
        a += exponential;
        along(j, below, b);
      });
    };
    const auto plain = [](int64_t, A, A&) {};
    const auto ones = [](int64_t, A below, A& b) { b += below; };
    const auto weighted = [&](int64_t j, A below, A& b) { b += weight[j] * below; };
    const auto stored = [&](auto along) {
      if (e)
        each(std::true_type{}, along);
      else
        each(std::false_type{}, along);
    };
    if (!smooth)
      stored(plain);
    else if (weight)
      stored(weighted);
    else
      stored(ones);
  }

  // `dx = (factor e - shift w - [j = target] hit)`, behind the cap; e(j) are exponentials.
  template <class E>
  void gradient(const E& e, A factor, A shift, A hit, A* dx) const {
    A at_target = factor * e(target) - shift * of_class(target) - hit;
    if (cap > 0) {
      const A ratio = z[target] / cap;
      at_target *= 1 - ratio * ratio;
    }
    if (shift == 0) {  // class weights may be infinite
#pragma omp simd
      for (int64_t j = 0; j < v; ++j) dx[j] = factor * e(j);
    } else if (weight) {
#pragma omp simd
      for (int64_t j = 0; j < v; ++j) dx[j] = factor * e(j) - shift * weight[j];
    } else {
#pragma omp simd
      for (int64_t j = 0; j < v; ++j) dx[j] = factor * e(j) - shift;
    }
    if (cap > 0) {
      const A inverse = 1 / cap;
#pragma omp simd
      for (int64_t j = 0; j < v; ++j) dx[j] *= 1 - (z[j] * inverse) * (z[j] * inverse);
    }
    dx[target] = at_target;
  }
};

// A call's options in arithmetic form, and room for rows that are not read or written where they lie.
template <class T>
struct Work {
  using A = wide<T>;
  static constexpr bool narrow = !std::is_same_v<T, A>;
  const CrossEntropy& a;
  const A s, z_loss, cap, per_class, total;
  std::vector<A> logits, gradients;

  explicit Work(const CrossEntropy& args)
      : a(args), s(A(args.smoothing)), z_loss(A(args.z_loss)), cap(A(args.cap)),
        per_class(A(args.smoothing / double(std::max<int64_t>(args.width, 1)))), total(A(args.total)),
        logits(narrow || args.cap > 0 ? size_t(args.width) : 0), gradients(narrow && args.dx ? size_t(args.width) : 0) {}

  Logits<A> row_of(int64_t r) {
    const int64_t v = a.width;
    const A* z = row(static_cast<const T*>(a.x) + r * a.x_stride, v, logits.data());
    if (cap > 0) {
      A* capped = logits.data();
      const A inverse = 1 / cap;
#pragma omp simd
      for (int64_t j = 0; j < v; ++j) capped[j] = cap * tanh(z[j] * inverse);
      z = capped;
    }
    return {z, static_cast<const A*>(a.weight), v, a.target[r * a.target_stride], cap};
  }

  T* out_of(int64_t r) const { return static_cast<T*>(a.dx) + r * a.width; }

  void no_gradient(int64_t r) const {
    T* out = out_of(r);
    std::fill_n(out, a.width, T{});
  }

  // The row's gradient from exponentials e, of which `per_sum` is one over the sum.
  template <class E>
  void gradient(const Logits<A>& l, int64_t r, A lse, const E& e, A per_sum, A* dx) {
    const A scale = static_cast<const A*>(a.scale)[r * a.scale_stride];
    const A w = l.of_class(l.target), hit = (1 - s) * w;
    const A along = hit + per_class * total + 2 * z_loss * w * lse;
    l.gradient(e, scale * along * per_sum, scale * per_class, scale * hit, dx);
    finish(out_of(r), a.width, dx);
  }
};

template <class T>
static void forward(const CrossEntropy& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  Work<T> work(a);
  A *losses = static_cast<A*>(a.loss), *stats = static_cast<A*>(a.stats);
  for (int64_t r = begin; r < end; ++r) {
    if (a.target[r * a.target_stride] == a.ignored) {
      losses[r] = stats[2 * r] = stats[2 * r + 1] = 0;
      if (a.dx) work.no_gradient(r);
      continue;
    }
    const Logits<A> l = work.row_of(r);
    const A at_target = l.z[l.target], most = largest(l.z, l.v), w = l.of_class(l.target);
    A* e = a.dx ? place(work.out_of(r), work.gradients.data()) : nullptr;
    A sum_exp, distance;
    l.exponentials(most, work.s != 0, e, sum_exp, distance);
    const A log_sum = std::log(sum_exp), lse = most + log_sum;
    A loss = (1 - work.s) * (w * ((most - at_target) + log_sum));
    if (work.s != 0) loss += work.per_class * (work.total * log_sum - distance);
    if (work.z_loss != 0) loss += work.z_loss * w * (lse * lse);
    losses[r] = loss, stats[2 * r] = most, stats[2 * r + 1] = log_sum;
    if (a.dx) work.gradient(l, r, work.z_loss != 0 ? lse : 0, [&](int64_t j) { return e[j]; }, 1 / sum_exp, e);
  }
}

template <class T>
static void backward(const CrossEntropy& a, int64_t begin, int64_t end) {
  using A = wide<T>;
  Work<T> work(a);
  const A* stats = static_cast<const A*>(a.stats);
  for (int64_t r = begin; r < end; ++r) {
    if (a.target[r * a.target_stride] == a.ignored) {
      work.no_gradient(r);
      continue;
    }
    const Logits<A> l = work.row_of(r);
    const A most = stats[2 * r], log_sum = stats[2 * r + 1], lse = work.z_loss != 0 ? most + log_sum : 0;
    const auto e = [&](int64_t j) { return exp_negative((l.z[j] - most) - log_sum); };
    work.gradient(l, r, lse, e, A(1), place(work.out_of(r), work.gradients.data()));
  }
}

void add_cross_entropy(Loops& loops) {
  loops.cross_entropy_forward[kFloat] = forward<float>;
  loops.cross_entropy_forward[kDouble] = forward<double>;
  loops.cross_entropy_forward[kBFloat16] = forward<bf16>;
  loops.cross_entropy_forward[kHalf] = forward<f16>;
  loops.cross_entropy_backward[kFloat] = backward<float>;
  loops.cross_entropy_backward[kDouble] = backward<double>;
  loops.cross_entropy_backward[kBFloat16] = backward<bf16>;
  loops.cross_entropy_backward[kHalf] = backward<f16>;
}

}  // namespace FUSIBLE_ISA
