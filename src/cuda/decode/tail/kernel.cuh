// SPDX-License-Identifier: Apache-2.0
// The kernel of decode with a tail, of a head: rows, folds, then a token after the other.
//
// A step in order, and why there:
//   1. find folded; ask for v_new and the tokens; where all blocks run at once ask the L2
//      for S_0 (addresses of rows depend on it)
//   2. decays and squares of keys, a row a warp, two asked for together; __syncthreads;
//      append the tokens' rows (keys stay as they came in: scores are products of them, and
//      take their norms. A row may take the place of an older one)
//   3. where blocks wait for others ask the L2 for S_0 now (asked for earlier, S_0 of all
//      that run would not stay there: 2.0 GB came from memory for 1.3)
//   4. scores of each token: of warps that share it each has every other pair of rows,
//      newest first; D runs along as a product; __syncthreads
//   5. where a fold is due: S_0, a pair of patches at a time, folded and written (a pass of its
//      own, in few blocks: the next one has registers for four patches)
//   6. S_0, four patches at a time: products with two tokens (a load reads 128 bytes of a row)
//   7. per token the scores meet v_new; a lane has one column
#pragma once

#include "cuda/decode/tail/rows.cuh"
#include "cuda/decode/tail/tile.cuh"

namespace kda::cuda::tail {

/// The rows in front of a token, along its parents.
struct Path {
  const int* parents;  ///< of each token, a row; of a tree
  int first, sure;
  int chain;  ///< up to this row each follows the one before it

  /// The row before row i; below `first`: there is none.
  __device__ int before(int i) const { return i <= chain ? i - 1 : parents[i - sure]; }
};

/// Groups of at most 16 rows, up to boundaries, so that states do not depend on when they were
/// folded: fold_end() of core/tail.hpp, of rows behind `folded`.
__device__ __forceinline__ int fold_end(const Start& start, int at, int target) {
  const int boundary = last_boundary(start.folded + at) - start.folded;
  return min(target, boundary + static_cast<int>(kTailBoundary));
}

/// This warp's channels of rows [at, end) of keys become k_i D(end, i), normalised, and those of
/// the first one's decays D(end, at - 1). A product runs from the newest row to the oldest, so that
/// a decay of 0 makes what is in front of it vanish.
template <class Rows>
__device__ void prepare_fold(const Rows& rows, int part, int at, int end) {
  constexpr int kSide = 4;  // rows that are read side by side
  const int channel = part * kPart + rows.lane;
  float product = 1;
#pragma unroll 1
  for (int last = end - 1; last >= at; last -= kSide) {
    float key[kSide], decay[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const int i = max(last - j, at);
      key[j] = rows.k(i)[channel], decay[j] = rows.decay(i)[channel];
    }
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (last - j < at) continue;
      rows.k(last - j)[channel] = key[j] * product * rows.key_factor(last - j);
      product *= decay[j];
    }
  }
  rows.decay(at)[channel] = product;
}

/// Which rows in front of a token a warp scores: pairs of neighbours on the path, newest first,
/// every `count`th from the `index`th on.
struct Share {
  int index, count;  ///< of a power of two

  __device__ bool has(int pair) const { return (pair & (count - 1)) == index; }
  __device__ bool is_last() const { return index == count - 1; }
};

/// The sums of two rows with a key and a query, decayed by `product`, over all channels; the latter
/// is that of the second row then.
template <class Rows>
__device__ __forceinline__ void score_pair(const Rows& rows, const int (&pair)[2], int first,
                                           const float (&key)[Rows::kOwn],
                                           const float (&query)[Rows::kOwn],
                                           const float (&between)[Rows::kOwn],
                                           const float (&product)[Rows::kOwn], float2* scores) {
  float sums[4] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row[Rows::kOwn];
    rows.read_own(rows.k(max(pair[r], first)), row);
#pragma unroll
    for (int c = 0; c < Rows::kOwn; ++c) {
      const float decayed = row[c] * (r == 0 ? product[c] : product[c] * between[c]);
      sums[2 * r] = fmaf(decayed, key[c], sums[2 * r]);
      sums[2 * r + 1] = fmaf(decayed, query[c], sums[2 * r + 1]);
    }
  }
  reduce_scatter<4, 16>(sums);
  const int sum = rows.lane / 8, row = sum < 2 ? pair[0] : pair[1];
  if (rows.lane % 8 == 0 && row >= first)
    reinterpret_cast<float*>(scores)[sum] = sums[0] * rows.key_factor(row);
}

/// A warp's share of the scores of a token with the rows i in front of it: k D(t, i) . k_i and q
/// D(t, i) . k_i, with k_i normalised. The last warp goes on to what meets S_0: k D(t, 0) and q
/// D(t, 0). A product runs from the newest row to the oldest, so it is the same for every cut into
/// calls.
template <class Rows>
__device__ __forceinline__ void make_scores(const Rows& rows, const Path& path, int token,
                                            int in_batch, Share share) {
  constexpr int kOwn = Rows::kOwn;
  const int x = path.sure + token;
  float key[kOwn], query[kOwn], product[kOwn];
  rows.read_own(rows.k(x), key);
  rows.read_query(token, query);
  rows.read_own(rows.decay(x), product);
  if (share.index == 0) {
    float own[2] = {};
#pragma unroll
    for (int c = 0; c < kOwn; ++c)
      own[0] = fmaf(query[c], query[c], own[0]), own[1] = fmaf(query[c], key[c], own[1]);
    reduce_scatter<2, 16>(own);
    if (rows.lane % 16 == 0) reinterpret_cast<float*>(rows.of_q(token))[rows.lane / 16] = own[0];
  }
  int pair[2] = {path.before(x), 0};
#pragma unroll 1
  for (int i = 0; pair[0] >= path.first; ++i) {
    pair[1] = path.before(pair[0]);
    float decay[2][kOwn];
    rows.read_own(rows.decay(pair[0]), decay[0]);
    rows.read_own(rows.decay(max(pair[1], path.first)), decay[1]);
    if (share.has(i)) {
      score_pair(rows, pair, path.first, key, query, decay[0], product,
                 rows.scores(in_batch) + 2 * i);
      // The rows in front are those of other warps.
      if (!share.is_last() && pair[1] - path.first <= 2 * (share.count - 1)) return;
    }
#pragma unroll
    for (int c = 0; c < kOwn; ++c) product[c] *= decay[0][c];
    if (pair[1] >= path.first) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) product[c] *= decay[1][c];
    }
    pair[0] = path.before(pair[1]);
  }
  if (!share.is_last()) return;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) key[c] *= product[c], query[c] *= product[c];
  rows.write_own(key, rows.with_state(in_batch, false));
  rows.write_own(query, rows.with_state(in_batch, true));
}

template <class Rows>
__device__ __forceinline__ Factors factors_of(const Rows& rows, int token) {
  return {rows.key_factor(rows.sure() + token), rows.query_factors(token), rows.beta(token)};
}

/// v_new and o of a token from S^T k and S^T q in front of it, in a column.
template <bool kMayBeSplit, class Rows>
__device__ __forceinline__ void write_token(const Rows& rows, const Factors& factors, int column,
                                            int token, float with_k, float with_q) {
  const TailArgs& a = rows.a;
  const int x = rows.sure() + token;
  const auto [v_new, o] = solve_token(a.gate, factors, rows.value(token, column), with_k, with_q);
  const RowView& view = a.tail_v_new;
  static_cast<float*>(view.base)[rows.tail_at(view, rows.unit.head, x) + column] = v_new;
  rows.v_new(x)[column] = v_new;
  if constexpr (kMayBeSplit)
    if (a.rest.base) rows.append_value(token, column);
  store_element(a.o.base, a.o.type, rows.token_at(a.o, rows.unit.head, token) + column, o);
}

/// v_new of a token and its output, of the lane's column.
template <bool kMayBeSplit, class Rows>
__device__ __forceinline__ void solve(const Rows& rows, const Path& path, int column, int token,
                                      int in_batch) {
  const TailArgs& a = rows.a;
  const int x = path.sure + token;
  const float2* scores = rows.scores(in_batch);
  float with_k = rows.product(token - in_batch, in_batch, false)[column];
  float with_q = rows.product(token - in_batch, in_batch, true)[column];
#pragma unroll 2
  for (int at = path.before(x); at >= path.first; at = path.before(at)) {
    const float2 score = *scores++;
    const float v_new = rows.v_new(at)[column];
    with_k = fmaf(score.x, v_new, with_k), with_q = fmaf(score.y, v_new, with_q);
  }
  if (column >= a.shape.V) return;
  write_token<kMayBeSplit>(rows, factors_of(rows, token), column, token, with_k, with_q);
}

/// Where S_0 lies, and before rows are folded into it.
struct State {
  int64_t from, to;
  bool is_written;  ///< from the one to the other
};

__device__ __forceinline__ State state_of(const TailArgs& a, const Start& start, int target) {
  const bool is_written = writes_state(a, start, target);
  return {start.source, is_written ? start.slot : start.source, is_written};
}

/// launch_fold_split() has written the state, and has left `folded` as it was.
__device__ __forceinline__ void go_behind_split_fold(const TailArgs& a, int64_t n, Start* start) {
  if (!a.rest.base || a.most_sure < kTailBoundary) return;
  const int32_t target = fold_target(a, n, *start);
  if (!writes_state(a, *start, target - start->folded)) return;
  start->folded = target, start->source = start->slot;
}

/// Folds rows [0, target), in groups, into the columns of a tile, and writes them.
template <class Tile, class Rows>
__device__ __forceinline__ void fold_state(const Rows& rows, const Tile& tile, const State& state,
                                           int target) {
  tile.rewrite(state.from, state.to, [&](int j, typename Tile::Patch(&x)[2]) {
#pragma unroll 1
    for (int at = 0; at < target;) {
      const int end = fold_end(rows.start, at, target);
      tile.fold({rows.k(at), rows.v_new(at), rows.decay(at), end - at, rows.columns()}, j, x);
      at = end;
    }
  });
}

/// Products of S_0 in the columns of a tile with `count` tokens from the `first` on of the batch at
/// `token`, but no more than two.
template <class Tile, class Rows>
__device__ __forceinline__ void multiply_state(const Rows& rows, const Tile& tile, int64_t slot,
                                               int token, int first, int count) {
  float sums[4][4] = {};  // with k and q, of the first token and of the second
  const int64_t from = tile.place(slot);
#pragma unroll 4
  for (int j = 0; j < tile.patches(); ++j) {
    typename Tile::Patch x;
    tile.load(from, j, x);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < 2 * count) tile.multiply(rows.with_state(first + i / 2, i % 2), j, x, sums[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < 2 * count) tile.store_sums(sums[i], rows.product(token, first + i / 2, i % 2));
}

__device__ __forceinline__ Unit unit_of(const TailArgs& a, unsigned block) {
  const unsigned head = a.shape.heads.remainder(block);
  const int64_t n = a.shape.heads.quotient(block);
  return {n, a.lengths ? 0 : n, head, q_head_of(a, static_cast<int>(head)), 0};
}

/// Asks the L2 for S_0. With more than two blocks an SM only when rows have been made: S_0 of all
/// that run would not stay there until it is read.
template <class Rows>
__device__ __forceinline__ void prefetch_state_of(const Rows& rows, bool rows_are_made) {
  const TailArgs& a = rows.a;
  const bool late = gridDim.x > 2 * a.ahead;
  if (threadIdx.x == 0 && late == rows_are_made && rows.start.source >= 0)
    prefetch_state<Rows::kKeys>(a.initial, rows.start.source, rows.unit.head);
}

/// Makes the rows that fold ready for it.
template <class Rows>
__device__ __forceinline__ void prepare_folds(const Rows& rows, int target) {
  const Start& start = rows.start;
  for (int part = rows.warp; part < rows.parts(); part += rows.warps)
    for (int at = 0; at < target; at = fold_end(start, at, target))
      prepare_fold(rows, part, at, fold_end(start, at, target));
}

/// Rows in shared memory, those of the tokens in the tail, and those that fold ready for it.
template <class Rows>
__device__ __forceinline__ Path make_rows(Rows* rows) {
  const TailArgs& a = rows->a;
  const Start& start = rows->start;
  rows->load();
  if constexpr (Rows::kIsDense) prefetch_state_of(*rows, false);
  if (a.parents) {
    for (int t = static_cast<int>(threadIdx.x); t < rows->count; t += static_cast<int>(blockDim.x))
      rows->before()[t] =
          rows->sure() + (t > 0 ? a.parents[rows->unit.n * a.parent_columns + t] : -1);
    __syncthreads();
  }
  rows->make();
  if constexpr (Rows::kIsDense) prefetch_state_of(*rows, true);
  const int target = fold_target(a, rows->unit.n, start) - start.folded;
  prepare_folds(*rows, target);
  return {rows->before(), target, rows->sure(), a.parents ? rows->sure() : INT32_MAX};
}

/// Zeros in the rows of o that no token is computed for. Kernels share its code.
__device__ __noinline__ inline void zero_outputs(const TailArgs& a, Unit unit, TokenRange tokens,
                                                 int64_t end) {
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int column = 32 * warp; column < a.shape.V; column += 32 * warps)
    decode::zero_rows<32>(a, unit, tokens, end, column);
}

/// A head of a sequence, which a block has.
struct Task {
  Unit unit;
  TokenRange tokens;
  int count;  ///< of those that are computed
  Start start;
};

/// Waits for the kernel in front, and finds the block's head and its tokens. False: the block has
/// written flags.
__device__ __forceinline__ bool find_tokens(const TailArgs& a, Task* task) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const unsigned of_flags = a.flags ? 1 : 0;  // the first block: it may take longest
  if (blockIdx.x < of_flags) {
    write_flags(a);
    return false;
  }
  task->unit = unit_of(a, blockIdx.x - of_flags);
  task->tokens = decode::tokens_of(a, task->unit.n);
  task->count = num_computed(a, task->unit.n, task->tokens);
  return true;
}

/// Finds the head's tail. False: it is skipped.
template <bool kMayBeSplit>
__device__ __forceinline__ bool find_tail(const TailArgs& a, Task* task) {
  const Unit& unit = task->unit;
  task->start = place_of(a, unit.n);
  read_folded(a, unit.n, unit.head, &task->start);
  if (task->start.skip || task->count < 0) {
    if (a.zero_skipped) zero_outputs(a, unit, task->tokens, task->tokens.begin);
    return false;
  }
  if constexpr (kMayBeSplit) go_behind_split_fold(a, unit.n, &task->start);
  return true;
}

/// Writes where S_0 stands now, and zeros behind the tokens.
__device__ __forceinline__ void finish_task(const TailArgs& a, const Task& task) {
  const Unit& unit = task.unit;
  if (threadIdx.x == 0)
    *folded_word(a, task.start.slot, unit.head) =
        a.boundaries ? a.boundaries[unit.n] : fold_target(a, unit.n, task.start);
  if (a.zero_skipped) zero_outputs(a, unit, task.tokens, task.tokens.begin + task.count);
}

/// Scores of a batch of tokens from `token` on: a warp has a few tokens, or several have one. The
/// block meets behind.
template <class Rows>
__device__ __forceinline__ void make_batch(const Rows& rows, const Path& path, int token) {
  const int count = min(rows.count - token, kBatch);
  int sharing = rows.warps;  // warps that have a token: a power of two
  while (sharing > 1 && sharing * count > rows.warps) sharing /= 2;
#pragma unroll 1
  for (int t = rows.warp / sharing; t < count; t += rows.warps / sharing)
    make_scores(rows, path, token + t, t, {rows.warp % sharing, sharing});
  __syncthreads();
}

/// S_0, folds, then the tokens, in the columns of a warp. All warps of the block are here, those of
/// no column too.
template <class Columns, class Rows>
__device__ __forceinline__ void run_columns(const Rows& rows, const Path& path, int column0) {
  constexpr bool kDense = Rows::kIsDense;
  const TailArgs& a = rows.a;
  const State state = state_of(a, rows.start, path.first);
  const bool mine = kDense || column0 < a.shape.V;
#pragma unroll 1
  for (int token = 0; token < max(rows.count, 1); token += kBatch) {
    if (token > 0) __syncthreads();  // the batch before has been read
    make_batch(rows, path, token);
    if (!mine) continue;
    if (token == 0 && state.is_written) {
#pragma unroll 1
      for (int c = 0; c < kWarpColumns; c += Columns::kColumns)
        fold_state(rows, Columns(a.initial, a.shape, rows.unit.head, column0 + c), state,
                   path.first);
    }
    const int count = min(rows.count - token, kBatch);
#pragma unroll 1
    for (int t = 0; t < count; t += 2) {
#pragma unroll 1
      for (int c = 0; c < kWarpColumns; c += Columns::kColumns) {
        const Columns tile(a.initial, a.shape, rows.unit.head, column0 + c);
        multiply_state(rows, tile, state.to, token, t, count - t);
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      solve<Columns::kMayBeSplit>(rows, path, column0 + rows.lane, token + t, t);
      __syncwarp();
    }
  }
}

/// Warps of a dense block. Registers leave an SM room for 20 of them: they wait for memory and for
/// their own sums, one after the other, so many heads have to be under way.
template <int kK>
constexpr int kWarps = kK / kWarpColumns;

template <int kK, Access kAccess, bool kPacked>
__global__ void __launch_bounds__(32 * (kAccess == Access::kScalar ? kMostWarps : kWarps<kK>),
                                  kAccess == Access::kScalar ? 1 : 20 / kWarps<kK>)
    tail_kernel(const __grid_constant__ TailArgs a) {
  constexpr bool kDense = kAccess != Access::kScalar;
  using Columns = Tile<kK, kAccess, kPacked>;
  Task task;
  if (!find_tokens(a, &task) || !find_tail<Columns::kMayBeSplit>(a, &task)) return;
  Rows<kK, kDense> rows(a, task.unit, task.start, task.tokens.begin, task.count);
  const Path path = make_rows(&rows);
  run_columns<Columns>(rows, path, rows.warp * kWarpColumns);
  rows.template append_of_heads<Columns::kMayBeSplit>();
  finish_task(a, task);
}

}  // namespace kda::cuda::tail
