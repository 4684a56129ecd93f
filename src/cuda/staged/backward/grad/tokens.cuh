// SPDX-License-Identifier: Apache-2.0
// Numbers of each token: norms and beta.
#pragma once

#include "cuda/staged/backward/grad/context.cuh"

namespace kda::cuda::grad {

/// Below it dZ . E / beta is not used for the gradient by beta.
constexpr float kSmallBeta = 0x1p-8f;

/// This lane's share of the sum of squares of a row: 16 bytes of every 128.
__device__ __forceinline__ float sum_of_squares(const GradContext& c, const RowView& view,
                                                int row) {
  float sum = 0;
  if (row >= c.chunk.count) return sum;
  const auto* from = static_cast<const Element16*>(view.base) +
                     chunk_offset(view, c.chunk, c.q_head()) + row * view.stride_t;
  for (int channel = c.lane() % 8 * 8; channel < c.a.shape.K; channel += 64) {
    const uint4 x = *reinterpret_cast<const uint4*>(from + channel);
    for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
      const float2 y = ptx::unpack<Element16>(pair);
      sum = fmaf(y.x, y.x, fmaf(y.y, y.y, sum));
    }
  }
  return sum;
}
__device__ __forceinline__ float sum_over_8(float x) {
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// Eight lanes a row.
__device__ __forceinline__ void find_norms(const GradContext& c) {
  Shared& s = c.s;
#pragma unroll
  for (int row = c.tid / 8; row < kChunk; row += kThreads / 8) {
    float qq = 0, kk = 0;
    if (c.a.gate.l2norm) {
      qq = sum_over_8(sum_of_squares(c, c.a.q, row)) + 1e-6f;
      kk = sum_over_8(sum_of_squares(c, c.a.k, row)) + 1e-6f;
    }
    if (c.lane() % 8 != 0) continue;
    s.q_norm[row] = c.a.gate.l2norm ? rsqrtf(qq) : 1;
    s.k_norm[row] = c.a.gate.l2norm ? rsqrtf(kk) : 1;
    s.q_size[row] = c.a.gate.l2norm ? sqrtf(qq) : 1;
    s.k_size[row] = c.a.gate.l2norm ? sqrtf(kk) : 1;
  }
}

__device__ __forceinline__ void load_betas(const GradContext& c) {
  if (c.tid >= kChunk) return;
  const RowView& beta = c.a.beta;
  float value = 0;
  if (c.tid < c.chunk.count)
    value = beta_value(
        c.a.gate, float_of(load_bits(beta.base, beta.type,
                                     chunk_offset(beta, c.chunk, c.head) + c.tid * beta.stride_t),
                           beta.type));
  c.s.beta[c.tid] = value;
}

/// Whether the gradient by this thread's beta needs its key; whether any in the chunk does.
__device__ __forceinline__ bool is_small(const GradContext& c, int token) {
  return token < c.chunk.count && !(fabsf(c.s.beta[token]) >= kSmallBeta);
}
__device__ __forceinline__ bool any_small(const GradContext& c) {
  return __syncthreads_or(c.tid < kChunk && is_small(c, c.tid));
}

}  // namespace kda::cuda::grad
