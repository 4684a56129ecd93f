// SPDX-License-Identifier: Apache-2.0
// Scores between tokens by blocks of runs, on the tensor cores.
#pragma once

#include "cuda/sm80/intra/inputs.cuh"

namespace kda::cuda::intra {

/// Levels 32 and 16 pair runs of as many tokens: rows from the second, columns from the first, both
/// decayed to the midpoint between them (docs/operation.md). With bf16, whose range allows it,
/// pairs inside a run of 16 are anchored at its start: rows decayed since then, columns divided by
/// it. Rows reach from kAnchor to kLeast, columns from 1 / kAnchor to 1 / kLeast; fine.cuh has the
/// rows that decay below it. Row i depends on nothing after token i.
template <class T, int kK>
struct Blocks : Inputs<T, kK> {
  using Base = Inputs<T, kK>;
  using Base::Base;
  using Base::channel;
  using Base::decay;
  using Base::k;
  using Base::kAnchor;
  using Base::kLeast;
  using Base::kSteps;
  using Base::kStride;
  using Base::kWarps;
  using Base::lane;
  using Base::multiply;
  using Base::q;
  using Base::run;
  using Base::s;
  using Base::warp;

  // ---- operands ---------------------------------------------------------------------------------

  /// The factor is rounded before the product is: one more rounding, of scores only.
  __device__ void put(T (*target)[kStride], int row, uint32_t pair, float2 factor) const {
    put(target, row, ptx::multiply_pairs<T>(pair, ptx::pack<T>(factor.x, factor.y)));
  }
  __device__ void put(T (*target)[kStride], int row, uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(&target[row][channel()]) = pair;
  }

  /// Also false where it is NaN.
  __device__ static bool in_range(float2 factor) {
    return factor.x >= kLeast && factor.y >= kLeast;
  }

  /// All 16 tokens as rows of q and k, decayed since the start of the run and by `factor`. Whether
  /// all are in range: where gates are positive, the last may be when others are not.
  __device__ bool put_rows(T (*q_rows)[kStride], T (*k_rows)[kStride], float2 factor) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      all = all && in_range(factor);
      put(q_rows, i, q[i], factor);
      put(k_rows, i, k[i], factor);
    }
    return all;
  }
  /// As columns, decayed until the end of the run and by `factor`.
  __device__ void put_columns(T (*columns)[kStride], float2 factor) const {
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      put(columns, i, k[i], factor);
      multiply(factor, decay[i]);
    }
  }
  /// As columns of the run's own rows.
  __device__ void put_inverse_columns(T (*columns)[kStride]) const {
    float2 factor{kAnchor, kAnchor};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      put(columns, i, k[i], float2{ptx::reciprocal(factor.x), ptx::reciprocal(factor.y)});
    }
  }

  /// Rows of this run before the first that some channel has out of range.
  __device__ void count_anchored() const {
    float2 factor{kAnchor, kAnchor};
    int count = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      if (count == i && in_range(factor)) count = i + 1;
    }
    atomicMin(&s.anchored[run()], count);
  }

  /// Operands of all blocks. Rows that are decayed since the start of their run take the place of
  /// the raw ones: the diagonal, the second and the fourth run at level 16, and the third run at
  /// level 32 meet them.
  template <bool kDiagonal>
  __device__ void block_operands() const {
    const int token = run() * kRun;
    const auto total = [&](int of) {
      return *reinterpret_cast<const float2*>(&s.totals[of][channel()]);
    };
    const bool in_range = put_rows(s.q + token, s.k + token, {kAnchor, kAnchor});
    if constexpr (kDiagonal) {
      if (!in_range) count_anchored();
      put_inverse_columns(s.blocks.diagonal + token);
    }
    if (run() < 3) {
      put_columns(run() == 1 ? s.blocks.level32 + kRun : s.blocks.level16 + run() / 2 * kRun,
                  {1, 1});
    }
    if (run() == 0) put_columns(s.blocks.level32, total(1));
    if (run() == 3) {
      const float2 before = total(2);
      put_rows(s.blocks.far_q, s.blocks.far_k, {before.x * kAnchor, before.y * kAnchor});
    }
  }

  // ---- products ---------------------------------------------------------------------------------

  /// Accumulators of this warp's tiles: of the 16 of level 32, the 8 of level 16, and the 16 of the
  /// diagonal blocks, of which a warp has the rows of q or of k of one run.
  static constexpr int kTiles32 = 16 / kWarps, kTiles16 = 8 / kWarps, kRowBlocks = 8 / kWarps;
  static constexpr int kPasses = 32 / kWarps;  // token form: of two tokens a warp
  struct Accumulators {
    float level32[kTiles32][4] = {};
    float level16[kTiles16][4] = {};
    float diagonal[kRowBlocks][2][4] = {};
    float token_q[kPasses] = {}, token_k[kPasses] = {};
  };

  /// acc += rows x columns^T: 16 rows, kTiles n8 tiles of columns.
  template <int kTiles>
  __device__ void multiply_rows(const T (*rows)[kStride], const T (*columns)[kStride],
                                float (&acc)[kTiles][4]) const {
    const uint32_t left = ptx::shared_address(&rows[lane() % 16][lane() / 16 * 8]);
    const uint32_t right = ptx::shared_address(&columns[lane() % 8][lane() / 8 * 8]);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t x[4], y[4];
      ptx::ldmatrix_x4(x, left + step * 32);
      ptx::ldmatrix_x4(y, left + step * 32 + 32);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        uint32_t b[4];  // 8 columns x 32 channels
        ptx::ldmatrix_x4(b, right + (n * 8 * kStride + step * 16) * sizeof(T));
        ptx::mma_16816<T>(acc[n], x, b[0], b[1]);
        ptx::mma_16816<T>(acc[n], y, b[2], b[3]);
      }
    }
  }

  /// Of the coarse levels a warp has 16 rows, 0 and 1 of q, 2 and 3 of k, and a part of the
  /// columns.
  static constexpr int kSplit = kWarps / 4;
  __device__ int coarse_rows() const { return warp() / kSplit; }
  __device__ int coarse_part() const { return warp() % kSplit; }
  /// Of the diagonal, rows number i of this warp: which run, and whether q.
  __device__ int diagonal_run() const { return warp() * kRowBlocks / 2; }
  __device__ bool diagonal_q(int i) const { return (warp() * kRowBlocks + i) % 2 == 0; }

  template <bool kDiagonal>
  __device__ void block_products(Accumulators& scores) const {
    const int m = coarse_rows();
    const T(*rows)[kStride] = m < 2 ? s.q : s.k;
    const T(*far)[kStride] = m < 2 ? s.blocks.far_q : s.blocks.far_k;
    multiply_rows(m % 2 == 0 ? rows + 2 * kRun : far,
                  s.blocks.level32 + coarse_part() * (32 / kSplit), scores.level32);
    multiply_rows(rows + (m % 2 * 2 + 1) * kRun,
                  s.blocks.level16 + m % 2 * 16 + coarse_part() * (16 / kSplit), scores.level16);
    if constexpr (kDiagonal) {
      const int token = diagonal_run() * kRun;
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i)
        multiply_rows((diagonal_q(i) ? s.q : s.k) + token, s.blocks.diagonal + token,
                      scores.diagonal[i]);
    }
  }
};

}  // namespace kda::cuda::intra
