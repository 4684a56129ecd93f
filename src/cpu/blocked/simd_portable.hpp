// SPDX-License-Identifier: Apache-2.0
// 4 floats in a vector of the compiler's own: SSE2 on x86-64, NEON on arm64, anything elsewhere.
// The vocabulary that math.hpp, prepare.hpp, sweep.hpp and decode.hpp are written in.
#pragma once

#include <stdint.h>

#include "core/convert.hpp"

namespace kda::cpu::blocked::KDA_ISA {

typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kTileRows = 4;  // register tile of the products: 4 x 2 of 16 registers
constexpr int kTileVecs = 2;

static inline F load(const float* p) {
  F x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
static inline void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }
static inline F set1(float x) { return F{x, x, x, x}; }
/// a b + c; one rounding where the target fuses it, two where it does not.
static inline F fma(F a, F b, F c) { return a * b + c; }
static inline F fnma(F a, F b, F c) { return c - a * b; }
static inline F select(I mask, F yes, F no) {
  return reinterpret_cast<F>((reinterpret_cast<I>(yes) & mask) | (reinterpret_cast<I>(no) & ~mask));
}
static inline F max(F a, F b) { return select(a > b, a, b); }
static inline F min(F a, F b) { return select(a < b, a, b); }
/// Nearest integer for |x| < 2^22.
static inline F round(F x) { return (x + set1(12582912.0f)) - set1(12582912.0f); }
static inline F bit_and(F a, F b) {
  return reinterpret_cast<F>(reinterpret_cast<I>(a) & reinterpret_cast<I>(b));
}
static inline F abs(F x) {
  return reinterpret_cast<F>(reinterpret_cast<I>(x) &
                             I{0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff});
}
static inline F select_greater(F a, F b, F yes, F no) { return select(a > b, yes, no); }
/// x 2^n for integral n, in two steps so that neither factor leaves the exponent range.
static inline F scale_pow2(F x, F n) {
  const I whole = __builtin_convertvector(n, I);
  const I half = whole >> 1;
  const I first = (half + 127) << 23;
  const I second = (whole - half + 127) << 23;
  return x * reinterpret_cast<F>(first) * reinterpret_cast<F>(second);
}
static inline float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }

/// Sums of 4 vectors at once.
static inline void reduce_add4(const F (&x)[4], float* out) {
  for (int i = 0; i < 4; ++i) out[i] = reduce_add(x[i]);
}

/// dst[c][r] = src[r][c], 4 x 4; strides in floats.
static inline void transpose(const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  const F a = load(src), b = load(src + src_stride);
  const F c = load(src + 2 * src_stride), d = load(src + 3 * src_stride);
  store(dst, F{a[0], b[0], c[0], d[0]});
  store(dst + dst_stride, F{a[1], b[1], c[1], d[1]});
  store(dst + 2 * dst_stride, F{a[2], b[2], c[2], d[2]});
  store(dst + 3 * dst_stride, F{a[3], b[3], c[3], d[3]});
}

static inline double dot_f64(const float* a, const float* b, int count) {
  double sum0 = 0;
  double sum1 = 0;
  for (int i = 0; i < count; i += 2) {
    sum0 += static_cast<double>(a[i]) * b[i];
    sum1 += static_cast<double>(a[i + 1]) * b[i + 1];
  }
  return sum0 + sum1;
}

static inline F load_bf16(const uint16_t* p) {
  return F{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
static inline F load_fp16(const uint16_t* p) {
  return F{fp16_to_float(p[0]), fp16_to_float(p[1]), fp16_to_float(p[2]), fp16_to_float(p[3])};
}
static inline void store_bf16(uint16_t* p, F x) {
  for (int i = 0; i < kWidth; ++i) p[i] = float_to_bf16(x[i]);
}
static inline void store_fp16(uint16_t* p, F x) {
  for (int i = 0; i < kWidth; ++i) p[i] = float_to_fp16(x[i]);
}

}  // namespace kda::cpu::blocked::KDA_ISA
