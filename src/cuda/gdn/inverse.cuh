// SPDX-License-Identifier: Apache-2.0
// T' = (I + L)^-1 of a chunk by four warps, as in staged/intra/inverse.cuh: 16x16 blocks by
// substitution in fp32, merged in pairs by products in tf32. Here a warp has two blocks and merges
// them, and the other two warps are free. What is an operand of products only lies in shared memory
// rounded to tf32: L outside the 16x16 blocks, and T'.
#pragma once

#include "cuda/ptx/ptx.cuh"
#include "cuda/staged/intra/context.cuh"

namespace kda::cuda::gdn {

using intra::kBlock;

__device__ __forceinline__ float round_to_tf32(float x) { return __uint_as_float(ptx::to_tf32(x)); }

/// Inverts the two 16x16 blocks at token `at` in place; a lane owns a column of one.
template <class C>
__device__ void invert_two_blocks(const C& c, int at) {
  auto& s = c.s.after;
  const int j = c.lane() % kBlock;
  at += c.lane() / kBlock * kBlock;
  float column[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum -= s.N[at + i][at + m] * column[m];
    column[i] = i < j ? 0.0f : sum;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    s.N[at + i][at + j] = round_to_tf32(column[i]);
    s.inverse[at + i][at + j] = static_cast<typename C::T>(column[i]);
  }
  s.inverse[at + j][at + j] = 0;  // of T' - I
  __syncwarp();
}

/// 16 rows from m of T21 = -T22 L21 T11, blocks of kSize at row0 = column0 + kSize, and their 16
/// columns from n0. Every factor is bounded by 2. The k order of both products is permuted: the
/// first one's accumulators are the A operand of the second one.
template <int kSize, class C>
__device__ __forceinline__ void merge_blocks(const C& c, int row0, int column0, int m, int n0,
                                             float (&out)[2][4]) {
  const auto& N = c.s.after.N;
  const int row = c.lane() / 4, pair = c.lane() % 4 * 2;
  const auto multiply = [&](float(&acc)[4], const uint32_t(&left)[4], int k, int j) {
    ptx::mma_1688_tf32(acc, left, __float_as_uint(N[k + pair][j + row]),
                       __float_as_uint(N[k + pair + 1][j + row]));
  };
  float y[kSize / 8][4] = {};  // rows m..m+15 of T22 L21
#pragma unroll
  for (int k = 0; k < kSize; k += 8) {
    if (k >= m + kBlock) continue;  // above the diagonal blocks nothing was written
    const auto load = [&](int r) {
      return *reinterpret_cast<const float2*>(&N[row0 + m + r][row0 + k + pair]);
    };
    const float2 upper = load(row), lower = load(row + 8);
    const uint32_t left[4] = {__float_as_uint(upper.x), __float_as_uint(lower.x),
                              __float_as_uint(upper.y), __float_as_uint(lower.y)};
#pragma unroll
    for (int n = 0; n < kSize / 8; ++n)
      if (n * 8 >= n0) multiply(y[n], left, row0 + k, column0 + n * 8);
  }
#pragma unroll
  for (int k = 0; k < kSize / 8; ++k) {
    if (k * 8 < n0) continue;
    const uint32_t left[4] = {ptx::to_tf32(-y[k][0]), ptx::to_tf32(-y[k][2]),
                              ptx::to_tf32(-y[k][1]), ptx::to_tf32(-y[k][3])};
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply(out[n], left, column0 + k * 8, column0 + n0 + n * 8);
  }
}

/// kRounded: stores it in tf32 too, for merges to come.
template <bool kRounded, class C>
__device__ void store_blocks(const C& c, int row, int column, const float (&out)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + half * 8 + c.lane() / 4, j = column + n * 8 + c.lane() % 4 * 2;
      const float x = out[n][2 * half], y = out[n][2 * half + 1];
      if constexpr (kRounded)
        *reinterpret_cast<float2*>(&c.s.after.N[i][j]) = {round_to_tf32(x), round_to_tf32(y)};
      *reinterpret_cast<uint32_t*>(&c.s.after.inverse[i][j]) = ptx::pack<typename C::T>(x, y);
    }
}

/// The blocks of 32 at tokens 0 and 32, by the first two warps.
template <class C>
__device__ void invert_pairs(const C& c) {
  const int at = c.warp() * 2 * kBlock;
  invert_two_blocks(c, at);
  float out[2][4] = {};
  merge_blocks<kBlock>(c, at + kBlock, at, 0, 0, out);
  __syncwarp();
  store_blocks<true>(c, at + kBlock, at, out);
}

/// The lower left half, from both pairs: a 16x16 block a warp.
template <class C>
__device__ void invert_halves(const C& c) {
  const int m = c.warp() / 2 * kBlock, n0 = c.warp() % 2 * kBlock;
  float out[2][4] = {};
  merge_blocks<32>(c, 32, 0, m, n0, out);
  store_blocks<false>(c, 32 + m, n0, out);
}

}  // namespace kda::cuda::gdn
