// SPDX-License-Identifier: Apache-2.0
// Scores between tokens by blocks of sub-chunks, on the tensor cores.
//
// Levels 32 and 16 pair groups of as many tokens: rows from the second, columns from the first,
// both decayed to the midpoint between them (docs/operation.md). With bf16, whose range allows it,
// pairs inside a sub-chunk are anchored at its start: rows decayed since then, columns divided by
// that decay. Rows reach from kAnchor to kLeast, columns from 1 / kAnchor to 1 / kLeast; fine.cuh
// has the rows that decay below it. Row i depends on nothing after token i.
#pragma once

#include "cuda/staged/intra/context.cuh"

namespace kda::cuda::intra {

// ---- operands
// ------------------------------------------------------------------------------------------

template <class C>
__device__ void put(const C& c, RowsOf<C>* target, int row, uint32_t pair) {
  *reinterpret_cast<uint32_t*>(&target[row][c.channel()]) = pair;
}
/// The factor is rounded before the product is: one more rounding, of scores only.
template <class C>
__device__ void put(const C& c, RowsOf<C>* target, int row, uint32_t pair, float2 factor) {
  using T = typename C::T;
  put(c, target, row, ptx::mul_x2<T>(pair, ptx::pack<T>(factor.x, factor.y)));
}
/// Also false where the factor is NaN.
template <class C>
__device__ bool in_range(const C&, float2 factor) {
  return factor.x >= C::kLeast && factor.y >= C::kLeast;
}

/// Stores all 16 tokens as rows of q and k, decayed since the start of the sub-chunk and by
/// `factor`.
template <class C>
__device__ void put_rows(const C& c, RowsOf<C>* q_rows, RowsOf<C>* k_rows, float2 factor) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    multiply(factor, c.decay[i]);
    put(c, q_rows, i, c.q[i], factor);
    put(c, k_rows, i, c.k[i], factor);
  }
}
/// Stores them as columns, decayed until the end of the sub-chunk and by `factor`.
template <class C>
__device__ void put_columns(const C& c, RowsOf<C>* columns, float2 factor) {
#pragma unroll
  for (int i = kSubchunk - 1; i >= 0; --i) {
    put(c, columns, i, c.k[i], factor);
    multiply(factor, c.decay[i]);
  }
}
/// Counts rows of this sub-chunk before the first that some channel has out of range.
template <class C>
__device__ void count_anchored(const C& c) {
  float2 factor{C::kAnchor, C::kAnchor};
  int count = 0;
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    multiply(factor, c.decay[i]);
    if (count == i && in_range(c, factor)) count = i + 1;
  }
  atomicMin(&c.s.anchored[c.subchunk()], count);
}
/// Stores tokens as rows in place of the raw ones, and as columns of the sub-chunk's own rows.
/// Every row's range counts: where gates are positive, the last may be in range when others are
/// not.
template <class C>
__device__ void put_anchored(const C& c) {
  const int token = c.subchunk() * kSubchunk;
  float2 factor{C::kAnchor, C::kAnchor};
  bool all = true;
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    multiply(factor, c.decay[i]);
    all = all && in_range(c, factor);
    put(c, c.s.q + token, i, c.q[i], factor);
    put(c, c.s.k + token, i, c.k[i], factor);
    put(c, c.s.blocks.diagonal + token, i, c.k[i], float2{ptx::rcp(factor.x), ptx::rcp(factor.y)});
  }
  if (!all) count_anchored(c);
}
/// Stores operands of all blocks. Rows that are decayed since the start of their sub-chunk take the
/// place of the raw ones: the diagonal, the second and the fourth sub-chunk at level 16, and the
/// third at level 32 meet them.
template <bool kDiagonal, class C>
__device__ void block_operands(const C& c) {
  auto& s = c.s;
  const int token = c.subchunk() * kSubchunk;
  const auto total = [&](int of) {
    return *reinterpret_cast<const float2*>(&s.totals[of][c.channel()]);
  };
  if constexpr (kDiagonal)
    put_anchored(c);
  else
    put_rows(c, s.q + token, s.k + token, {C::kAnchor, C::kAnchor});
  if (c.subchunk() < 3) {
    put_columns(c,
                c.subchunk() == 1 ? s.blocks.level32 + kSubchunk
                                  : s.blocks.level16 + c.subchunk() / 2 * kSubchunk,
                {1, 1});
  }
  if (c.subchunk() == 0) put_columns(c, s.blocks.level32, total(1));
  if (c.subchunk() == 3) {
    const float2 before = total(2);
    put_rows(c, s.blocks.far_q, s.blocks.far_k, {before.x * C::kAnchor, before.y * C::kAnchor});
  }
}

// ---- products
// ------------------------------------------------------------------------------------------

/// Which products a warp has. A task is 16 rows of q and the same rows of k, which meet columns
/// that are read once for both: two at level 32, cut into parts of the columns so that every warp
/// has one; two at level 16 in two parts each, and the four diagonal blocks: of eight warps four
/// have these, four those.
template <class C>
struct Tasks {
  static constexpr int kParts32 = C::kWarps / 2, kTiles32 = 4 / kParts32;
  static constexpr bool kApart = C::kWarps == 8;
  static_assert(kApart || C::kWarps == 4);
  const C& c;
  __device__ int rows32() const { return c.warp() / kParts32; }
  __device__ int part32() const { return c.warp() % kParts32; }
  __device__ bool has_level16() const { return !kApart || c.warp() < 4; }
  __device__ bool has_diagonal() const { return !kApart || c.warp() >= 4; }
  __device__ int rows16() const { return c.warp() % 4 / 2; }
  __device__ int part16() const { return c.warp() % 2; }
  __device__ int own_block() const { return c.warp() % 4; }

  /// Tiles of 16 rows and 8 columns: the rows of q, then those of k; level 32 has the first.
  static constexpr int kOf16 = 2 * kTiles32, kOfDiagonal = kApart ? kOf16 : kOf16 + 2;
  static constexpr int kPasses = 32 / C::kWarps;  // token form: of two tokens a warp
};
template <class C>
struct Accumulators {
  float tiles[Tasks<C>::kOfDiagonal + 4][4] = {};
  float token_q[Tasks<C>::kPasses] = {}, token_k[Tasks<C>::kPasses] = {};
};

/// acc += rows x columns^T: kRowTiles times 16 rows, kTiles n8 tiles of columns.
template <int kRowTiles, int kTiles, class C>
__device__ void multiply_rows(const C& c, const RowsOf<C>* const (&rows)[kRowTiles],
                              const RowsOf<C>* columns, float (*acc)[4]) {
  using T = typename C::T;
  uint32_t left[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
    left[m] = ptx::shared_address(&rows[m][c.lane() % 16][c.lane() / 16 * 8]);
  const uint32_t right = ptx::shared_address(&columns[c.lane() % 8][c.lane() / 8 * 8]);
#pragma unroll
  for (int step = 0; step < C::kSteps; step += 2) {
    uint32_t b[kTiles][4];  // 8 columns x 32 channels
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      ptx::ldmatrix_x4(b[n], right + (n * 8 * C::kStride + step * 16) * sizeof(T));
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
template <int kTiles, class C>
__device__ void multiply_both(const C& c, const RowsOf<C>* q_rows, const RowsOf<C>* k_rows,
                              const RowsOf<C>* columns, float (*acc)[4]) {
  const RowsOf<C>* const rows[2] = {q_rows, k_rows};
  multiply_rows<2, kTiles>(c, rows, columns, acc);
}
template <bool kDiagonal, class C>
__device__ void block_products(const C& c, Accumulators<C>& scores) {
  using W = Tasks<C>;
  const W tasks{c};
  auto& s = c.s;
  const bool far = tasks.rows32() != 0;
  multiply_both<W::kTiles32>(c, far ? s.blocks.far_q : s.q + 2 * kSubchunk,
                             far ? s.blocks.far_k : s.k + 2 * kSubchunk,
                             s.blocks.level32 + tasks.part32() * W::kTiles32 * 8, scores.tiles);
  if (tasks.has_level16()) {
    const int token = (tasks.rows16() * 2 + 1) * kSubchunk;
    multiply_both<1>(c, s.q + token, s.k + token,
                     s.blocks.level16 + tasks.rows16() * 16 + tasks.part16() * 8,
                     scores.tiles + W::kOf16);
  }
  if (kDiagonal && tasks.has_diagonal()) {
    const int token = tasks.own_block() * kSubchunk;
    multiply_both<2>(c, s.q + token, s.k + token, s.blocks.diagonal + token,
                     scores.tiles + W::kOfDiagonal);
  }
}

}  // namespace kda::cuda::intra
