// SPDX-License-Identifier: Apache-2.0
// The kernel of decode with a tail where sequences have several tokens, K = V = 128: verify. Every
// sum has the terms and the order that kernel.cuh gives it, so o and S_0 have the same bits.
//
// It differs in this:
//   - Folds come first, one after the other, as calls without tokens would do them. Shared memory
//     has room for 16 rows and the tokens, where it had a whole tail and the tokens, and an SM for
//     more blocks.
//   - A warp scores a token, or two neighbours of a chain, with four rows at a time, so that many
//     sums are under way. Neighbours share the rows in front of them.
//   - S_0 passes through registers once for a batch of tokens.
//   - S_0^T k and S_0^T q have no room of their own.
//   - One kernel serves all layouts and types of states: little of it reads them.
// Trees take the other kernel.
#pragma once

#include "cuda/decode/tail/kernel.cuh"

namespace kda::cuda::tail {

constexpr int kVerifySize = 128;  ///< K and V
constexpr int kVerifyWarps = kWarps<kVerifySize>;

using VerifyRows = Rows<kVerifySize, true, false>;

/// The columns of states of a layout and a type.
template <Access kAccess, bool kPacked>
struct ColumnsOf {
  using Type = Tile<kVerifySize, kAccess, kPacked>;
};

/// visit(tile) for those of this warp's columns of the head's states.
template <class Visit>
__device__ __forceinline__ void for_each_tile(const VerifyRows& rows, Visit&& visit) {
  const StateView& states = rows.a.initial;
  const auto of = [&](auto columns_of) {
    using Columns = typename decltype(columns_of)::Type;
#pragma unroll 1
    for (int c = 0; c < kWarpColumns; c += Columns::kColumns)
      visit(Columns(states, rows.a.shape, rows.unit.head, rows.warp * kWarpColumns + c));
  };
  if (states.vk)
    states.bf16 ? of(ColumnsOf<Access::kVectorsVK, true>())
                : of(ColumnsOf<Access::kVectorsVK, false>());
  else
    states.bf16 ? of(ColumnsOf<Access::kVectorsKV, true>())
                : of(ColumnsOf<Access::kVectorsKV, false>());
}

/// Neighbours of a chain that a warp scores together: a lane's channels of them, and D of each from
/// the rows that have been scored to its own.
template <int kTokens>
struct Neighbours {
  static constexpr int kOwn = VerifyRows::kOwn;
  float key[kTokens][kOwn], query[kTokens][kOwn], product[kTokens][kOwn];
};

/// Reads neighbours from `token` on, and makes q . q and q . k of each.
template <int kTokens>
__device__ __forceinline__ void read_neighbours(const VerifyRows& rows, int token,
                                                Neighbours<kTokens>& of) {
  const int x = rows.sure() + token;
  float own[2 * kTokens] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    rows.read_own(rows.k(x + t), of.key[t]);
    rows.read_query(token + t, of.query[t]);
#pragma unroll
    for (int c = 0; c < of.kOwn; ++c) {
      own[2 * t] = fmaf(of.query[t][c], of.query[t][c], own[2 * t]);
      own[2 * t + 1] = fmaf(of.query[t][c], of.key[t][c], own[2 * t + 1]);
      of.product[t][c] = 1;
    }
  }
  reduce_scatter<2 * kTokens, 16>(own);
  if (rows.lane % (16 / kTokens) == 0)
    reinterpret_cast<float*>(rows.of_q(token))[rows.lane / (16 / kTokens)] = own[0];
  // The decay of its own row is the first factor of a token's product.
  rows.read_own(rows.decay(x + kTokens - 1), of.product[kTokens - 1]);
}

/// A lane's part of the sums of row i with neighbours whose first row is x, and their products
/// behind it. A row that is not in front of a token is left out of its product; the sum is
/// nobody's.
template <int kTokens>
__device__ __forceinline__ void score_row(const VerifyRows& rows, int x, int i,
                                          Neighbours<kTokens>& of, float* sums) {
  constexpr int kOwn = VerifyRows::kOwn;
  float row[kOwn], decay[kOwn];
  rows.read_own(rows.k(max(i, 0)), row);
  rows.read_own(rows.decay(max(i, 0)), decay);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const float decayed = row[c] * of.product[t][c];
      sums[2 * t] = fmaf(decayed, of.key[t][c], sums[2 * t]);
      sums[2 * t + 1] = fmaf(decayed, of.query[t][c], sums[2 * t + 1]);
    }
    if (i >= 0 && i <= x + t) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) of.product[t][c] *= decay[c];
    }
  }
}

/// A warp's scores of kTokens neighbours of a chain, from `token` on, with the rows in front of
/// them, and their vectors that meet S_0: make_scores() of each.
template <int kTokens>
__device__ __forceinline__ void score_chain(const VerifyRows& rows, int token, int in_batch) {
  constexpr int kSide = 4;                    // rows that are read side by side
  constexpr int kSums = 2 * kTokens * kSide;  // with k and q, of each token, of each row
  constexpr int kSame = 32 / kSums;           // lanes that end with the same sum
  const int x = rows.sure() + token;          // the first token's row
  Neighbours<kTokens> of;
  read_neighbours(rows, token, of);
#pragma unroll 1
  for (int last = x + kTokens - 2; last >= 0; last -= kSide) {
    float sums[kSums] = {};
#pragma unroll
    for (int r = 0; r < kSide; ++r) score_row(rows, x, last - r, of, sums + 2 * kTokens * r);
    reduce_scatter<kSums, 16>(sums);
    const int sum = rows.lane / kSame, t = sum / 2 % kTokens, i = last - sum / (2 * kTokens);
    if (rows.lane % kSame == 0 && i >= 0 && i < x + t)
      reinterpret_cast<float*>(rows.scores(in_batch + t) + (x + t - 1 - i))[sum % 2] =
          sums[0] * rows.key_factor(i);
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int c = 0; c < of.kOwn; ++c)
      of.key[t][c] *= of.product[t][c], of.query[t][c] *= of.product[t][c];
    rows.write_own(of.key[t], rows.with_state(in_batch + t, false));
    rows.write_own(of.query[t], rows.with_state(in_batch + t, true));
  }
}

/// make_batch() of `count` tokens of a chain: a warp has one of them or, of more than there are
/// warps, two that follow each other.
template <int kMost>
__device__ __forceinline__ void score_batch(const VerifyRows& rows, int token, int count) {
  const int each = kMost > kVerifyWarps && count > kVerifyWarps ? 2 : 1, t = each * rows.warp;
  if (each == 2 && t + 1 < count)
    score_chain<2>(rows, token + t, t);
  else if (t < count)
    score_chain<1>(rows, token + t, t);
  __syncthreads();
}

/// Adds the products of a patch with `count` tokens of the batch. They go two by two, so that four
/// vectors are read at once; the second of the last two may be the first one again.
template <int kMost, class Tile>
__device__ __forceinline__ void multiply_patch(const VerifyRows& rows, const Tile& tile, int j,
                                               const typename Tile::Patch& x, int count,
                                               float (&sums)[2 * kMost][4]) {
#pragma unroll
  for (int t = 0; t < kMost; t += 2) {
    if (t >= count) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile.multiply(rows.with_state(i < 2 ? t : min(t + 1, count - 1), i % 2), j, x,
                    sums[2 * t + i]);
  }
}

/// Products of S_0 in the columns of a tile with `count` tokens from `token` on, a batch. While a
/// patch meets them the next one is on its way.
template <int kMost, class Tile>
__device__ __forceinline__ void multiply_tokens(const VerifyRows& rows, const Tile& tile, int token,
                                                int count) {
  float sums[2 * kMost][4] = {};  // with k and q
  typename Tile::Patch x[2];
  const int64_t from = tile.place(rows.start.source);
  tile.load(from, 0, x[0]);
#pragma unroll 1
  for (int j = 0; j < tile.patches(); j += 2) {
    tile.load(from, j + 1, x[1]);
    multiply_patch<kMost>(rows, tile, j, x[0], count, sums);
    if (j + 2 < tile.patches()) tile.load(from, j + 2, x[0]);
    multiply_patch<kMost>(rows, tile, j + 1, x[1], count, sums);
  }
#pragma unroll
  for (int i = 0; i < 2 * kMost; ++i)
    if (i < 2 * count) tile.store_sums(sums[i], rows.product(token, i / 2, i % 2));
}

/// S_0^T k and S_0^T q of `count` tokens, a batch, in this warp's columns.
template <int kMost>
__device__ __forceinline__ void multiply_batch(const VerifyRows& rows, int token, int count) {
  for_each_tile(rows, [&](const auto& tile) { multiply_tokens<kMost>(rows, tile, token, count); });
  __syncwarp();
}

/// The factors that another lane has.
__device__ __forceinline__ Factors factors_of_lane(const Factors& mine, int lane) {
  const auto of = [&](float x) { return __shfl_sync(~0u, x, lane); };
  return {of(mine.of_key), {of(mine.of_q.x), of(mine.of_q.y)}, of(mine.beta)};
}

/// Adds the products of kRows rows with their scores, from the n-th behind the newest on, to sums
/// with k and q. All are read before any is added.
template <int kRows>
__device__ __forceinline__ void add_rows(const float2* scores, const float* newest, int n,
                                         float2& sums) {
  alignas(16) float score[2 * kRows];
  float v_new[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kRows == 1)
      score[0] = scores[n].x, score[1] = scores[n].y;
    else if (r % 2 == 0)
      *reinterpret_cast<float4*>(score + 2 * r) = *reinterpret_cast<const float4*>(scores + n + r);
    v_new[r] = newest[-(n + r) * kVerifySize];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sums.x = fmaf(score[2 * r], v_new[r], sums.x);
    sums.y = fmaf(score[2 * r + 1], v_new[r], sums.y);
  }
}

/// v_new and o of `count` tokens of a chain, a batch, of the lane's column: solve() of each. A lane
/// makes the factors of one token for all.
__device__ __forceinline__ void solve_batch(const VerifyRows& rows, int column, int token,
                                            int count) {
  const Factors mine = factors_of(rows, token + min(rows.lane, count - 1));
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    const int x = rows.sure() + token + t;
    const float* newest = rows.v_new(x - 1) + column;
    float2 sums = {rows.product(token, t, false)[column], rows.product(token, t, true)[column]};
    int n = 0;
#pragma unroll 1
    for (; n + 8 <= x; n += 8) add_rows<8>(rows.scores(t), newest, n, sums);
    if (x & 4) add_rows<4>(rows.scores(t), newest, n, sums), n += 4;
    if (x & 2) add_rows<2>(rows.scores(t), newest, n, sums), n += 2;
    if (x & 1) add_rows<1>(rows.scores(t), newest, n, sums);
    write_token<true>(rows, factors_of_lane(mine, t), column, token + t, sums.x, sums.y);
    __syncwarp();
  }
}

/// The tokens of a chain, a batch after the other.
template <int kMost>
__device__ __forceinline__ void run_chain(const VerifyRows& rows) {
#pragma unroll 1
  for (int token = 0; token < rows.count; token += kMost) {
    const int count = min(rows.count - token, kMost);
    if (token > 0) __syncthreads();  // the batch before has been read
    score_batch<kMost>(rows, token, count);
    multiply_batch<kMost>(rows, token, count);
    solve_batch(rows, rows.warp * kWarpColumns + rows.lane, token, count);
  }
}

/// Folds the rows into S_0 and writes it.
__device__ __forceinline__ void fold_rows(const VerifyRows& rows) {
  const Start& start = rows.start;
  prepare_folds(rows, rows.sure());
  __syncthreads();
  for_each_tile(rows, [&](const auto& tile) {
    fold_state(rows, tile, {start.source, start.slot, true}, rows.sure());
  });
}

/// kMost: tokens of a batch. Blocks of an SM: shared memory has room for three with 16 tokens, for
/// four with 8 and for five with 4.
template <int kMost>
__global__ void __launch_bounds__(32 * kVerifyWarps, kMost == 4 ? 5 : 4)
    verify_kernel(const __grid_constant__ TailArgs a) {
  Task task;
  if (!find_tokens(a, &task) || !find_tail<true>(a, &task)) return;
  Start& start = task.start;
  const int32_t target = fold_target(a, task.unit.n, start);
  bool folds = writes_state(a, start, target - start.folded);
#pragma unroll 1
  while (true) {
    Start part = start;
    if (folds) part.position = start.folded + fold_end(start, 0, target - start.folded);
    VerifyRows rows(a, task.unit, part, task.tokens.begin, folds ? 0 : task.count);
    rows.load();
    prefetch_state_of(rows, false);
    rows.make();
    prefetch_state_of(rows, true);
    if (!folds) {
      run_chain<kMost>(rows);
      rows.append_of_heads<true>();
      break;
    }
    fold_rows(rows);
    start.folded = part.position, start.source = start.slot;
    folds = start.folded < target;
    __syncthreads();  // other rows take the place of these
  }
  finish_task(a, task);
}

}  // namespace kda::cuda::tail
