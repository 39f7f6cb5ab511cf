// Philox4x32-10, a counter-based random generator: element i of a stream is word i % 4 of block i / 4, which is a function
// of the seed and i alone. Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once

#include <cstdint>

#include "isa.h"
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

struct Seed {
  uint64_t key, stream;  // the key, and the upper half of the counter
};

namespace FUSIBLE_ISA {
namespace philox {

constexpr uint32_t kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u, kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;
constexpr int kRounds = 10;

// Blocks that are made at once, whatever the instruction set.
constexpr int64_t kBlocks = 8, kElements = 4 * kBlocks;

// A vector of 64-bit lanes, each the low half of which is a word of one block; the upper halves are not looked at.
#if defined(__AVX512F__)
struct Lanes {
  __m512i v;
  static constexpr int64_t count = 8;
  static Lanes all(uint64_t x) { return {_mm512_set1_epi64(int64_t(x))}; }
  static Lanes from(uint64_t x) { return {_mm512_add_epi64(all(x).v, _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0))}; }
  Lanes times(Lanes o) const { return {_mm512_mul_epu32(v, o.v)}; }
  Lanes high() const { return {_mm512_srli_epi64(v, 32)}; }
  Lanes xor3(Lanes a, Lanes b) const { return {_mm512_ternarylogic_epi64(v, a.v, b.v, 0x96)}; }
};
inline void store(Lanes a, Lanes b, Lanes c, Lanes d, uint32_t* out) {  // a0 b0 c0 d0 a1 ...
  const __m512i ab = _mm512_mask_shuffle_epi32(a.v, 0xAAAA, b.v, _MM_PERM_CCAA);
  const __m512i cd = _mm512_mask_shuffle_epi32(c.v, 0xAAAA, d.v, _MM_PERM_CCAA);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64(ab, _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), cd));
  _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(ab, _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4), cd));
}
#elif defined(__AVX2__)
struct Lanes {
  __m256i v;
  static constexpr int64_t count = 4;
  static Lanes all(uint64_t x) { return {_mm256_set1_epi64x(int64_t(x))}; }
  static Lanes from(uint64_t x) { return {_mm256_add_epi64(all(x).v, _mm256_set_epi64x(3, 2, 1, 0))}; }
  Lanes times(Lanes o) const { return {_mm256_mul_epu32(v, o.v)}; }
  Lanes high() const { return {_mm256_srli_epi64(v, 32)}; }
  Lanes xor3(Lanes a, Lanes b) const { return {_mm256_xor_si256(_mm256_xor_si256(v, a.v), b.v)}; }
};
inline void store(Lanes a, Lanes b, Lanes c, Lanes d, uint32_t* out) {
  const __m256i ab = _mm256_blend_epi32(a.v, _mm256_slli_epi64(b.v, 32), 0xAA);
  const __m256i cd = _mm256_blend_epi32(c.v, _mm256_slli_epi64(d.v, 32), 0xAA);
  const __m256i even = _mm256_unpacklo_epi64(ab, cd), odd = _mm256_unpackhi_epi64(ab, cd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), _mm256_permute2x128_si256(even, odd, 0x31));
}
#else
struct Lanes {
  uint64_t v;
  static constexpr int64_t count = 1;
  static Lanes all(uint64_t x) { return {x}; }
  static Lanes from(uint64_t x) { return {x}; }
  Lanes times(Lanes o) const { return {uint64_t(uint32_t(v)) * uint32_t(o.v)}; }
  Lanes high() const { return {v >> 32}; }
  Lanes xor3(Lanes a, Lanes b) const { return {v ^ a.v ^ b.v}; }
};
inline void store(Lanes a, Lanes b, Lanes c, Lanes d, uint32_t* out) {
  out[0] = uint32_t(a.v), out[1] = uint32_t(b.v), out[2] = uint32_t(c.v), out[3] = uint32_t(d.v);
}
#endif

// The 4 `Lanes::count` elements from block `first`.
inline void make(Seed seed, uint64_t first, uint32_t* out) {
  Lanes a = Lanes::from(first), b = a.high(), c = Lanes::all(seed.stream), d = c.high();
  const Lanes factor0 = Lanes::all(kFactor0), factor1 = Lanes::all(kFactor1);
  uint32_t key0 = uint32_t(seed.key), key1 = uint32_t(seed.key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < kRounds; ++round, key0 += kStep0, key1 += kStep1) {
    const Lanes p = a.times(factor0), q = c.times(factor1);
    a = q.high().xor3(b, Lanes::all(key0)), b = q;
    c = p.high().xor3(d, Lanes::all(key1)), d = p;
  }
  store(a, b, c, d, out);
}

}  // namespace philox

// Writes the elements from `first` to `first + n` of a stream, and some before and after; returns where the first one is.
// `out` has room for n + 2 `philox::kElements`.
inline const uint32_t* random_words(Seed seed, int64_t first, int64_t n, uint32_t* out) {
  const int64_t begin = first / philox::kElements * philox::kElements;
  for (int64_t i = begin; i < first + n; i += 4 * philox::Lanes::count)
    philox::make(seed, uint64_t(i) / 4, out + (i - begin));
  return out + (first - begin);
}

}  // namespace FUSIBLE_ISA
