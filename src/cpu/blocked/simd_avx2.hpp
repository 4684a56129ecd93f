// SPDX-License-Identifier: Apache-2.0
// 8 floats in an AVX register with FMA and F16C. Names as in simd_portable.hpp.
#pragma once

#include <immintrin.h>

#include "core/convert.hpp"

namespace kda::cpu::blocked::KDA_ISA {

using F = __m256;
constexpr int kWidth = 8;
constexpr int kTileRows = 4;  // register tile of the products: 4 x 2 of 16 registers
constexpr int kTileVecs = 2;

static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
static inline F set1(float x) { return _mm256_set1_ps(x); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
static inline F min(F a, F b) { return _mm256_min_ps(a, b); }
static inline F round(F x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline F bit_and(F a, F b) { return _mm256_and_ps(a, b); }
static inline F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
static inline F select_greater(F a, F b, F yes, F no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
/// x 2^n for integral n, in two steps so that neither factor leaves the exponent range.
static inline F scale_pow2(F x, F n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return x * _mm256_castsi256_ps(first) * _mm256_castsi256_ps(second);
}
static inline float reduce_add(F x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/// Sums of 4 vectors at once: half the shuffles of 4 reduce_add().
static inline void reduce_add4(const F (&x)[4], float* out) {
  const F sum = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

/// dst[c][r] = src[r][c], 8 x 8; strides in floats.
static inline void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  F x[8];
  F y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = load(src + i * src_stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {  // x[i + n]: column n of each half, rows i .. i + 3
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    store(dst + n * dst_stride, _mm256_permute2f128_ps(x[n], x[4 + n], 0x20));
    store(dst + (4 + n) * dst_stride, _mm256_permute2f128_ps(x[n], x[4 + n], 0x31));
  }
}

static inline double dot_f64(const float* a, const float* b, int count) {
  __m256d sum0 = _mm256_setzero_pd();
  __m256d sum1 = _mm256_setzero_pd();
  for (int i = 0; i < count; i += kWidth) {
    sum0 = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + i)),
                           _mm256_cvtps_pd(_mm_loadu_ps(b + i)), sum0);
    sum1 = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + i + 4)),
                           _mm256_cvtps_pd(_mm_loadu_ps(b + i + 4)), sum1);
  }
  const __m256d sum = _mm256_add_pd(sum0, sum1);
  const __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(sum), _mm256_extractf128_pd(sum, 1));
  return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

static inline F load_bf16(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
static inline F load_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline void store_bf16(uint16_t* p, F x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
static inline void store_fp16(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace kda::cpu::blocked::KDA_ISA
