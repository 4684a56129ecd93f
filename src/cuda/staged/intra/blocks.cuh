// SPDX-License-Identifier: Apache-2.0
// Scores between tokens by blocks of runs, on the tensor cores.
#pragma once

#include "cuda/staged/intra/inputs.cuh"

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
    put(target, row, ptx::mul_x2<T>(pair, ptx::pack<T>(factor.x, factor.y)));
  }
  __device__ void put(T (*target)[kStride], int row, uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(&target[row][channel()]) = pair;
  }

  /// Also false where it is NaN.
  __device__ static bool in_range(float2 factor) {
    return factor.x >= kLeast && factor.y >= kLeast;
  }

  /// All 16 tokens as rows of q and k, decayed since the start of the run and by `factor`.
  __device__ void put_rows(T (*q_rows)[kStride], T (*k_rows)[kStride], float2 factor) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      put(q_rows, i, q[i], factor);
      put(k_rows, i, k[i], factor);
    }
  }
  /// As columns, decayed until the end of the run and by `factor`.
  __device__ void put_columns(T (*columns)[kStride], float2 factor) const {
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      put(columns, i, k[i], factor);
      multiply(factor, decay[i]);
    }
  }
  /// As rows in place of the raw ones, and as columns of the run's own rows. Every row's range
  /// counts: where gates are positive, the last may be in range when others are not.
  __device__ void put_anchored() const {
    const int token = run() * kRun;
    float2 factor{kAnchor, kAnchor};
    bool all = true;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      all = all && in_range(factor);
      put(s.q + token, i, q[i], factor);
      put(s.k + token, i, k[i], factor);
      put(s.blocks.diagonal + token, i, k[i], float2{ptx::rcp(factor.x), ptx::rcp(factor.y)});
    }
    if (!all) count_anchored();
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
    if constexpr (kDiagonal)
      put_anchored();
    else
      put_rows(s.q + token, s.k + token, {kAnchor, kAnchor});
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

  /// A task is 16 rows of q and the same rows of k, which meet columns that are read once for both:
  /// two at level 32, cut into parts of the columns so that every warp has one; two at level 16 in
  /// two parts each, and the four diagonal blocks: of eight warps four have these, four those.
  static constexpr int kParts32 = kWarps / 2, kTiles32 = 4 / kParts32;
  static constexpr bool kApart = kWarps == 8;
  static_assert(kApart || kWarps == 4);
  __device__ int rows32() const { return warp() / kParts32; }
  __device__ int part32() const { return warp() % kParts32; }
  __device__ bool has_level16() const { return !kApart || warp() < 4; }
  __device__ bool has_diagonal() const { return !kApart || warp() >= 4; }
  __device__ int rows16() const { return warp() % 4 / 2; }
  __device__ int part16() const { return warp() % 2; }
  __device__ int own_block() const { return warp() % 4; }

  /// Tiles of 16 rows and 8 columns: the rows of q, then those of k; level 32 has the first.
  static constexpr int kOf16 = 2 * kTiles32, kOfDiagonal = kApart ? kOf16 : kOf16 + 2;
  static constexpr int kPasses = 32 / kWarps;  // token form: of two tokens a warp
  struct Accumulators {
    float tiles[kOfDiagonal + 4][4] = {};
    float token_q[kPasses] = {}, token_k[kPasses] = {};
  };

  /// acc += rows x columns^T: kRowTiles times 16 rows, kTiles n8 tiles of columns.
  template <int kRowTiles, int kTiles>
  __device__ void multiply_rows(const T (*const (&rows)[kRowTiles])[kStride],
                                const T (*columns)[kStride], float (*acc)[4]) const {
    uint32_t left[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      left[m] = ptx::shared_address(&rows[m][lane() % 16][lane() / 16 * 8]);
    const uint32_t right = ptx::shared_address(&columns[lane() % 8][lane() / 8 * 8]);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t b[kTiles][4];  // 8 columns x 32 channels
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        ptx::ldmatrix_x4(b[n], right + (n * 8 * kStride + step * 16) * sizeof(T));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        uint32_t x[4], y[4];
        ptx::ldmatrix_x4(x, left[m] + step * 32);
        ptx::ldmatrix_x4(y, left[m] + step * 32 + 32);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          ptx::mma_16816<T>(acc[m * kTiles + n], x, b[n][0], b[n][1]);
          ptx::mma_16816<T>(acc[m * kTiles + n], y, b[n][2], b[n][3]);
        }
      }
    }
  }

  template <int kTiles>
  __device__ void multiply_both(const T (*of_q)[kStride], const T (*of_k)[kStride],
                                const T (*columns)[kStride], float (*acc)[4]) const {
    const T(*const rows[2])[kStride] = {of_q, of_k};
    multiply_rows<2, kTiles>(rows, columns, acc);
  }

  template <bool kDiagonal>
  __device__ void block_products(Accumulators& scores) const {
    const bool far = rows32() != 0;
    multiply_both<kTiles32>(far ? s.blocks.far_q : s.q + 2 * kRun,
                            far ? s.blocks.far_k : s.k + 2 * kRun,
                            s.blocks.level32 + part32() * kTiles32 * 8, scores.tiles);
    if (has_level16()) {
      const int token = (rows16() * 2 + 1) * kRun;
      multiply_both<1>(s.q + token, s.k + token, s.blocks.level16 + rows16() * 16 + part16() * 8,
                       scores.tiles + kOf16);
    }
    if (kDiagonal && has_diagonal()) {
      const int token = own_block() * kRun;
      multiply_both<2>(s.q + token, s.k + token, s.blocks.diagonal + token,
                       scores.tiles + kOfDiagonal);
    }
  }
};

}  // namespace kda::cuda::intra
