// SPDX-License-Identifier: Apache-2.0
// T' = (I + L)^-1 of a sub-chunk, by one warp.
#pragma once

#include "cuda/fused/producer_context.cuh"

namespace kda::cuda::sm90::fused {

/// Inverts diagonal blocks of 8 by substitution in fp32, in place; a lane owns a column.
template <class P>
__device__ void invert_blocks(const P& p) {
  auto& L = p.own.scratch.L;
  const int at = p.lane() / 8 % 2 * 8, j = p.lane() % 8;
  float column[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(&L[at + i][at + m]);
      sum -= l.x * column[m];
      if (m + 1 < i) sum -= l.y * column[m + 1];
      if (m + 2 < i) sum -= l.z * column[m + 2];
      if (m + 3 < i) sum -= l.w * column[m + 3];
    }
    column[i] = i < j ? 0.0f : sum;
  }
  __syncwarp();
  if (p.lane() < 16)
#pragma unroll
    for (int i = 0; i < 8; ++i) L[at + i][at + j] = column[i];
  __syncwarp();
}
/// T21 = -T22 L21 T11 in tf32: every factor is bounded by 2. The k order of the second product is
/// permuted so that the first one's accumulators are its A operand.
template <class P>
__device__ void merge_blocks(const P& p, float (&out)[4]) {
  const int r = p.lane() / 4, c = p.lane() % 4;
  const auto tf32 = [&](int i, int j) { return ptx::to_tf32(p.own.scratch.L[i][j]); };
  float y[4] = {};
  const uint32_t left[4] = {tf32(8 + r, 8 + c), 0, tf32(8 + r, 12 + c), 0};
  ptx::mma_1688_tf32(y, left, tf32(8 + c, r), tf32(12 + c, r));
  const uint32_t next[4] = {ptx::to_tf32(-y[0]), 0, ptx::to_tf32(-y[1]), 0};
  ptx::mma_1688_tf32(out, next, tf32(2 * c, r), tf32(2 * c + 1, r));
}
/// Stores T' without its diagonal of ones, as operands.
template <class P>
__device__ void invert(const P& p, const PipeStage<P::kK>& s) {
  invert_blocks(p);
  float lower[4] = {};
  merge_blocks(p, lower);
  const int r = p.lane() / 4, c = p.lane() % 4 * 2;
  const auto put_pair = [&](int i, int j, float x, float y) {
    *reinterpret_cast<uint32_t*>(&s.factors.inverse[square_place(i, j)]) =
        ptx::pack<typename P::Operand>(x, y);
  };
#pragma unroll
  for (int at = 0; at < kSubchunk; at += 8) {
    const float2 x = *reinterpret_cast<const float2*>(&p.own.scratch.L[at + r][at + c]);
    put_pair(at + r, at + c, c < r ? x.x : 0.0f, c + 1 < r ? x.y : 0.0f);
  }
  put_pair(r, 8 + c, 0, 0);
  put_pair(8 + r, c, lower[0], lower[1]);
}

}  // namespace kda::cuda::sm90::fused
