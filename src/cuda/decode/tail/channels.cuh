// SPDX-License-Identifier: Apache-2.0
// The shared memory of kernels of one token, step.cuh of a tail and ring.cuh of a ring, K = V =
// 128: a thread has one channel of all rows, and one column of v_new and o.
#pragma once

#include "cuda/decode/tail/layout.hpp"
#include "cuda/decode/tail/tail.hpp"
#include "cuda/decode/tail/tile.cuh"

namespace kda::cuda::tail {

struct Channels {
  const int channel, lane, warp;
  float* const shared;
  const ChannelLayout layout;

  __device__ explicit Channels(const ChannelLayout& of)
      : channel(static_cast<int>(threadIdx.x)),
        lane(channel % 32),
        warp(channel / 32),
        shared(reinterpret_cast<float*>(ptx::dynamic_shared())),
        layout(of) {}

  /// Keys of rows, decayed.
  __device__ float* key(int row) const { return shared + row * kChannels; }
  __device__ float* v_new(int row) const { return shared + layout.v_new() + row * kChannels; }
  __device__ float* own_key() const { return shared + layout.vector(0); }
  __device__ float* own_query() const { return shared + layout.vector(1); }
  /// k D(t, 0) and q D(t, 0), and S_0^T of them.
  __device__ float* with_state(int of_q) const { return shared + layout.vector(2 + of_q); }
  __device__ float* product(int of_q) const { return shared + layout.vector(4 + of_q); }
  /// The decays that S_0 meets where a group of rows folds.
  __device__ float* decay(int group) const { return shared + layout.decays() + group * kChannels; }
  /// Scores of rows with k and q.
  __device__ float2* scores() const { return reinterpret_cast<float2*>(shared + layout.scores()); }
  /// k . k, q . q and q . k of the token.
  __device__ float* own_sums() const { return shared + layout.own(); }

  __device__ static void add_products(const float (&x)[4], const float (&y)[4], float& sum) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sum = fmaf(x[c], y[c], sum);
  }
  /// A lane's part of the sums over channels of rows with k and q: a warp has every
  /// kChannelWarps-th row, four of them side by side from `at` on. visit(j, row) of each.
  template <class Visit>
  __device__ __forceinline__ void score(int at, int rows, const float (&k)[4], const float (&q)[4],
                                        float (&sums)[8], Visit&& visit) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = min(at + j * kChannelWarps, rows - 1);
      float decayed[4];
      spread(key(row) + 4 * lane, decayed);
      add_products(decayed, k, sums[2 * j]), add_products(decayed, q, sums[2 * j + 1]);
      visit(j, row);
    }
    reduce_scatter<8, 16>(sums);
  }
  /// The row whose sum with k or, where `of_q` is 1, with q score() leaves this lane in sums[0].
  __device__ int scored_row(int at) const { return at + lane / 8 * kChannelWarps; }
  __device__ int of_q() const { return lane / 4 % 2; }
  __device__ void store_score(int row, float sum) const {
    reinterpret_cast<float*>(scores() + row)[of_q()] = sum;
  }
  /// The token's own sums: the last warp, which has the fewest rows.
  __device__ void sum_own(const float (&k)[4], const float (&q)[4]) const {
    if (warp != kChannelWarps - 1) return;
    float sums[4] = {};
    add_products(k, k, sums[0]), add_products(q, q, sums[1]), add_products(q, k, sums[2]);
    reduce_scatter<4, 16>(sums);
    if (lane % 8 == 0) own_sums()[lane / 8] = sums[0];
  }

  template <class Tile>
  __device__ __forceinline__ void multiply(const Tile& tile, int j, const typename Tile::Patch& x,
                                           float (&sums)[2][4]) const {
#pragma unroll
    for (int of_q = 0; of_q < 2; ++of_q) tile.multiply(with_state(of_q), j, x, sums[of_q]);
  }
  /// Products of S_0 with the token, all patches on their way at once as registers allow.
  template <class Tile>
  __device__ __forceinline__ void read_state(const Tile& tile, int64_t slot,
                                             float (&sums)[2][4]) const {
    const int64_t from = tile.place(slot);
#pragma unroll
    for (int j = 0; j < kChannels / 4 / Tile::kLanes; ++j) {
      typename Tile::Patch x;
      tile.load(from, j, x);
      multiply(tile, j, x, sums);
    }
  }
  /// visit(tile, sums) for this warp's columns of a head, and stores the sums.
  template <class Tile, class Visit>
  __device__ __forceinline__ void for_each_tile(const TailArgs& a, int head, Visit&& visit) const {
#pragma unroll 1
    for (int c = 0; c < kWarpColumns; c += Tile::kColumns) {
      const Tile tile(a.initial, a.shape, head, warp * kWarpColumns + c);
      float sums[2][4] = {};
      visit(tile, sums);
      tile.store_sums(sums[0], product(0)), tile.store_sums(sums[1], product(1));
    }
  }

  /// v_new of the token in this thread's column, behind the rows' part; writes o.
  __device__ float finish(const TailArgs& a, float v, float beta, float with_k, float with_q,
                          int64_t o_at) const {
    const float2 of_q{norm_factor(a.gate, own_sums()[1]), own_sums()[2]};
    const Factors factors{norm_factor(a.gate, own_sums()[0]), of_q, beta};
    const auto [own, o] = solve_token(a.gate, factors, v, with_k, with_q);
    store_element(a.o.base, a.o.type, o_at, o);
    return own;
  }
};

}  // namespace kda::cuda::tail
