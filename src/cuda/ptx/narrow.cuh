// SPDX-License-Identifier: Apache-2.0
// Narrow relatives of what ptx.cuh has: an mma whose operands are single registers, and functions
// without the steps that denormals need.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

/// d += a b, m16n8k8, bf16 with fp32 accumulators.
__device__ __forceinline__ void mma_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The largest absolute values of bf16 pairs, of the low and of the high halves; NaN where one is.
__device__ __forceinline__ uint32_t max_of_pairs(const uint32_t (&x)[4]) {
  uint32_t y;
  asm("{.reg .b32 a, b, c, d; abs.bf16x2 a, %1; abs.bf16x2 b, %2; abs.bf16x2 c, %3;"
      "abs.bf16x2 d, %4; max.NaN.bf16x2 a, a, b; max.NaN.bf16x2 c, c, d; max.NaN.bf16x2 %0, a, c;}"
      : "=r"(y)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  return y;
}
/// A pair of fp16, the largest finite numbers in place of larger ones.
__device__ __forceinline__ uint32_t pack_finite(float low, float high) {
  uint32_t y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
/// The larger one of unsigned integers of 16 bits, in both halves (sm_90).
__device__ __forceinline__ uint32_t max_of_halves(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
/// The largest of a warp's, for all of its lanes.
__device__ __forceinline__ uint32_t max_of_warp(uint32_t x) {
  return __reduce_max_sync(0xffffffff, x);
}

}  // namespace kda::cuda::ptx
