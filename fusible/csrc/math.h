// Elementary functions that vectorise inside plain loops: no branch, no table, no call. float and double.
//
// Coefficients are minimax fits by Remez exchange in 60 digits; `error` is the fit's largest relative error, before
// rounding. Where a clamp ends the result is exactly 0, so that a constant which a compiler computes ahead from the clamp
// is no denormal. NaN passes: a comparison with it is false and leaves it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"

#define FUSIBLE_INLINE [[gnu::always_inline]] inline

namespace FUSIBLE_ISA {

// c0 + c1 x + c2 x² + ...
template <class A>
FUSIBLE_INLINE A polynomial(A, A c0) {
  return c0;
}
template <class A, class... Rest>
FUSIBLE_INLINE A polynomial(A x, A c0, Rest... rest) {
  return c0 + x * polynomial(x, rest...);
}

// e^x for x <= 0; 0 instead of denormals (x < -87.7, x < -708.7).
//
// Adding `magic`, 1.5 times the power of two from which on floats are integers, plus the exponent's bias, rounds
// x / ln 2 to an integer n and leaves n + bias in the lowest bits, from where it is shifted into the exponent. ln 2 is
// subtracted in two parts, the first so short that n times it is exact; where products are not rounded before they are
// added, one part does for float.
FUSIBLE_INLINE float exp_negative(float x) {
  constexpr float magic = 12582912.0f + 127.0f;
  x = -88.0f > x ? -88.0f : x;
  const float shifted = x * 1.44269504f + magic, n = shifted - magic;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const float r = x - n * 0.693147182f;  // |r| <= ln 2 / 2
#else
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
#endif
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits <<= 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  const float p =
      polynomial(r, 0.5000000095f, 0.1666651883f, 0.0416662066f, 0.00836889057f, 0.00139504607f);  // error 3.2e-9
  return (1 + (r + r * r * p)) * scale;
}
FUSIBLE_INLINE double exp_negative(double x) {
  constexpr double magic = 6755399441055744.0 + 1023.0;
  x = -709.0 > x ? -709.0 : x;
  const double shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
  const double r = (x - n * 0.69314718036912381649) - n * 1.9082149292705877e-10;
  uint64_t bits;
  std::memcpy(&bits, &shifted, 8);
  bits <<= 52;
  double scale;
  std::memcpy(&scale, &bits, 8);
  const double p = polynomial(
      r, 0.50000000000000127, 0.16666666666666699, 0.041666666666515396, 0.0083333333333072350, 0.0013888888947021014,
      0.00019841269917321519, 2.4801489937487128e-5, 2.7557216355082156e-6, 2.7631281883014861e-7,
      2.5117844159311241e-8);  // error 3.5e-18
  return (1 + (r + r * r * p)) * scale;
}

// The logistic function s and its derivative s (1 - s). By e^-|x|, so that both are right in relative terms.
template <class A>
struct Logistic {
  A value, slope;
};
template <class A>
FUSIBLE_INLINE Logistic<A> logistic(A x) {
  const A e = exp_negative(-std::fabs(x)), upper = A(1) / (A(1) + e), lower = e * upper;
  return {x < 0 ? lower : upper, lower * upper};
}
template <class A>
FUSIBLE_INLINE A sigmoid(A x) {
  return logistic(x).value;
}

// Near 0 x + x³ p(x²), right in relative terms; elsewhere by e^-2|x|.
FUSIBLE_INLINE float tanh_polynomial(float s) {  // for s < 0.55², error 1.1e-9 of tanh
  return polynomial(s, -0.333333175f, 0.133325839f, -0.0538520387f, 0.021070436f, -0.00627231458f);
}
FUSIBLE_INLINE double tanh_polynomial(double s) {  // error 5.9e-19 of tanh
  return polynomial(
      s, -0.33333333333333298, 0.133333333333265573, -0.0539682539637226978, 0.0218694883847397825, -0.00886323258263934535,
      0.00359209183527323312, -0.00145554155535804758, 0.000588439038896891292, -0.000233367355422837449,
      8.32955826764830286e-5, -1.94815019171261574e-5);
}
template <class A>
FUSIBLE_INLINE A tanh(A x) {
  const A size = std::fabs(x), s = x * x, e = exp_negative(A(-2) * size);
  const A near = x + x * (s * tanh_polynomial(s)), far = 1 - 2 * e / (1 + e);
  return size < A(0.55) ? near : x < 0 ? -far : far;
}

// The standard normal distribution below -t, t = |x|: Φ(-t) = e^(-t²/2) p(u) / (t + 4) with u = t / (t + 4). Right in
// relative terms in the tail, and 1/2 exactly at 0.
template <class A>
struct Tail {
  A exponential, polynomial, inverse, u;
};
FUSIBLE_INLINE float tail_polynomial(float u) {  // error 7.7e-8 for t < 5.5; beyond, where Φ(-t) < 2e-8, at most 2 %
  return polynomial(u, 2.0f, -4.3830744f, 5.23359903f, -3.18767434f, 0.260155597f, 0.849675751f, -0.379538135f);
}
FUSIBLE_INLINE double tail_polynomial(double u) {  // error 5.8e-17
  return polynomial(
      u, 2.0, -4.38307648642284741, 5.23384702713834546, -3.1923040523470212, 0.295395632131012989, 0.716033975248800728,
      -0.120332674950963699, -0.217686954251821117, -0.00340481664152235591, 0.0794063156075415963, -0.0177147958600953807,
      0.145093771713456303, -0.490166928613325603, 1.12036519501305853, -2.11826008468108819, 3.19555646209668823,
      -3.78536621481482648, 3.48981955076236769, -2.44417585912211417, 1.24948760407013063, -0.439818941857657045,
      0.09683772598363944, -0.0109102160252936766, 0.00031704622496739758);
}
template <class A>
FUSIBLE_INLINE Tail<A> tail(A x) {
  const A size = std::fabs(x), t = size > A(64) ? A(64) : size;  // from where the exponential is 0
  const A inverse = A(1) / (t + 4), u = t * inverse;
  return {exp_negative(A(-0.5) * x * x), tail_polynomial(u), inverse, u};
}

// Activations: `value(x)` and `gradient(d, x) = d f'(x)`. At infinities they give what torch gives, NaN included. What the
// two have in common is computed once where both are inlined into one loop.

// x Φ(x) = max(x, 0) - t Φ(-t).
struct Gelu {
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    const Tail<A> n = tail(x);
    return (x > 0 ? x : 0 * x) - n.exponential * n.polynomial * n.u;
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {
    const Tail<A> n = tail(x);
    const A beyond = n.exponential * n.polynomial * n.inverse, density = A(0.39894228040143267794) * n.exponential;
    return d * ((x > 0 ? 1 - beyond : beyond) + x * density);
  }
};

// x (1 + tanh z) / 2 = x sigmoid(2z) with 2z = x (slope + cubic x²).
struct GeluTanh {
  static constexpr double slope = 1.5957691216057308, cubic = 0.044715 * slope;  // 2 sqrt(2/π)
  template <class A>
  FUSIBLE_INLINE static Logistic<A> gate(A x) {
    return logistic(x * (A(slope) + A(cubic) * (x * x)));
  }
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    return x * gate(x).value;
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {
    const Logistic<A> s = gate(x);
    return d * (s.value + x * s.slope * (A(slope) + A(3 * cubic) * (x * x)));
  }
};

// x sigmoid(alpha x).
template <class A>
FUSIBLE_INLINE A dswish(A d, A x, A alpha) {
  const Logistic<A> s = logistic(alpha * x);
  return d * (s.value + x * s.slope * alpha);
}

struct QGelu {
  static constexpr double alpha = 1.702;
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    return x * sigmoid(A(alpha) * x);
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {
    return dswish(d, x, A(alpha));
  }
};

struct Silu {
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    return x * sigmoid(x);
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {
    return dswish(d, x, A(1));
  }
};

struct Relu {
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    return x <= 0 ? A(0) : x;
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {  // x or y
    return x <= 0 ? A(0) : d;
  }
};

struct SRelu {
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    const A y = Relu::value(x);
    return y * y;
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {
    return x <= 0 ? A(0) : 2 * d * x;
  }
};

struct Sigmoid {
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    return sigmoid(x);
  }
  template <class A>
  FUSIBLE_INLINE static A gradient(A d, A x) {
    return d * logistic(x).slope;
  }
};

struct Tanh {
  template <class A>
  FUSIBLE_INLINE static A value(A x) {
    return tanh(x);
  }
};

}  // namespace FUSIBLE_ISA
