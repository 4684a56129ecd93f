// SPDX-License-Identifier: Apache-2.0
// Scores, normalised, to squares in shared memory: Aqk and L = N diag(beta).
#pragma once

#include "cuda/staged/intra/blocks.cuh"

namespace kda::cuda::intra {

/// Factors of scores of row i, and of neighbours j and j + 1. To be read before
/// anything is stored: the compiler keeps their order.
struct RowNorms {
  float q, k;
};
struct PairNorms {
  float2 k, k_beta;
};
template <class C>
__device__ RowNorms row_norms(const C& c, int i) {
  return {c.s.q_norm[i], c.s.k_norm[i]};
}
template <class C>
__device__ PairNorms pair_norms(const C& c, int j) {
  return {*reinterpret_cast<const float2*>(&c.s.k_norm[j]),
          *reinterpret_cast<const float2*>(&c.s.k_beta[j])};
}

/// Stores neighbours j, j + 1 of row i of Aqk.
template <class C>
__device__ void put_A(const C& c, int i, int j, float x, float y, RowNorms row, PairNorms pair) {
  *reinterpret_cast<uint32_t*>(&c.s.after.Aqk[i][j]) =
      ptx::pack<typename C::F>(x * (row.q * pair.k.x), y * (row.q * pair.k.y));
}
/// Stores neighbours j, j + 1 of row i of L.
template <class C>
__device__ void put_L(const C& c, int i, int j, float x, float y, RowNorms row, PairNorms pair) {
  *reinterpret_cast<float2*>(&c.s.after.N[i][j]) = {x * (row.k * pair.k_beta.x),
                                                    y * (row.k * pair.k_beta.y)};
}

/// kTiles tiles of 16 rows of q, at token i, and 8 columns each, at token j; then those of k.
template <int kTiles, class C>
__device__ void store_tiles(const C& c, const float (*acc)[4], int i, int j, float scale) {
  i += c.lane() / 4, j += c.lane() % 4 * 2;
  const RowNorms upper = row_norms(c, i), lower = row_norms(c, i + 8);
  PairNorms pairs[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) pairs[n] = pair_norms(c, j + n * 8);
#pragma unroll
  for (int n = 0; n < kTiles; ++n, j += 8) {
    const float(&q)[4] = acc[n], (&k)[4] = acc[kTiles + n];
    put_A(c, i, j, q[0] * scale, q[1] * scale, upper, pairs[n]);
    put_A(c, i + 8, j, q[2] * scale, q[3] * scale, lower, pairs[n]);
    put_L(c, i, j, k[0] * scale, k[1] * scale, upper, pairs[n]);
    put_L(c, i + 8, j, k[2] * scale, k[3] * scale, lower, pairs[n]);
  }
}

/// Elements on and above the diagonal are not zero; nothing reads them.
template <bool kDiagonal, class C>
__device__ void store_blocks(const C& c, const Accumulators<C>& scores) {
  using W = Tasks<C>;
  const W tasks{c};
  constexpr float kScale = 1 / C::kAnchor;
  if (tasks.has_level16())
    store_tiles<1>(c, scores.tiles + W::kOf16, tasks.rows16() * 32 + 16,
                   tasks.rows16() * 32 + tasks.part16() * 8, kScale);
  store_tiles<W::kTiles32>(c, scores.tiles, 32 + tasks.rows32() * 16,
                           tasks.part32() * W::kTiles32 * 8, kScale);
  if (kDiagonal && tasks.has_diagonal())
    store_tiles<2>(c, scores.tiles + W::kOfDiagonal, tasks.own_block() * kSubchunk,
                   tasks.own_block() * kSubchunk, 1);
}

template <class C>
__device__ void store_scalars(const C& c) {
  if (c.tid >= kChunk) return;
  c.a.factors.beta[c.tile() * kChunk + c.tid] = c.s.beta[c.tid];
  c.a.factors.diag[c.tile() * kChunk + c.tid] = c.s.diag[c.tid];
}

}  // namespace kda::cuda::intra
