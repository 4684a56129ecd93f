// SPDX-License-Identifier: Apache-2.0
// Scores of a run in the anchored form, and the inverse T'. Row i depends on nothing after token i.
#pragma once

#include "cuda/fused/dyadic_scores.cuh"

namespace kda::cuda::sm90::fused {

template <int kK, class Operand, class E, int kGateMode, bool kSegments>
struct Scores : Levels<kK, Operand, E, kGateMode, kSegments> {
  using Base = Levels<kK, Operand, E, kGateMode, kSegments>;
  using Base::Base;
  using Base::is_first;
  using Base::is_last;
  using Base::kAnchor;
  using Base::kWarps;
  using Base::lane;
  using Base::own;
  using Base::put_A;
  using Base::put_L;
  using Base::warp;
  using typename Base::Stage;
  using typename Base::T;

  /// What anchored_scores() has of Aqk: tiles of 8 columns, of rows r and r + 8.
  __device__ static void put_scores(const Stage& s, int r, int c, const float (&acc)[2][4]) {
    put_A(s, r, c, acc[0][0], acc[0][1]);
    *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(r, c + 8)]) = 0;
    *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(r + 8, c)]) =
        ptx::pack<Operand>(acc[0][2] * kAnchor, acc[0][3] * kAnchor);
    put_A(s, r + 8, c + 8, acc[1][2], acc[1][3]);
  }
  /// Of L, but for the tile above the diagonal.
  __device__ void put_products(const Stage& s, int r, int c, const float (&acc)[2][4]) const {
    const float upper = s.factors.k_norm[token_place(r)],
                lower = s.factors.k_norm[token_place(r + 8)];
    const float4 k_beta = *reinterpret_cast<const float4*>(&s.factors.k_beta[token_place(c)]);
    put_L(r, c, acc[0][0], acc[0][1], upper, {k_beta.x, k_beta.y});
    put_L(r + 8, c, acc[0][2], acc[0][3], lower, {k_beta.x, k_beta.y});
    put_L(r + 8, c + 8, acc[1][2], acc[1][3], lower, {k_beta.z, k_beta.w});
  }

  __device__ uint32_t rows_of_scores(const Stage& s, int which) const {
    if constexpr (kHalf<Operand>)
      return ptx::shared_address(which == 0 ? own.scratch.q : own.scratch.k);
    else
      return ptx::shared_address(s.tiles.rows + (which == 0 ? kRun * 64 : 0));
  }
  /// Of q (0) or k (1).
  __device__ void multiply_rows(const Stage& s, int which, float (&acc)[2][4]) const {
    const int row = lane() % 16;
    const uint32_t left = rows_of_scores(s, which) + row * 128;
    constexpr int kNextColumns = (kHalf<Operand> ? 1 : 2) * kRun * 128;
    const uint32_t right =
        ptx::shared_address(&own.columns[lane() % 8 + lane() / 16 * 8][lane() / 8 % 2 * 8]);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      uint32_t x[4], y[4];
      const int piece = step % 4 * 2 + lane() / 16;
      ptx::ldmatrix_x4(x, left + step / 4 * kNextColumns + (piece ^ row & 7) * 16);
      ptx::ldmatrix_x4(y, right + step * 32);
      ptx::mma_16816<T>(acc[0], x, y[0], y[1]);
      ptx::mma_16816<T>(acc[1], x, y[2], y[3]);
    }
  }
  /// The first warp: rows of q; the last one: rows of k.
  __device__ void anchored_scores(const Stage& s) const {
    float acc[2][4] = {}, more[2][4] = {};
    multiply_rows(s, warp(), acc);
    if constexpr (kWarps == 1) multiply_rows(s, 1, more);
    if (kHalf<Operand>) __syncwarp();  // L comes where rows are
    this->share([&] { put_scores(s, lane() / 4, lane() % 4 * 2, acc); },
                [&] { put_products(s, lane() / 4, lane() % 4 * 2, kWarps == 1 ? more : acc); });
  }

  // ---- T' = (I + L)^-1 -------------------------------------------------------------------------

  /// Diagonal blocks of 8 by substitution in fp32, in place; a lane owns a column.
  __device__ void invert_blocks() const {
    const int at = lane() / 8 % 2 * 8, j = lane() % 8;
    float column[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = *reinterpret_cast<const float4*>(&own.scratch.L[at + i][at + m]);
        sum -= l.x * column[m];
        if (m + 1 < i) sum -= l.y * column[m + 1];
        if (m + 2 < i) sum -= l.z * column[m + 2];
        if (m + 3 < i) sum -= l.w * column[m + 3];
      }
      column[i] = i < j ? 0.0f : sum;
    }
    __syncwarp();
    if (lane() < 16)
#pragma unroll
      for (int i = 0; i < 8; ++i) own.scratch.L[at + i][at + j] = column[i];
    __syncwarp();
  }
  /// T21 = -T22 L21 T11 in tf32: every factor is bounded by 2. The k order of the second product is
  /// permuted so that the first one's accumulators are its A operand.
  __device__ void merge_blocks(float (&out)[4]) const {
    const int r = lane() / 4, c = lane() % 4;
    const auto tf32 = [&](int i, int j) { return ptx::to_tf32(own.scratch.L[i][j]); };
    float y[4] = {};
    const uint32_t left[4] = {tf32(8 + r, 8 + c), 0, tf32(8 + r, 12 + c), 0};
    ptx::mma_1688_tf32(y, left, tf32(8 + c, r), tf32(12 + c, r));
    const uint32_t next[4] = {ptx::to_tf32(-y[0]), 0, ptx::to_tf32(-y[1]), 0};
    ptx::mma_1688_tf32(out, next, tf32(2 * c, r), tf32(2 * c + 1, r));
  }
  __device__ void invert(const Stage& s) const {
    invert_blocks();
    float lower[4] = {};
    merge_blocks(lower);
    const int r = lane() / 4, c = lane() % 4 * 2;
    const auto put_pair = [&](int i, int j, float x, float y) {
      *reinterpret_cast<uint32_t*>(&s.factors.inverse[square_place(i, j)]) =
          ptx::pack<Operand>(x, y);
    };
#pragma unroll
    for (int at = 0; at < kRun; at += 8) {
      const float2 x = *reinterpret_cast<const float2*>(&own.scratch.L[at + r][at + c]);
      put_pair(at + r, at + c, c < r ? x.x : 0.0f, c + 1 < r ? x.y : 0.0f);
    }
    put_pair(r, 8 + c, 0, 0);
    put_pair(8 + r, c, lower[0], lower[1]);
  }
};

}  // namespace kda::cuda::sm90::fused
