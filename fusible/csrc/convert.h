// Rows between storage (float, double, bfloat16, half) and arithmetic (float, double).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa.h"
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

namespace FUSIBLE_ISA {

// The arithmetic type of a storage type.
template <class T>
using wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float to_float(bf16 v) {
  uint32_t u = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline bf16 to_bf16(float f) {  // to nearest, ties to even; NaN stays NaN
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet = (u >> 16) | 0x40u;
  return {uint16_t((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

inline float to_float(f16 v) {
  uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu, u;
  if (rest >= 0x7c00u) {
    u = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
  } else if (rest >= 0x400u) {
    u = sign | ((rest << 13) + 0x38000000u);
  } else {
    float f = float(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline f16 to_f16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint16_t sign = uint16_t((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  if (u >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  if (u < 0x38800000u) {  // subnormal: adding 0.5 rounds at 2^-24
    float g;
    std::memcpy(&g, &u, 4);
    g += 0.5f;
    std::memcpy(&u, &g, 4);
    return {uint16_t(sign | (u - 0x3f000000u))};
  }
  return {uint16_t(sign | ((u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13))};
}

inline void load(const float* in, int64_t n, float* out) { std::memcpy(out, in, size_t(n) * 4); }
inline void load(const double* in, int64_t n, double* out) { std::memcpy(out, in, size_t(n) * 8); }
inline void load(const bf16* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(in[i]);
}
inline void load(const f16* in, int64_t n, float* out) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
  for (; i < n; ++i) out[i] = to_float(in[i]);
}

inline void store(const float* in, int64_t n, float* out) { std::memcpy(out, in, size_t(n) * 4); }
inline void store(const double* in, int64_t n, double* out) { std::memcpy(out, in, size_t(n) * 8); }
inline void store(const float* in, int64_t n, bf16* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(in[i]);
}
inline void store(const float* in, int64_t n, f16* out) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(in + i), 0));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
#endif
  for (; i < n; ++i) out[i] = to_f16(in[i]);
}

// A row in arithmetic form: the row itself if it is stored so, else converted into `scratch`.
template <class T>
inline const wide<T>* row(const T* in, int64_t n, wide<T>* scratch) {
  if constexpr (std::is_same_v<T, wide<T>>) {
    return in;
  } else {
    load(in, n, scratch);
    return scratch;
  }
}

// Where to write a row: the place itself if it stores arithmetic form, else `scratch`, to be given to `finish`.
template <class T>
inline wide<T>* place(T* out, wide<T>* scratch) {
  if constexpr (std::is_same_v<T, wide<T>>) {
    return out;
  } else {
    return scratch;
  }
}

template <class T>
inline void finish(T* out, int64_t n, const wide<T>* scratch) {
  if constexpr (!std::is_same_v<T, wide<T>>) store(scratch, n, out);
}

// Sums over i < n, in so many lanes that they do not wait for their own additions; short ones in few, since the lanes are
// added up at the end. The order depends on n alone.
constexpr int64_t kShortSum = 512;

template <int64_t lanes, class A, class F>
inline A sum_in(int64_t n, const F& f) {
  A acc[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
#pragma omp simd
    for (int64_t k = 0; k < lanes; ++k) acc[k] += f(i + k);
  }
  for (int64_t k = 0; i + k < n; ++k) acc[k] += f(i + k);
  for (int64_t half = lanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) acc[k] += acc[k + half];
  return acc[0];
}

// The sum of f(i).
template <class A, class F>
inline A sum(int64_t n, const F& f) {
  return n < kShortSum ? sum_in<16, A>(n, f) : sum_in<64, A>(n, f);
}

template <int64_t lanes, class A, class F>
inline void sums_in(int64_t n, A& first, A& second, const F& f) {
  A a[lanes] = {}, b[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
#pragma omp simd
    for (int64_t k = 0; k < lanes; ++k) f(i + k, a[k], b[k]);
  }
  for (int64_t k = 0; i + k < n; ++k) f(i + k, a[k], b[k]);
  for (int64_t half = lanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) a[k] += a[k + half], b[k] += b[k + half];
  first = a[0], second = b[0];
}

// Two sums; f(i, a, b) adds to a and b, and may write what only i depends on.
template <class A, class F>
inline void sums(int64_t n, A& first, A& second, const F& f) {
  if (n < kShortSum)
    sums_in<16>(n, first, second, f);
  else
    sums_in<64>(n, first, second, f);
}

}  // namespace FUSIBLE_ISA
