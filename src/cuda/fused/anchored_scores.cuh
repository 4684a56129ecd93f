// SPDX-License-Identifier: Apache-2.0
// Scores of a sub-chunk in the anchored form: rows decayed since its start times columns divided by
// that decay. Row i depends on nothing after token i.
#pragma once

#include "cuda/fused/dyadic_scores.cuh"

namespace kda::cuda::sm90::fused {

/// Stores Aqk from tiles of 8 columns, each with rows r and r + 8.
template <class P>
__device__ void put_scores(const P& p, const PipeStage<P::kK>& s, int r, int c,
                           const float (&acc)[2][4]) {
  put_A<P>(s, r, c, acc[0][0], acc[0][1]);
  *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(r, c + 8)]) = 0;
  *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(r + 8, c)]) =
      ptx::pack<typename P::Operand>(acc[0][2] * P::kAnchor, acc[0][3] * P::kAnchor);
  put_A<P>(s, r + 8, c + 8, acc[1][2], acc[1][3]);
}
/// Stores L, but for the tile above the diagonal.
template <class P>
__device__ void put_products(const P& p, const PipeStage<P::kK>& s, int r, int c,
                             const float (&acc)[2][4]) {
  const float upper = s.factors.k_norm[token_place(r)],
              lower = s.factors.k_norm[token_place(r + 8)];
  const float4 k_beta = *reinterpret_cast<const float4*>(&s.factors.k_beta[token_place(c)]);
  put_L(p, r, c, acc[0][0], acc[0][1], upper, {k_beta.x, k_beta.y});
  put_L(p, r + 8, c, acc[0][2], acc[0][3], lower, {k_beta.x, k_beta.y});
  put_L(p, r + 8, c + 8, acc[1][2], acc[1][3], lower, {k_beta.z, k_beta.w});
}

/// Address of rows of q (`which` = 0) or of k (1).
template <class P>
__device__ uint32_t rows_of_scores(const P& p, const PipeStage<P::kK>& s, int which) {
  if constexpr (kFp16<typename P::Operand>)
    return ptx::shared_address(which == 0 ? p.own.scratch.q : p.own.scratch.k);
  else
    return ptx::shared_address(s.tiles.rows + (which == 0 ? kSubchunk * 64 : 0));
}
/// acc += rows of q or k, times columns.
template <class P>
__device__ void multiply_rows(const P& p, const PipeStage<P::kK>& s, int which,
                              float (&acc)[2][4]) {
  const int row = p.lane() % 16;
  const uint32_t left = rows_of_scores(p, s, which) + row * 128;
  constexpr int kNextColumns = (kFp16<typename P::Operand> ? 1 : 2) * kSubchunk * 128;
  const uint32_t right =
      ptx::shared_address(&p.own.columns[p.lane() % 8 + p.lane() / 16 * 8][p.lane() / 8 % 2 * 8]);
#pragma unroll
  for (int step = 0; step < P::kK / 16; ++step) {
    uint32_t x[4], y[4];
    const int piece = step % 4 * 2 + p.lane() / 16;
    ptx::ldmatrix_x4(x, left + step / 4 * kNextColumns + (piece ^ row & 7) * 16);
    ptx::ldmatrix_x4(y, right + step * 32);
    ptx::mma_16816<typename P::T>(acc[0], x, y[0], y[1]);
    ptx::mma_16816<typename P::T>(acc[1], x, y[2], y[3]);
  }
}
/// Makes Aqk and L. The first warp takes rows of q, the last one rows of k.
template <class P>
__device__ void anchored_scores(const P& p, const PipeStage<P::kK>& s) {
  float acc[2][4] = {}, more[2][4] = {};
  multiply_rows(p, s, p.warp(), acc);
  if constexpr (P::kWarps == 1) multiply_rows(p, s, 1, more);
  if (kFp16<typename P::Operand>) __syncwarp();  // L takes the place of rows
  p.on_each_warp(
      [&] { put_scores(p, s, p.lane() / 4, p.lane() % 4 * 2, acc); },
      [&] { put_products(p, s, p.lane() / 4, p.lane() % 4 * 2, P::kWarps == 1 ? more : acc); });
}

}  // namespace kda::cuda::sm90::fused
