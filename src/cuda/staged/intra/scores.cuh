// SPDX-License-Identifier: Apache-2.0
// Scores, normalised, to squares in shared memory: Aqk and L = N diag(beta).
#pragma once

#include "cuda/staged/intra/tokens.cuh"

namespace kda::cuda::intra {

template <class T, int kK>
struct Scores : Tokens<T, kK> {
  using Base = Tokens<T, kK>;
  using Base::a;
  using Base::Base;
  using Base::has_diagonal;
  using Base::has_level16;
  using Base::kAnchor;
  using Base::kOf16;
  using Base::kOfDiagonal;
  using Base::kTiles32;
  using Base::lane;
  using Base::own_block;
  using Base::part16;
  using Base::part32;
  using Base::rows16;
  using Base::rows32;
  using Base::s;
  using Base::tid;
  using Base::tile;
  using typename Base::Accumulators;

  /// What scores of row i, and of neighbours j and j + 1, are multiplied by. To be read before
  /// anything is stored: the compiler keeps their order.
  struct RowNorms {
    float q, k;
  };
  struct PairNorms {
    float2 k, k_beta;
  };
  __device__ RowNorms row_norms(int i) const { return {s.q_norm[i], s.k_norm[i]}; }
  __device__ PairNorms pair_norms(int j) const {
    return {*reinterpret_cast<const float2*>(&s.k_norm[j]),
            *reinterpret_cast<const float2*>(&s.k_beta[j])};
  }

  /// Neighbours j, j + 1 of row i: of Aqk, and of L.
  __device__ void put_A(int i, int j, float x, float y, RowNorms row, PairNorms pair) const {
    *reinterpret_cast<uint32_t*>(&s.after.Aqk[i][j]) =
        ptx::pack<T>(x * (row.q * pair.k.x), y * (row.q * pair.k.y));
  }
  __device__ void put_L(int i, int j, float x, float y, RowNorms row, PairNorms pair) const {
    *reinterpret_cast<float2*>(&s.after.N[i][j]) = {x * (row.k * pair.k_beta.x),
                                                    y * (row.k * pair.k_beta.y)};
  }

  /// kTiles tiles of 16 rows of q, at token i, and 8 columns each, at token j; then those of k.
  template <int kTiles>
  __device__ void store_tiles(const float (*acc)[4], int i, int j, float scale) const {
    i += lane() / 4, j += lane() % 4 * 2;
    const RowNorms upper = row_norms(i), lower = row_norms(i + 8);
    PairNorms pairs[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) pairs[n] = pair_norms(j + n * 8);
#pragma unroll
    for (int n = 0; n < kTiles; ++n, j += 8) {
      const float(&q)[4] = acc[n], (&k)[4] = acc[kTiles + n];
      put_A(i, j, q[0] * scale, q[1] * scale, upper, pairs[n]);
      put_A(i + 8, j, q[2] * scale, q[3] * scale, lower, pairs[n]);
      put_L(i, j, k[0] * scale, k[1] * scale, upper, pairs[n]);
      put_L(i + 8, j, k[2] * scale, k[3] * scale, lower, pairs[n]);
    }
  }

  /// What lies on and above the diagonal is not zero; nothing reads it.
  template <bool kDiagonal>
  __device__ void store_blocks(const Accumulators& scores) const {
    constexpr float kScale = 1 / kAnchor;
    if (has_level16())
      store_tiles<1>(scores.tiles + kOf16, rows16() * 32 + 16, rows16() * 32 + part16() * 8,
                     kScale);
    store_tiles<kTiles32>(scores.tiles, 32 + rows32() * 16, part32() * kTiles32 * 8, kScale);
    if (kDiagonal && has_diagonal())
      store_tiles<2>(scores.tiles + kOfDiagonal, own_block() * kRun, own_block() * kRun, 1);
  }

  __device__ void store_scalars() const {
    if (tid >= kChunk) return;
    a.factors.beta[tile() * kChunk + tid] = s.beta[tid];
    a.factors.diag[tile() * kChunk + tid] = s.diag[tid];
  }
};

}  // namespace kda::cuda::intra
