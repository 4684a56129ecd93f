// SPDX-License-Identifier: Apache-2.0
// The kernel of decode with a tail, of a head: rows, folds, then a token after the other.
#pragma once

#include "cuda/decode/tail/rows.cuh"

namespace kda::cuda::tail {

/// The rows in front of a token, along its parents.
struct Path {
  const int* parents;  ///< of each token, a row
  int first, sure;

  /// The row before row i; below `first`: there is none.
  __device__ int before(int i) const { return i <= sure ? i - 1 : parents[i - sure]; }
};

/// Groups of at most 16 rows, up to boundaries, so that states do not depend on when they were
/// folded: fold_end() of core/tail.hpp, of rows behind `folded`.
__device__ __forceinline__ int fold_end(const Start& start, int at, int target) {
  const int boundary = last_boundary(start.folded + at) + static_cast<int>(kTailBoundary);
  return min(target, boundary - start.folded);
}

/// The keys of rows [at, end) become k_i D(end, i), and the first one's decays D(end, at - 1). A
/// product runs from the newest row to the oldest, so that a decay of 0 makes what is in front of
/// it vanish.
template <class Rows>
__device__ void prepare_fold(const Rows& rows, int at, int end) {
  for (int c = static_cast<int>(threadIdx.x); c < Rows::kKeys; c += static_cast<int>(blockDim.x)) {
    float product = 1;
    for (int i = end - 1; i >= at; --i) {
      rows.k(i)[c] *= product;
      product *= rows.decay(i)[c];
    }
    rows.decay(at)[c] = product;
  }
}

/// Elements of a lane's tile: 16 warps of two heads are on an SM, and one of each sum beside them.
template <int kK>
constexpr int kTileElements = kK == 64 ? 32 : 64;
template <int kK>
constexpr int kTileColumns = 32 * kTileElements<kK> / kK;

/// Scores of row x with the rows i in front of it, newest first: k_x D(x, i) . k_i and q_x D(x, i)
/// . k_i. A warp sums over 32 channels for k or for q, kRound rows at a time. Then what meets S_0:
/// k_x D(x, 0) and q_x D(x, 0).
template <class Rows>
__device__ __forceinline__ void make_scores(const Rows& rows, const Path& path, int x) {
  constexpr int kParts = Rows::kKeys / 32;
  for (int part = rows.warp; part < 2 * kParts; part += rows.warps) {
    const bool of_q = part >= kParts;
    const int channel = part % kParts * 32 + rows.lane;
    const float own = (of_q ? rows.q(x - path.sure) : rows.k(x))[channel];
    float product = rows.decay(x)[channel];
    float* scores = rows.shared + rows.layout.scores() + part * kRound + rows.lane / 2;
    for (int at = path.before(x); at >= path.first; scores += 2 * kParts * kRound) {
      float sums[kRound];
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        sums[i] = 0;
        if (at < path.first) continue;
        sums[i] = product * rows.k(at)[channel] * own;
        product *= rows.decay(at)[channel];
        at = path.before(at);
      }
      reduce_scatter<kRound, 16>(sums);
      if (rows.lane % 2 == 0) *scores = sums[0];
    }
    rows.shared[(of_q ? rows.layout.with_q() : rows.layout.with_k()) + channel] = own * product;
  }
}

/// The scores of a round: lane i has that of row i for k, lane kRound + i that for q.
template <class Rows>
__device__ __forceinline__ float score_of(const Rows& rows, int round) {
  constexpr int kParts = Rows::kKeys / 32;
  const float* scores = rows.shared + rows.layout.scores() +
                        (round * 2 + rows.lane / kRound) * kParts * kRound + rows.lane % kRound;
  float sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) sum += scores[part * kRound];
  return sum;
}

/// v_new of row x and its output, of this lane's values.
template <class Tile, class Rows>
__device__ __forceinline__ void solve(const Rows& rows, const Path& path, const Tile& tile, int x,
                                      float (&v_new)[Tile::kOwned], float (&o)[Tile::kOwned]) {
  float with_k[Tile::kOwned], with_q[Tile::kOwned], row[Tile::kOwned];
  tile.multiply(rows.shared + rows.layout.with_k(), rows.shared + rows.layout.with_q(), with_k,
                with_q);
  int at = path.before(x);
  for (int round = 0; at >= path.first; ++round) {
    const float score = score_of(rows, round);
    for (int i = 0; i < kRound && at >= path.first; ++i, at = path.before(at)) {
      const float of_k = __shfl_sync(~0u, score, i), of_q = __shfl_sync(~0u, score, kRound + i);
      tile.own(rows.v_new(at), row);
#pragma unroll
      for (int c = 0; c < Tile::kOwned; ++c) {
        with_k[c] = fmaf(of_k, row[c], with_k[c]);
        with_q[c] = fmaf(of_q, row[c], with_q[c]);
      }
    }
  }
  const int token = x - path.sure;
  const float qk = rows.qk()[token], beta = rows.beta()[token];
  tile.own(rows.v(token), row);
#pragma unroll
  for (int c = 0; c < Tile::kOwned; ++c) {
    v_new[c] = beta * (row[c] - with_k[c]);
    o[c] = rows.a.gate.scale * fmaf(qk, v_new[c], with_q[c]);
  }
}

template <class Tile, class Rows>
__device__ __forceinline__ void store_v_new(const Rows& rows, const Tile& tile, int x,
                                            const float (&v_new)[Tile::kOwned]) {
  const RowView& view = rows.a.tail_v_new;
  float* to = static_cast<float*>(view.base) + rows.tail_at(view, rows.unit.head, x);
#pragma unroll
  for (int c = 0; c < Tile::kOwned; ++c) {
    if (!tile.writes_output() || tile.value(c) >= rows.a.shape.V) continue;
    to[tile.value(c)] = v_new[c];
    rows.v_new(x)[tile.value(c)] = v_new[c];
  }
  __syncwarp();
}

/// The tile of a slot.
template <class Tile>
__device__ __forceinline__ void load_tile(const TailArgs& a, int64_t slot, int64_t head,
                                          Tile* tile) {
  if (a.initial.bf16)
    tile->template load<true>(a.initial, a.shape, slot, head);
  else
    tile->template load<false>(a.initial, a.shape, slot, head);
}
template <class Tile>
__device__ __forceinline__ void store_tile(const TailArgs& a, int64_t slot, int64_t head,
                                           Tile* tile) {
  if (a.initial.bf16)
    tile->template store<true>(a.initial, a.shape, slot, head);
  else
    tile->template store<false>(a.initial, a.shape, slot, head);
}

/// Folds rows [0, target) into the tile, which is written wherever S_0 changes. A bf16 state goes
/// on from what was written.
template <class Tile, class Rows>
__device__ __forceinline__ void fold(const Rows& rows, int target, Tile* tile) {
  const TailArgs& a = rows.a;
  const Start& start = rows.start;
  for (int at = 0; at < target;) {
    const int end = fold_end(start, at, target);
    tile->decay(rows.decay(at));
    for (int i = at; i < end; ++i) tile->add(rows.k(i), rows.v_new(i));
    if (a.initial.bf16) {
      store_tile(a, start.slot, rows.unit.head, tile);
      load_tile(a, start.slot, rows.unit.head, tile);
    }
    at = end;
  }
  const bool moves = a.settle && start.source != start.slot;
  if (target > 0 || start.source < 0 || moves) store_tile(a, start.slot, rows.unit.head, tile);
}

__device__ __forceinline__ Unit unit_of(const TailArgs& a, unsigned block) {
  const unsigned head = a.shape.heads.remainder(block);
  const int64_t n = a.shape.heads.quotient(block);
  return {n, a.lengths ? 0 : n, head, q_head_of(a, static_cast<int>(head)), 0};
}

/// The state that a later block will load, for the L2 (decode::Ahead), and the word that says which
/// rows it will.
template <int kK, bool kDense>
__device__ __forceinline__ void prefetch_state(const TailArgs& a) {
  const unsigned block = blockIdx.x + a.ahead;
  if (a.ahead == 0 || block >= gridDim.x || threadIdx.x != 0) return;
  const Unit unit = unit_of(a, block - (a.flags ? 1 : 0));
  const int64_t slot = decode::slots_of(a, unit.n).source;
  if (slot < 0) return;
  ptx::prefetch_l2(folded_word(a, slot, unit.head));
  if (!kDense) return;
  const int size = a.initial.bf16 ? 2 : 4;
  ptx::cp_async_bulk_prefetch_l2(
      reinterpret_cast<uintptr_t>(a.initial.base) +
          static_cast<uintptr_t>(state_offset(a.initial, slot, unit.head, 0, 0) * size),
      kK * kK * size);
}

/// Rows in shared memory, those of the tokens in the tail, and those that fold ready for it.
template <class Rows>
__device__ __forceinline__ Path make_rows(Rows* rows) {
  const TailArgs& a = rows->a;
  const Start& start = rows->start;
  rows->load();
  prefetch_state<Rows::kKeys, Rows::kIsDense>(a);
  rows->make();
  rows->append();
  const int target = fold_target(a, start) - start.folded;
  for (int at = 0; at < target; at = fold_end(start, at, target))
    prepare_fold(*rows, at, fold_end(start, at, target));
  if (target > 0) __syncthreads();
  return {rows->before(), target, rows->sure()};
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
template <bool kDense, class Rows, class Tile>
__device__ __forceinline__ void load_columns(const Rows& rows, int64_t source, Tile* tile) {
  if (!kDense || source < 0) tile->clear();
  if (!kDense && tile->column0 >= rows.a.shape.V) return;
  if (source >= 0) load_tile(rows.a, source, rows.unit.head, tile);
}

/// Folds, then the tokens, in the columns of a tile. All warps of the block are here, those of no
/// column too.
template <bool kDense, class Rows, class Tile>
__device__ __forceinline__ void run_columns(const Rows& rows, const Path& path, Tile* tile) {
  const TailArgs& a = rows.a;
  const bool mine = kDense || tile->column0 < a.shape.V;
  if (mine) fold(rows, path.first, tile);
#pragma unroll 1
  for (int t = 0; t < rows.count; ++t) {
    const int x = path.sure + t;
    make_scores(rows, path, x);
    __syncthreads();
    if (mine) {
      float v_new[Tile::kOwned], o[Tile::kOwned];
      solve(rows, path, *tile, x, v_new, o);
      store_v_new(rows, *tile, x, v_new);
      decode::store_values(a, rows.unit, rows.begin + t, *tile, o);
    }
    if (!kDense || t + 1 < rows.count) __syncthreads();
  }
}

/// Warps of a dense block.
template <int kK>
constexpr int kWarps = kK / kTileColumns<kK>;

/// The address of S_0 depends on no word of `folded` where there are no sources: it is asked for
/// before that word is there, which the rows wait for.
template <int kK, Access kAccess, bool kDense>
__global__ void __launch_bounds__(32 * (kDense ? kWarps<kK> : kMostWarps),
                                  kDense ? kMostWarps / kWarps<kK> * 2 : 1)
    tail_kernel(const __grid_constant__ TailArgs a) {
  using Tile = typename TileOf<kK, kAccess, kDense, kTileElements<kK>>::Type;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const unsigned of_flags = a.flags ? 1 : 0;  // the first block: it may take longest
  if (blockIdx.x < of_flags) return write_flags(a);
  const Unit unit = unit_of(a, blockIdx.x - of_flags);
  const TokenRange tokens = decode::tokens_of(a, unit.n);
  const int count = num_computed(a, unit.n, tokens);
  Start start = place_of(a, unit.n);
  if (a.sources) read_folded(a, unit.n, unit.head, &start);
  Rows<kK, kDense> rows(a, unit, start, tokens.begin, count);
  const auto skips = [&] {
    if (!a.sources) read_folded(a, unit.n, unit.head, &start);
    return start.skip || count < 0;
  };
  const int column0 = rows.warp * kTileColumns<kK>;
  if constexpr (kDense) {
    Tile tile(column0);
    if (!start.skip) load_columns<kDense>(rows, start.source, &tile);
    if (skips()) return zero_outputs<kK>(a, unit, tokens, tokens.begin);
    const Path path = make_rows(&rows);
    run_columns<kDense>(rows, path, &tile);
  } else {
    if (skips()) return zero_outputs<kK>(a, unit, tokens, tokens.begin);
    const Path path = make_rows(&rows);
#pragma unroll 1
    for (int group = 0; group < a.shape.V; group += rows.warps * kTileColumns<kK>) {
      Tile tile(group + column0);
      load_columns<kDense>(rows, start.source, &tile);
      run_columns<kDense>(rows, path, &tile);
    }
  }
  if (threadIdx.x == 0) *folded_word(a, start.slot, unit.head) = fold_target(a, start);
  zero_outputs<kK>(a, unit, tokens, tokens.begin + count);
}

}  // namespace kda::cuda::tail
