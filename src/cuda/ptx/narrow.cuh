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

}  // namespace kda::cuda::ptx
