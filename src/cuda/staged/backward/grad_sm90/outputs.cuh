// SPDX-License-Identifier: Apache-2.0
// Sums over the value heads of a q/k head, then back through the L2 norm, y = x r: dx = r dy - x
// r^2 (x . r dy). The gradients here have their factor r, which these value heads share; of x . dx
// all warps have a share.
#pragma once

#include "cuda/staged/backward/grad_sm90/context.cuh"

namespace kda::cuda::sm90::grad {

/// Where a thread keeps dq (0) or dk (1) of its channels and tokens, as Tokens has them, for the
/// next value head of the q/k head. Nobody else reads or writes it.
template <class C>
__device__ __forceinline__ float4* sum_over_heads(const C& c, int which) {
  static_assert(kHeadSums == 2 * 4 * kTokenTiles * kComputeThreads);
  return reinterpret_cast<float4*>(c.a.rows) +
         (2 * blockIdx.x + which) * (kTokenTiles * kComputeThreads) + c.tid;
}
template <class C>
__device__ __forceinline__ void add_earlier_heads(const C& c, int which, Tokens& x) {
  if (!c.has_earlier) return;
  const float4* from = sum_over_heads(c, which);
  float4 sums[kTokenTiles];  // on their way together
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) sums[n] = from[n * kComputeThreads];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    x[n][0] += sums[n].x, x[n][1] += sums[n].y;
    x[n][2] += sums[n].z, x[n][3] += sums[n].w;
  }
}
template <class C>
__device__ __forceinline__ void keep_for_later_heads(const C& c, int which, const Tokens& x) {
  float4* to = sum_over_heads(c, which);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
    to[n * kComputeThreads] = {x[n][0], x[n][1], x[n][2], x[n][3]};
}

/// A lane keeps one half of 2 kKept numbers, summed with those of the lane 2 kKept away.
/// (A selection between elements of an array would put it in local memory.)
template <int kKept, class C>
__device__ __forceinline__ void halve(const C& c, float (&x)[16]) {
  const bool upper = c.lane & 2 * kKept;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float low = x[i], high = x[i + kKept];
    x[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2 * kKept);
  }
}

/// Numbers of a lane's tokens, in order, summed over the lanes that have other channels of them, to
/// the place of the warp.
template <class C>
__device__ __forceinline__ void store_token_sums(const C& c, float (&sums)[16],
                                                 float (&shares)[kChunk][kComputeWarps + 1]) {
  halve<8>(c, sums), halve<4>(c, sums), halve<2>(c, sums);
  const int n = (c.lane & 16) / 4 + (c.lane & 8) / 4 + (c.lane & 4) / 4;  // the tile that is left
  const int token = 8 * n + 2 * c.t();
  shares[token][c.warp] = sums[0], shares[token + 1][c.warp] = sums[1];
}

/// The warp's share of x . y of each token, x from shared memory; or y for the next value head.
template <class C>
__device__ __forceinline__ void store_shares(const C& c, int which, uint32_t x, const Tokens& y,
                                             float (&shares)[kChunk][kComputeWarps + 1]) {
  using T = typename C::T;
  if (c.has_later) return keep_for_later_heads(c, which, y);
  float sums[16];
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    Operand raw;
    C::load(x, r, raw);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        sums[2 * (2 * r + n) + i] = element<T>(raw, n, i) * y[2 * r + n][i] +
                                    element<T>(raw, n, i + 2) * y[2 * r + n][i + 2];
  }
  store_token_sums(c, sums, shares);
}

/// The sum of the warps' shares, times 1 / |x|^2.
template <class C>
__device__ __forceinline__ void add_shares(const C& c,
                                           const float (&shares)[kChunk][kComputeWarps + 1],
                                           const float (&along)[kChunk], float (&sums)[kChunk]) {
  constexpr int kWarps = kComputeWarps / C::kHeads;  // of a value head
  const int token = c.tid % (32 * kWarps);
  if (c.has_later || token >= kChunk) return;
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shares[token][kWarps * c.head() + warp];
  sums[token] = sum * along[token];
}

/// y - along x, dq (0) or dk (1), to the warps that store; nothing before the last value head of a
/// q/k head, but in turn with them: they store numbers of the chunk, too.
template <class C>
__device__ __forceinline__ void store_output(const C& c, int which, uint32_t x,
                                             const float (&along)[kChunk], const Tokens& y) {
  using T = typename C::T;
  wait_empty(c.s.out_empty, which);  // two in each turn
  if (c.has_later) return ptx::mbarrier_arrive(c.s.out_full);
  const uint32_t out = c.channels_of(c.s.out);
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    Operand raw, rounded;
    C::load(x, r, raw);
    const float2 pairs[2] = {c.of_tokens(along, 2 * r), c.of_tokens(along, 2 * r + 1)};
    to_operand<T>(rounded, [&](int n, int i) {
      return y[2 * r + n][i] - (i % 2 ? pairs[n].y : pairs[n].x) * element<T>(raw, n, i);
    });
    ptx::stmatrix_x4_trans(out + r * kSubchunkBytes, rounded);
  }
  ptx::mbarrier_arrive(c.s.out_full);
}

}  // namespace kda::cuda::sm90::grad
