// Gated activations, forward and backward. A new one is a struct with `value` and `partials`, and a row in `kSteps`.
#include "gated.h"

#include "convert.h"
#include "loops.h"
#include "math.h"
#include "tiles.h"

namespace FUSIBLE_ISA {

// y, dy/da and dy/db, the last two times d.
template <class A>
struct Partials {
  A y, da, db;
};

// act(a) b.
template <class A, class F>
struct Product {
  explicit Product(const double*) {}
  FUSIBLE_INLINE A value(A a, A b) const { return F::value(a) * b; }
  FUSIBLE_INLINE Partials<A> partials(A d, A a, A b) const {
    const A gate = F::value(a);
    return {gate * b, F::gradient(d * b, a), d * gate};
  }
};

// `x` within [low, high]; NaN stays.
template <class A>
FUSIBLE_INLINE A clamp(A x, A low, A high) {
  x = low > x ? low : x;
  return high < x ? high : x;
}

// a' sigmoid(alpha a') (b' + offset) with a' = min(a, limit) and b' = b within +-limit.
template <class A>
struct ClampedSwiGLU {
  A limit, alpha, offset;
  explicit ClampedSwiGLU(const double* o) : limit(A(o[0])), alpha(A(o[1])), offset(A(o[2])) {}
  FUSIBLE_INLINE A value(A a, A b) const {
    a = limit < a ? limit : a;
    return a * sigmoid(alpha * a) * (clamp(b, -limit, limit) + offset);
  }
  FUSIBLE_INLINE Partials<A> partials(A d, A a, A b) const {
    const A low = limit < a ? limit : a, other = clamp(b, -limit, limit) + offset;
    const A gate = low * sigmoid(alpha * low), da = dswish(d * other, low, alpha), db = d * gate;
    return {gate * other, a <= limit ? da : A(0), std::fabs(b) <= limit ? db : A(0)};
  }
};

// beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2).
template <class A>
struct SiTUGLU {
  A beta1, beta2, inverse1, inverse2;
  explicit SiTUGLU(const double* o) : beta1(A(o[0])), beta2(A(o[1])), inverse1(A(1 / o[0])), inverse2(A(1 / o[1])) {}
  FUSIBLE_INLINE A value(A a, A b) const {
    return beta1 * tanh(a * inverse1) * sigmoid(a) * (beta2 * tanh(b * inverse2));
  }
  FUSIBLE_INLINE Partials<A> partials(A d, A a, A b) const {
    const A t = tanh(a * inverse1), u = tanh(b * inverse2), gate = beta1 * t, other = beta2 * u;
    const Logistic<A> s = logistic(a);
    return {gate * s.value * other, d * other * (s.value * (1 - t * t) + gate * s.slope), d * gate * s.value * (1 - u * u)};
  }
};

template <class A>
struct Steps {
  void (*value)(int64_t n, const A* a, const A* b, A* y, const double* options);
  // y may be null.
  void (*partials)(int64_t n, const A* dy, const A* a, const A* b, A* da, A* db, A* y, const double* options);
};
template <class F, class A>
static constexpr Steps<A> steps() {
  return {[](int64_t n, const A* a, const A* b, A* y, const double* options) {
            const F f(options);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = f.value(a[i], b[i]);
          },
          [](int64_t n, const A* dy, const A* a, const A* b, A* da, A* db, A* y, const double* options) {
            const F f(options);
            if (y) {
#pragma omp simd
              for (int64_t i = 0; i < n; ++i) {
                const Partials<A> p = f.partials(dy[i], a[i], b[i]);
                da[i] = p.da, db[i] = p.db, y[i] = p.y;
              }
            } else {
#pragma omp simd
              for (int64_t i = 0; i < n; ++i) {
                const Partials<A> p = f.partials(dy[i], a[i], b[i]);
                da[i] = p.da, db[i] = p.db;
              }
            }
          }};
}

// In the order of `Gated`.
template <class A>
static constexpr Steps<A> kSteps[kGateds] = {
    steps<Product<A, Silu>, A>(), steps<Product<A, Gelu>, A>(),  steps<Product<A, GeluTanh>, A>(),
    steps<Product<A, QGelu>, A>(), steps<Product<A, Relu>, A>(), steps<Product<A, SRelu>, A>(),
    steps<Product<A, Sigmoid>, A>(), steps<ClampedSwiGLU<A>, A>(), steps<SiTUGLU<A>, A>()};

// Blocks shorter than this are taken apart into tiles of gates and of others; longer ones are worked on where they are.
constexpr int64_t kShort = 64;

static bool is_short(const GatedShape& s) { return s.block < kShort && s.block < s.half; }

// Rows that are short and dense are joined to one, whose blocks alternate as theirs do.
static int64_t joined(GatedShape& s, int64_t rows, bool dense) {
  if (!dense || 2 * s.half > kTile) return 1;
  s.half *= rows;
  return rows;
}

// A tile of n outputs of a row: the first is number `column`, and its gate is element `gate` of the row of x and its other
// factor is element `other`. If blocks are short, the tile is whole blocks and its x the 2n elements from 2 `column`.
template <class F>
static void for_outputs(const GatedShape& s, const F& f) {
  if (is_short(s)) {
    const int64_t step = kTile / s.block * s.block;
    for (int64_t c = 0; c < s.half; c += step) f(c, 2 * c, 2 * c, c + step < s.half ? step : s.half - c);
    return;
  }
  for (int64_t first = 0; first < s.half; first += s.block)
    for (int64_t c = 0; c < s.block; c += kTile) {
      const int64_t at = 2 * first + c, then = at + s.block;
      f(first + c, s.gate_first ? at : then, s.gate_first ? then : at, c + kTile < s.block ? kTile : s.block - c);
    }
}

template <class A>
static void take_apart(const A* x, int64_t n, int64_t block, A* first, A* second) {
  if (block == 1) {
    for (int64_t i = 0; i < n; ++i) first[i] = x[2 * i], second[i] = x[2 * i + 1];
    return;
  }
  for (int64_t i = 0; i < n; i += block, x += 2 * block)
    for (int64_t k = 0; k < block; ++k) first[i + k] = x[k], second[i + k] = x[block + k];
}

template <class A>
static void put_together(const A* first, const A* second, int64_t n, int64_t block, A* x) {
  if (block == 1) {
    for (int64_t i = 0; i < n; ++i) x[2 * i] = first[i], x[2 * i + 1] = second[i];
    return;
  }
  for (int64_t i = 0; i < n; i += block, x += 2 * block)
    for (int64_t k = 0; k < block; ++k) x[k] = first[i + k], x[block + k] = second[i + k];
}

// n elements of x in arithmetic form, with the bias, if there is one, added and the sum written to `pre`.
template <class T>
static const wide<T>* biased(const T* x, int64_t n, const wide<T>* bias, T* pre, wide<T>* tile, wide<T>* other_tile) {
  using A = wide<T>;
  const A* in = row(x, n, tile);
  if (!bias) return in;
  A* sum = place(pre, other_tile);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sum[i] = in[i] + bias[i];
  finish(pre, n, sum);
  return row<T>(pre, n, tile);  // rounded as it is stored, which is what backward will see
}

template <class T>
static void forward(const GatedForward& g, int64_t begin, int64_t end) {
  using A = wide<T>;
  alignas(64) A x_tile[2 * kTile], sum_tile[2 * kTile], a_tile[kTile], b_tile[kTile], y_tile[kTile];
  GatedShape s = g.shape;
  const int64_t h = s.half;
  const auto value = kSteps<A>[s.which].value;
  const A* bias = static_cast<const A*>(g.bias);
  const int64_t step = joined(s, end - begin, !bias && g.x_stride == 2 * h);
  for (int64_t r = begin; r < end; r += step) {
    const T* x = static_cast<const T*>(g.x) + r * g.x_stride;
    T* pre = g.pre ? static_cast<T*>(g.pre) + r * 2 * h : nullptr;
    for_outputs(s, [&](int64_t c, int64_t gate, int64_t other, int64_t n) {
      auto at = [&](int64_t i, int64_t count, A* tile, A* tile2) {
        return biased(x + i, count, bias ? bias + i : nullptr, pre ? pre + i : nullptr, tile, tile2);
      };
      T* out = static_cast<T*>(g.y) + r * h + c;
      A* y = place(out, y_tile);
      const A *a = a_tile, *b = b_tile;
      if (is_short(s)) {
        const A* pairs = at(gate, 2 * n, x_tile, sum_tile);
        take_apart(pairs, n, s.block, s.gate_first ? a_tile : b_tile, s.gate_first ? b_tile : a_tile);
      } else {
        a = at(gate, n, x_tile, sum_tile), b = at(other, n, x_tile + kTile, sum_tile + kTile);
      }
      value(n, a, b, y, s.options);
      finish(out, n, y);
    });
  }
}

// `sums`: [2h] in arithmetic form, to which the sum of dx over the rows is added, or null.
template <class T>
static void backward(const GatedBackward& g, int64_t begin, int64_t end, void* sums) {
  using A = wide<T>;
  alignas(64) A x_tile[2 * kTile], dx_tile[2 * kTile], a_tile[kTile], b_tile[kTile], da_tile[kTile], db_tile[kTile];
  alignas(64) A dy_tile[kTile], y_tile[kTile];
  GatedShape s = g.shape;
  const int64_t h = s.half;
  const auto partials = kSteps<A>[s.which].partials;
  A* total = static_cast<A*>(sums);
  auto add = [&](const A* dx, int64_t at, int64_t n) {
    if (!total) return;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) total[at + i] += dx[i];
  };
  const int64_t step = joined(s, end - begin, !total && g.x_stride == 2 * h && g.dy_stride == h);
  for (int64_t r = begin; r < end; r += step) {
    const T* x = static_cast<const T*>(g.x) + r * g.x_stride;
    T* dx = static_cast<T*>(g.dx) + r * 2 * h;
    for_outputs(s, [&](int64_t c, int64_t gate, int64_t other, int64_t n) {
      const A* dy = row(static_cast<const T*>(g.dy) + r * g.dy_stride + c, n, dy_tile);
      T* y_out = g.y ? static_cast<T*>(g.y) + r * h + c : nullptr;
      A* y = y_out ? place(y_out, y_tile) : nullptr;
      if (is_short(s)) {
        const bool first = s.gate_first;
        take_apart(row(x + gate, 2 * n, x_tile), n, s.block, first ? a_tile : b_tile, first ? b_tile : a_tile);
        partials(n, dy, a_tile, b_tile, da_tile, db_tile, y, s.options);
        A* both = place(dx + gate, dx_tile);
        put_together(first ? da_tile : db_tile, first ? db_tile : da_tile, n, s.block, both);
        add(both, gate, 2 * n);
        finish(dx + gate, 2 * n, both);
      } else {
        A *da = place(dx + gate, da_tile), *db = place(dx + other, db_tile);
        partials(n, dy, row(x + gate, n, a_tile), row(x + other, n, b_tile), da, db, y, s.options);
        add(da, gate, n), add(db, other, n);
        finish(dx + gate, n, da), finish(dx + other, n, db);
      }
      if (y) finish(y_out, n, y);
    });
  }
}

void add_gated(Loops& loops) {
  loops.gated_forward[kFloat] = forward<float>;
  loops.gated_forward[kDouble] = forward<double>;
  loops.gated_forward[kBFloat16] = forward<bf16>;
  loops.gated_forward[kHalf] = forward<f16>;
  loops.gated_backward[kFloat] = backward<float>;
  loops.gated_backward[kDouble] = backward<double>;
  loops.gated_backward[kBFloat16] = backward<bf16>;
  loops.gated_backward[kHalf] = backward<f16>;
}

}  // namespace FUSIBLE_ISA
