// SPDX-License-Identifier: Apache-2.0
// T' = (I + L)^-1: 16x16 blocks by substitution, merged in pairs.
#pragma once

#include "cuda/staged/intra/context.cuh"

namespace kda::cuda::intra {

/// Inverts the diagonal 16x16 block at token `at` by substitution in fp32, in place; a lane owns a
/// column.
template <class C>
__device__ void invert_diagonal(const C& c, int at) {
  auto& s = c.s;
  const int j = c.lane() % kBlock;
  float column[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) sum -= s.after.N[at + i][at + m] * column[m];
    column[i] = i < j ? 0.0f : sum;
  }
  __syncwarp();
  if (c.lane() < kBlock)
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      s.after.N[at + i][at + j] = column[i];
      s.after.inverse[at + i][at + j] = static_cast<typename C::F>(column[i]);
    }
  __syncwarp();
}

/// T21 = -T22 L21 T11 for blocks of kSize at row0 = column0 + kSize, in place: rows of one m16
/// tile, kTiles n8 tiles from `n0`. Products in tf32: every factor is bounded by 2. The k order of
/// the second product is permuted so that the first one's accumulators are its A operand.
template <int kSize, int kTiles, class C>
__device__ void merge_rows(const C& c, int row0, int column0, int m, int n0,
                           float (&out)[kTiles][4]) {
  const auto& N = c.s.after.N;
  float y[kSize / 8][4] = {};  // rows m..m+15 of T22 L21
#pragma unroll
  for (int k = 0; k < kSize; k += 8) {
    if (k >= m + kBlock) continue;  // above the diagonal blocks nothing was written
    const int r = row0 + m + c.lane() / 4, column = row0 + k + c.lane() % 4;
    const uint32_t left[4] = {ptx::to_tf32(N[r][column]), ptx::to_tf32(N[r + 8][column]),
                              ptx::to_tf32(N[r][column + 4]), ptx::to_tf32(N[r + 8][column + 4])};
#pragma unroll
    for (int n = 0; n < kSize / 8; ++n) {
      const int j = column0 + n * 8 + c.lane() / 4;
      ptx::mma_1688_tf32(y[n], left, ptx::to_tf32(N[row0 + k + c.lane() % 4][j]),
                         ptx::to_tf32(N[row0 + k + c.lane() % 4 + 4][j]));
    }
  }
#pragma unroll
  for (int k = 0; k < kSize / 8; ++k) {
    if (k * 8 < n0 / kBlock * kBlock) continue;
    const uint32_t left[4] = {ptx::to_tf32(-y[k][0]), ptx::to_tf32(-y[k][2]),
                              ptx::to_tf32(-y[k][1]), ptx::to_tf32(-y[k][3])};
    const int r = column0 + k * 8 + c.lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int j = column0 + n0 + n * 8 + c.lane() / 4;
      ptx::mma_1688_tf32(out[n], left, ptx::to_tf32(N[r][j]), ptx::to_tf32(N[r + 1][j]));
    }
  }
}

/// kExact: stores it in fp32 too, for merges to come.
template <bool kExact, int kTiles, class C>
__device__ void store_block(const C& c, int row, int column, const float (&out)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + half * 8 + c.lane() / 4, j = column + n * 8 + c.lane() % 4 * 2;
      const float2 pair{out[n][2 * half], out[n][2 * half + 1]};
      if constexpr (kExact) *reinterpret_cast<float2*>(&c.s.after.N[i][j]) = pair;
      *reinterpret_cast<uint32_t*>(&c.s.after.inverse[i][j]) =
          ptx::pack<typename C::F>(pair.x, pair.y);
    }
}

/// 16x16 blocks by substitution, then pairs of them.
template <class C>
__device__ void invert_pairs(const C& c) {
  if (c.warp() < 4) invert_diagonal(c, c.warp() * kBlock);
  __syncthreads();
  if (c.warp() < 2) {
    float out[2][4] = {};
    merge_rows<16, 2>(c, c.warp() * 32 + 16, c.warp() * 32, 0, 0, out);
    __syncwarp();
    store_block<true>(c, c.warp() * 32 + 16, c.warp() * 32, out);
  }
}
/// The lower left half, from both pairs: 16x8 tiles of 8 warps.
template <class C>
__device__ void invert_halves(const C& c) {
#pragma unroll
  for (int i = 0; i < 8 / C::kWarps; ++i) {
    const int at = c.warp() + i * C::kWarps, row = at / 4 * 16, column = at % 4 * 8;
    float out[1][4] = {};
    merge_rows<32, 1>(c, 32, 0, row, column, out);
    store_block<false>(c, 32 + row, column, out);
  }
}

}  // namespace kda::cuda::intra
