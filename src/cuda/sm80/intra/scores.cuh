// SPDX-License-Identifier: Apache-2.0
// Scores of all levels, normalised, to squares in shared memory: Aqk and L = N diag(beta).
#pragma once

#include "cuda/sm80/intra/tokens.cuh"

namespace kda::cuda::intra {

template <class T, int kK>
struct Scores : Tokens<T, kK> {
  using Base = Tokens<T, kK>;
  using Base::a;
  using Base::Base;
  using Base::kThreads;
  using Base::kTiles16;
  using Base::kTiles32;
  using Base::kWarps;
  using Base::lane;
  using Base::run;
  using Base::s;
  using Base::slot_of;
  using Base::store_tokens;
  using Base::takes_level;
  using Base::tid;
  using Base::tile;
  using Base::warp;
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

  /// Tile of a coarse level: rows of q (first 32) or of k.
  __device__ void store_coarse(const float (&acc)[4], bool q, int i, int j) const {
    if (q) {
      put_A(i, j, acc[0], acc[1]), put_A(i + 8, j, acc[2], acc[3]);
    } else {
      put_L(i, j, acc[0], acc[1]), put_L(i + 8, j, acc[2], acc[3]);
    }
  }
  /// Tile of level h: q and k rows of the same tokens; columns of other runs are dropped.
  template <int h>
  __device__ void store_fine(const float (&acc)[4], int at) const {
    const int r = lane() / 4, n = lane() % 4 * 2;
    const int i = at + r / h * 2 * h + h + r % h;
    if constexpr (h > 1) {
      if (n / h != r / h) return;
      const int j = at + n / h * 2 * h + n % h;
      put_A(i, j, acc[0], acc[1]);
      put_L(i, j, acc[2], acc[3]);
    } else {  // the column before the diagonal
      if (n != r && n + 1 != r) return;
      const float q = n == r ? acc[0] : acc[1], k = n == r ? acc[2] : acc[3];
      s.after.A[i][i - 1] = static_cast<T>(q * (s.q_norm[i] * s.k_norm[i - 1]));
      s.after.N[i][i - 1] = k * (s.k_norm[i] * s.k_beta[i - 1]);
    }
  }

  template <bool kTokens>
  __device__ void store_scores(const Accumulators& scores) const {
    constexpr int kSplit = kWarps / 4;
    const int m = warp() / kSplit;
#pragma unroll
    for (int n = 0; n < kTiles32; ++n)
      store_coarse(scores.level32[n], m < 2, 32 + m % 2 * 16 + lane() / 4,
                   warp() % kSplit * (32 / kSplit) + n * 8 + lane() % 4 * 2);
#pragma unroll
    for (int n = 0; n < kTiles16; ++n)
      store_coarse(scores.level16[n], m < 2, m % 2 * 32 + 16 + lane() / 4,
                   m % 2 * 32 + warp() % kSplit * (16 / kSplit) + n * 8 + lane() % 4 * 2);
    if constexpr (kTokens) {
      store_tokens(scores);
      return;
    }
    const int token = run() * kBlock;
    if (takes_level(0)) store_fine<8>(scores.fine[slot_of(0)][0], token);
    if (takes_level(1)) store_fine<4>(scores.fine[slot_of(1)][0], token);
    if (takes_level(2)) store_fine<2>(scores.fine[slot_of(2)][0], token);
    if (takes_level(3)) store_fine<1>(scores.fine[slot_of(3)][0], token);
  }

  __device__ void store_scalars() const {
    if (tid >= kChunk) return;
    a.factors.beta[tile() * kChunk + tid] = s.beta[tid];
    a.factors.diag[tile() * kChunk + tid] = s.diag[tid];
  }
};

}  // namespace kda::cuda::intra
