// SPDX-License-Identifier: Apache-2.0
// The kernel of decode with a tail, of a head: rows, folds, then a token after the other.
#pragma once

#include "cuda/decode/tail/rows.cuh"
#include "cuda/decode/tail/split.cuh"
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
  const int boundary = last_boundary(start.folded + at) + static_cast<int>(kTailBoundary);
  return min(target, boundary - start.folded);
}

/// This warp's channels of rows [at, end) of keys become k_i D(end, i), and those of the first
/// one's decays D(end, at - 1). A product runs from the newest row to the oldest, so that a decay
/// of 0 makes what is in front of it vanish.
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
      rows.k(last - j)[channel] = key[j] * product;
      product *= decay[j];
    }
  }
  rows.decay(at)[channel] = product;
}

/// Scores of a token with the rows i in front of it, newest first: k D(t, i) . k_i and q D(t, i) .
/// k_i, summed over a part of the channels, kRound rows at a time. Then what meets S_0: k D(t, 0)
/// and q D(t, 0).
template <class Rows>
__device__ __forceinline__ void make_scores(const Rows& rows, const Path& path, int token,
                                            int in_batch, int part) {
  const int x = path.sure + token, channel = part * kPart + rows.lane;
  const float key = rows.k(x)[channel], query = rows.query(token, part);
  float product = rows.decay(x)[channel];
  int at = path.before(x);
#pragma unroll 1
  for (int round = 0; at >= path.first; ++round) {
    float sums[2 * kRound];
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const bool is_there = at >= path.first;
      const int row = max(at, path.first);
      const float decayed = is_there ? product * rows.k(row)[channel] : 0.0f;
      sums[i] = decayed * key, sums[kRound + i] = decayed * query;
      if (is_there) product *= rows.decay(row)[channel];
      at = path.before(at);
    }
    reduce_scatter<2 * kRound, 16>(sums);
    constexpr int kLanes = 16 / kRound;  // that end with the same sum
    if (rows.lane % kLanes == 0) rows.scores(in_batch, round, part)[rows.lane / kLanes] = sums[0];
  }
  rows.with_state(in_batch, false)[channel] = key * product;
  rows.with_state(in_batch, true)[channel] = query * product;
  float own[2] = {query * query, query * key};
  reduce_scatter<2, 16>(own);
  if (rows.lane % 16 == 0) rows.of_q(token, part)[rows.lane / 16] = own[0];
}

/// Scores of a round over all channels, in pairs of k and q.
template <class Rows>
__device__ __forceinline__ const float* sum_scores(const Rows& rows, int in_batch, int round) {
  __syncwarp();  // those of the round before have been read
  if (rows.lane < 2 * kRound) {
    const float* scores = rows.scores(in_batch, round, 0) + rows.lane;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < Rows::kParts; ++part) sum += scores[part * 2 * kRound];
    rows.pairs()[rows.lane % kRound * 2 + rows.lane / kRound] = sum;
  }
  __syncwarp();
  return rows.pairs();
}

/// A lane's column of the tile, whose sums it has: one of a few lanes that share it, or alone.
template <int kK>
struct Column {
  static constexpr int kLanes = 32 / kTileColumns<kK>;
  int at;
  bool is_there, writes;

  __device__ Column(int column0, int lane, int V)
      : at(column0 + lane / kLanes), is_there(at < V), writes(is_there && lane % kLanes == 0) {}
};

/// Rows of v_new take the factors that normalise their keys, of this warp's columns.
template <class Rows>
__device__ __forceinline__ void scale_v_new(const Rows& rows, const Column<Rows::kKeys>& column) {
  if (!rows.a.gate.l2norm) return;
#pragma unroll 1
  for (int first = 0; first < rows.sure(); first += 32) {
    const int count = min(rows.sure() - first, 32);
    const float factor = rows.lane < count ? rows.key_factor(first + rows.lane) : 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float scale = __shfl_sync(~0u, factor, i);
      if (column.writes) rows.v_new(first + i)[column.at] *= scale;
    }
  }
  __syncwarp();
}

/// v_new of a token and its output, of the lane's column.
template <class Tile, class Rows>
__device__ __forceinline__ void solve(const Rows& rows, const Path& path, const Tile& tile,
                                      const Column<Rows::kKeys>& column, int token, int in_batch) {
  const TailArgs& a = rows.a;
  const int x = path.sure + token;
  float with_k, with_q;
  tile.multiply(rows.with_state(in_batch, false), rows.with_state(in_batch, true), &with_k,
                &with_q);
  int at = path.before(x);
#pragma unroll 1
  for (int round = 0; at >= path.first; ++round) {
    const float* pairs = sum_scores(rows, in_batch, round);
#pragma unroll
    for (int i = 0; i < kRound; i += 2) {
      const float4 two = *reinterpret_cast<const float4*>(pairs + 2 * i);
      const int next = path.before(at);
      // Scores past the first row are 0.
      const float newer = rows.v_new(max(at, path.first))[column.at];
      const float older = rows.v_new(max(next, path.first))[column.at];
      with_k = fmaf(two.x, newer, with_k), with_q = fmaf(two.y, newer, with_q);
      with_k = fmaf(two.z, older, with_k), with_q = fmaf(two.w, older, with_q);
      at = path.before(next);
    }
  }
  if (!column.is_there) return;
  const float factor = rows.key_factor(x);
  const float2 of_q = rows.query_factors(token);
  const float v_new = rows.beta(token) * (rows.value(token, column.at) - factor * with_k);
  const float scaled = factor * v_new;
  if (!column.writes) return;
  const float o = a.gate.scale * of_q.x * fmaf(of_q.y, scaled, with_q);
  const RowView& view = a.tail_v_new;
  static_cast<float*>(view.base)[rows.tail_at(view, rows.unit.head, x) + column.at] = v_new;
  rows.v_new(x)[column.at] = scaled;
  if (a.rest.base) rows.append_value(token, column.at);
  store_element(a.o.base, a.o.type, rows.token_at(a.o, rows.unit.head, token) + column.at, o);
}

/// Whether S_0 is written to the sequence's slot.
__device__ __forceinline__ bool writes_state(const TailArgs& a, const Start& start, int target) {
  return target > 0 || start.source < 0 || (a.settle && start.source != start.slot);
}

/// Folds rows [0, target) into the tile, which is written wherever S_0 changes. A bf16 state goes
/// on from what was written.
template <class Tile, class Rows>
__device__ __forceinline__ void fold(const Rows& rows, int target, Tile* tile) {
  const TailArgs& a = rows.a;
  const Start& start = rows.start;
#pragma unroll 1
  for (int at = 0; at < target;) {
    const int end = fold_end(start, at, target);
    tile->fold({rows.k(at), rows.v_new(at), rows.decay(at), end - at, rows.columns()});
    if constexpr (!Rows::kIsDense)
      if (a.initial.bf16) tile->round();
    at = end;
  }
  if (writes_state(a, start, target)) tile->store(a.initial, a.shape, start.slot, rows.unit.head);
}

__device__ __forceinline__ Unit unit_of(const TailArgs& a, unsigned block) {
  const unsigned head = a.shape.heads.remainder(block);
  const int64_t n = a.shape.heads.quotient(block);
  return {n, a.lengths ? 0 : n, head, q_head_of(a, static_cast<int>(head)), 0};
}

/// Asks the L2 for a dense state.
template <int kK>
__device__ __forceinline__ void prefetch_state(const StateView& states, int64_t slot,
                                               int64_t head) {
  const int size = states.bf16 ? 2 : 4;
  ptx::cp_async_bulk_prefetch_l2(
      reinterpret_cast<uintptr_t>(states.base) +
          static_cast<uintptr_t>(state_offset(states, slot, head, 0, 0) * size),
      kK * kK * size);
}

/// The state that a later block will load, for the L2 (decode::Ahead), and the word that says which
/// rows it will.
template <int kK>
__device__ __forceinline__ void prefetch_ahead(const TailArgs& a) {
  const unsigned block = blockIdx.x + a.ahead;
  if (a.ahead == 0 || block >= gridDim.x || threadIdx.x != 0) return;
  const Unit unit = unit_of(a, block - (a.flags ? 1 : 0));
  const int64_t slot = decode::slots_of(a, unit.n).source;
  if (slot < 0) return;
  ptx::prefetch_l2(folded_word(a, slot, unit.head));
  prefetch_state<kK>(a.initial, slot, unit.head);
}

/// Makes the rows that fold ready for it.
template <class Rows>
__device__ __forceinline__ void prepare_folds(const Rows& rows, int target) {
  const Start& start = rows.start;
  for (int part = rows.warp; part < Rows::kParts; part += rows.warps)
    for (int at = 0; at < target; at = fold_end(start, at, target))
      prepare_fold(rows, part, at, fold_end(start, at, target));
}

/// Rows in shared memory, those of the tokens in the tail, and those that fold ready for it.
template <class Rows>
__device__ __forceinline__ Path make_rows(Rows* rows) {
  const TailArgs& a = rows->a;
  const Start& start = rows->start;
  rows->load();
  if constexpr (Rows::kIsDense) prefetch_ahead<Rows::kKeys>(a);
  if (a.parents) {
    for (int t = static_cast<int>(threadIdx.x); t < rows->count; t += static_cast<int>(blockDim.x))
      rows->before()[t] =
          rows->sure() + (t > 0 ? a.parents[rows->unit.n * a.parent_columns + t] : -1);
    __syncthreads();
  }
  rows->make();
  const int target = fold_target(a, rows->unit.n, start) - start.folded;
  if (!a.rest.base) prepare_folds(*rows, target);
  return {rows->before(), target, rows->sure(), a.parents ? rows->sure() : INT32_MAX};
}

/// Zeros in the rows of o that no token is computed for.
template <int kK>
__device__ void zero_outputs(const TailArgs& a, const Unit& unit, const TokenRange& tokens,
                             int64_t end) {
  if (!a.zero_skipped) return;
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int column = warp * kColumns<kK>; column < a.shape.V; column += warps * kColumns<kK>)
    decode::zero_rows<kColumns<kK>>(a, unit, tokens, end, column);
}

/// Asks for S_0, or makes it zero.
template <class Rows, class Tile>
__device__ __forceinline__ void load_columns(const Rows& rows, int64_t source, Tile* tile) {
  constexpr bool kDense = Rows::kIsDense;
  if (!kDense || source < 0) tile->clear();
  if (!kDense && tile->column0 >= rows.a.shape.V) return;
  if (source >= 0) tile->load(rows.a.initial, rows.a.shape, source, rows.unit.head);
}

/// Scores of a batch of tokens from `token` on. The block meets behind.
template <class Rows>
__device__ __forceinline__ void make_batch(const Rows& rows, const Path& path, int token) {
  const int count = min(rows.count - token, kBatch);
#pragma unroll 1
  for (int t = 0; t < count; ++t)
    for (int part = rows.warp; part < Rows::kParts; part += rows.warps)
      make_scores(rows, path, token + t, t, part);
  __syncthreads();
}

/// S_0, folds, then the tokens, in the columns of a tile. All warps of the block are here, those of
/// no column too.
template <class Rows, class Tile>
__device__ __forceinline__ void run_columns(const Rows& rows, const Path& path, Tile* tile) {
  constexpr bool kDense = Rows::kIsDense;
  load_columns(rows, rows.start.source, tile);
  const Column<Rows::kKeys> column(tile->column0, rows.lane, rows.a.shape.V);
  const bool mine = kDense || tile->column0 < rows.a.shape.V;
  make_batch(rows, path, 0);
  if (mine) {
    scale_v_new(rows, column);
    if (!rows.a.rest.base) fold(rows, path.first, tile);
  }
#pragma unroll 1
  for (int token = 0; token < rows.count; ++token) {
    const int in_batch = token % kBatch;
    if (token > 0 && in_batch == 0) {
      __syncthreads();  // the batch before has been read
      make_batch(rows, path, token);
    }
    if (mine) solve(rows, path, *tile, column, token, in_batch);
    __syncwarp();
  }
  if (!kDense) __syncthreads();
}

/// Warps of a dense block, and blocks of an SM: as many as its registers have states for.
template <int kK>
constexpr int kWarps = kK / kTileColumns<kK>;
template <int kK, bool kPacked>
constexpr int kBlocks = kK == 64  ? 8
                        : kPacked ? 4
                                  : 3;

/// Registers have S_0 from where scores are made: in front of that the L2 is asked for it, and rows
/// take the registers.
template <int kK, Access kAccess, bool kPacked>
__global__ void __launch_bounds__(32 * (kAccess == Access::kScalar ? kMostWarps : kWarps<kK>),
                                  kAccess == Access::kScalar ? 1 : kBlocks<kK, kPacked>)
    tail_kernel(const __grid_constant__ TailArgs a) {
  constexpr bool kDense = kAccess != Access::kScalar;
  using Tile = typename BoundaryTile<kK, kAccess, kPacked>::Type;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const unsigned of_flags = a.flags ? 1 : 0;  // the first block: it may take longest
  if (blockIdx.x < of_flags) return write_flags(a);
  const Unit unit = unit_of(a, blockIdx.x - of_flags);
  const TokenRange tokens = decode::tokens_of(a, unit.n);
  const int count = num_computed(a, unit.n, tokens);
  Start start = place_of(a, unit.n);
  if constexpr (kDense) {
    // Nobody has asked for the states of the first blocks.
    const bool is_first = threadIdx.x == 0 && blockIdx.x < a.ahead;
    if (is_first && !start.skip && start.source >= 0)
      prefetch_state<kK>(a.initial, start.source, unit.head);
  }
  read_folded(a, unit.n, unit.head, &start);
  if constexpr (kDense && kPacked)
    if (a.rest.base && threadIdx.x == 0 && start.source >= 0 && start.sure() >= kTailBoundary)
      prefetch_state<kK>(a.rest, start.source, unit.head);
  if (start.skip || count < 0) return zero_outputs<kK>(a, unit, tokens, tokens.begin);
  Rows<kK, kDense> rows(a, unit, start, tokens.begin, count);
  const Path path = make_rows(&rows);
  if constexpr (kPacked || !kDense)
    if (a.rest.base && writes_state(a, start, path.first)) {
      if (!kDense) __syncthreads();  // rows have been made
      fold_split<kK, kDense>(a, unit, start, path.first);
      start.source = start.slot;
    }
  const int column0 = rows.warp * kTileColumns<kK>;
  if constexpr (kDense) {
    Tile tile(column0);
    run_columns(rows, path, &tile);
  } else {
#pragma unroll 1
    for (int group = 0; group < a.shape.V; group += rows.warps * kTileColumns<kK>) {
      Tile tile(group + column0);
      run_columns(rows, path, &tile);
    }
  }
  rows.append_of_heads();
  if (threadIdx.x == 0)
    *folded_word(a, start.slot, unit.head) =
        a.boundaries ? a.boundaries[unit.n] : fold_target(a, unit.n, start);
  zero_outputs<kK>(a, unit, tokens, tokens.begin + count);
}

}  // namespace kda::cuda::tail
