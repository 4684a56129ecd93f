// SPDX-License-Identifier: Apache-2.0
// Scores, normalised, to squares in shared memory: Aqk and L = N diag(beta).
#pragma once

#include "cuda/sm80/intra/tokens.cuh"

namespace kda::cuda::intra {

template <class T, int kK>
struct Scores : Tokens<T, kK> {
  using Base = Tokens<T, kK>;
  using Base::a;
  using Base::Base;
  using Base::coarse_part;
  using Base::coarse_rows;
  using Base::diagonal_q;
  using Base::diagonal_run;
  using Base::kAnchor;
  using Base::kRowBlocks;
  using Base::kSplit;
  using Base::kTiles16;
  using Base::kTiles32;
  using Base::lane;
  using Base::s;
  using Base::tid;
  using Base::tile;
  using typename Base::Accumulators;

  /// Neighbours j, j + 1 of row i: of Aqk, and of L.
  __device__ void put_A(int i, int j, float x, float y) const {
    const float2 k = *reinterpret_cast<const float2*>(&s.k_norm[j]);
    const float q = s.q_norm[i];
    *reinterpret_cast<uint32_t*>(&s.after.A[i][j]) = ptx::pack<T>(x * (q * k.x), y * (q * k.y));
  }
  __device__ void put_L(int i, int j, float x, float y) const {
    const float2 k = *reinterpret_cast<const float2*>(&s.k_beta[j]);
    const float k_i = s.k_norm[i];
    *reinterpret_cast<float2*>(&s.after.N[i][j]) = {x * (k_i * k.x), y * (k_i * k.y)};
  }

  /// Tile of 16 rows of q or of k, at token i, and 8 columns, at token j.
  __device__ void store_tile(const float (&acc)[4], bool q, int i, int j, float scale) const {
    i += lane() / 4, j += lane() % 4 * 2;
    if (q) {
      put_A(i, j, acc[0] * scale, acc[1] * scale), put_A(i + 8, j, acc[2] * scale, acc[3] * scale);
    } else {
      put_L(i, j, acc[0] * scale, acc[1] * scale), put_L(i + 8, j, acc[2] * scale, acc[3] * scale);
    }
  }

  /// What lies on and above the diagonal is not zero; nothing reads it.
  template <bool kDiagonal>
  __device__ void store_blocks(const Accumulators& scores) const {
    constexpr float kScale = 1 / kAnchor;
    const int m = coarse_rows();
#pragma unroll
    for (int n = 0; n < kTiles32; ++n)
      store_tile(scores.level32[n], m < 2, 32 + m % 2 * 16, coarse_part() * (32 / kSplit) + n * 8,
                 kScale);
#pragma unroll
    for (int n = 0; n < kTiles16; ++n)
      store_tile(scores.level16[n], m < 2, m % 2 * 32 + 16,
                 m % 2 * 32 + coarse_part() * (16 / kSplit) + n * 8, kScale);
    if constexpr (kDiagonal) {
      const int token = diagonal_run() * kRun;
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          store_tile(scores.diagonal[i][n], diagonal_q(i), token, token + n * 8, 1);
    }
  }

  __device__ void store_scalars() const {
    if (tid >= kChunk) return;
    a.factors.beta[tile() * kChunk + tid] = s.beta[tid];
    a.factors.diag[tile() * kChunk + tid] = s.diag[tid];
  }
};

}  // namespace kda::cuda::intra
