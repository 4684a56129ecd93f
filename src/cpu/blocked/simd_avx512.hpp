// SPDX-License-Identifier: Apache-2.0
// 16 floats in an AVX-512 register (F, BW, DQ, VL). Names as in simd_portable.hpp.
#pragma once

#include <immintrin.h>

#include "core/convert.hpp"

namespace kda::cpu::blocked::KDA_ISA {

using F = __m512;
constexpr int kWidth = 16;
constexpr int kTileRows = 8;  // register tile of the products: 8 x 2 of 32 registers
constexpr int kTileVecs = 2;

static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline F set1(float x) { return _mm512_set1_ps(x); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F round(F x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline F bit_and(F a, F b) { return _mm512_and_ps(a, b); }
static inline F abs(F x) { return _mm512_abs_ps(x); }
static inline F select_greater(F a, F b, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
}
/// x 2^n for integral n.
static inline F scale_pow2(F x, F n) { return _mm512_scalef_ps(x, n); }
static inline float reduce_add(F x) { return _mm512_reduce_add_ps(x); }

/// Sums of 4 vectors at once: half the shuffles of 4 reduce_add().
static inline void reduce_add4(const F (&x)[4], float* out) {
  const F ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const F cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const F all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

/// dst[c][r] = src[r][c], 16 x 16; strides in floats.
static inline void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  F x[16];
  F y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = load(src + i * src_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // x[i + n]: column n of each quarter, rows i .. i + 3
    const __m512d a = _mm512_castps_pd(y[i]), b = _mm512_castps_pd(y[i + 1]);
    const __m512d c = _mm512_castps_pd(y[i + 2]), d = _mm512_castps_pd(y[i + 3]);
    x[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    x[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    x[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    x[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const F even_low = _mm512_shuffle_f32x4(x[n], x[4 + n], 0x88);
    const F even_high = _mm512_shuffle_f32x4(x[8 + n], x[12 + n], 0x88);
    const F odd_low = _mm512_shuffle_f32x4(x[n], x[4 + n], 0xdd);
    const F odd_high = _mm512_shuffle_f32x4(x[8 + n], x[12 + n], 0xdd);
    store(dst + n * dst_stride, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    store(dst + (4 + n) * dst_stride, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    store(dst + (8 + n) * dst_stride, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    store(dst + (12 + n) * dst_stride, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

static inline double dot_f64(const float* a, const float* b, int count) {
  __m512d sum0 = _mm512_setzero_pd();
  __m512d sum1 = _mm512_setzero_pd();
  for (int i = 0; i < count; i += kWidth) {
    sum0 = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_loadu_ps(a + i)),
                           _mm512_cvtps_pd(_mm256_loadu_ps(b + i)), sum0);
    sum1 = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_loadu_ps(a + i + 8)),
                           _mm512_cvtps_pd(_mm256_loadu_ps(b + i + 8)), sum1);
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(sum0, sum1));
}

static inline F load_bf16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline F load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store_bf16(uint16_t* p, F x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i kept = _mm512_mask_blend_epi32(nan, rounded, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
static inline void store_fp16(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace kda::cpu::blocked::KDA_ISA
