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
  const bool l2norm = c.a.gate.l2norm;
#pragma unroll
  for (int row = c.tid / 8; row < kChunk; row += kThreads / 8) {
    float q = 1, k = 1;
    if (l2norm) {
      q = rsqrtf(sum_over_8(sum_of_squares(c, c.a.q, row)) + 1e-6f);
      k = rsqrtf(sum_over_8(sum_of_squares(c, c.a.k, row)) + 1e-6f);
    }
    if (c.lane() % 8 == 0) c.s.q_factor[row] = c.a.gate.scale * q, c.s.k_factor[row] = k;
  }
}

/// After find_norms() and a barrier.
__device__ __forceinline__ void load_betas(const GradContext& c) {
  if (c.tid >= kChunk) return;
  const RowView& beta = c.a.beta;
  float value = 0;
  if (c.tid < c.chunk.count) {
    const int64_t at = chunk_offset(beta, c.chunk, c.head) + c.tid * beta.stride_t;
    value = beta_value(c.a.gate, float_of(load_bits(beta.base, beta.type, at), beta.type));
  }
  c.s.beta[c.tid] = value;
  c.s.beta_k_factor[c.tid] = value * c.s.k_factor[c.tid];
}

/// Whether the gradient by a token's beta needs its key.
__device__ __forceinline__ bool is_small(const GradContext& c, int token) {
  return token < c.chunk.count && !(fabsf(c.s.beta[token]) >= kSmallBeta);
}
/// After load_betas() by the same threads. Every thread takes part.
__device__ __forceinline__ void look_for_small(const GradContext& c) {
  const bool any = __syncthreads_or(c.tid < kChunk && is_small(c, c.tid));
  if (c.tid == 0) c.s.any_small = any;
}

}  // namespace kda::cuda::grad
