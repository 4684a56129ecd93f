// SPDX-License-Identifier: Apache-2.0
// The loop of a producer group, from top to bottom: one warp or two, which make the factors of
// every kGroups-th sub-chunk (two of them share the work where a cluster has two blocks).
#pragma once

#include "cuda/fused/anchored_scores.cuh"
#include "cuda/fused/decay.cuh"
#include "cuda/fused/dyadic_scores.cuh"
#include "cuda/fused/global_io.cuh"
#include "cuda/fused/inverse.cuh"
#include "cuda/fused/norms.cuh"

namespace kda::cuda::sm90::fused {

/// A sub-chunk on its way: what a thread keeps of it in registers.
template <class P>
struct Subchunk {
  int rows;  // tokens that exist
  uint32_t raw_beta[P::kEights];
  Pairs q, k;
  Norms norms[P::kEights];
};

// ---- waits for stages

/// Waits until this block is done with what this group's stages held before: its outputs are there.
/// (Barriers that were not used yet let this pass.)
template <class P>
__device__ void wait_for_outputs(const P& p) {
#pragma unroll
  for (int i = 0; i < P::kBlocks; ++i)
    ptx::mbarrier_wait(p.storage.done_barrier(p.first() + i), 1 - p.parity);
}
/// Waits until the other block is done with the stage whose factors this group makes.
template <class P>
__device__ void wait_for_peer(const P& p) {
  if constexpr (P::kBlocks > 1) ptx::mbarrier_wait(p.storage.peer_done[p.mine()], 1 - p.parity);
}
/// The first warp stores o of the turn before, and loads v of this one in its place. ("Tiles" are
/// [16, 64] of storage.v here, not Tiles.)
template <class P>
__device__ void move_tiles(P& p) {
  if (p.pending > 0) store_outputs(p);
  if (p.next_o) p.o = p.next_o;
  p.next_o = nullptr;
  p.pending = p.left;
  load_v(p, p.pending);
}

// ---- steps of a sub-chunk

template <class P>
__device__ __forceinline__ void begin_subchunk(P& p, Subchunk<P>& subchunk) {
  subchunk.rows = p.left - p.rank * kSubchunk;
  load_beta(p, subchunk.raw_beta, subchunk.rows);
  if (p.thread == P::kLastWarp) p.own.num_anchored = kSubchunk, p.own.needs_rescale = 0;
  ptx::cp_async_wait<0>();
  p.template sync<0>();
}
/// Makes rows and norms. What needs no stage comes first: it goes on while the stage is in use.
template <class P>
__device__ __forceinline__ void make_rows(P& p, const PipeStage<P::kK>& s, Subchunk<P>& subchunk) {
  float2 factor[kSubchunk];
  Squares squares[P::kEights];
  load_gates(p, factor);
  add_squares(p, squares);  // waits for tensor cores, decays for ex2 and lg2: they hide each other
  const float2 gamma = scan_decays<false>(p, factor, subchunk.rows);
  p.forget_index();
  find_norms(p, subchunk.norms, squares, subchunk.rows, subchunk.raw_beta);
  load_pairs(p, subchunk.q, subchunk.k);
  wait_for_outputs(p);
  wait_for_peer(p);
  put_norms(p, s, subchunk.norms);
  put_rows(p, s, factor, gamma, subchunk.q, subchunk.k);
  p.template sync<1>();
}
/// Moves powers of two from norms to q and k.
template <class P>
__device__ void take_powers(const P& p, Norms (&norms)[P::kEights], Pairs& q, Pairs& k) {
  split_powers(p, norms);
  p.template sync<0>();
  multiply_by<P>(p.own.power.q, q);
  multiply_by<P>(p.own.power.k, k);
}
/// Makes rows again, with q and k times powers of two and gates of any size.
template <class P>
__device__ void make_rows_again(P& p, const PipeStage<P::kK>& s, Norms (&norms)[P::kEights],
                                Pairs& q, Pairs& k, int rows) {
  if (p.thread == P::kLastWarp) p.own.num_anchored = kSubchunk;
  take_powers(p, norms, q, k);
  float2 factor[kSubchunk];
  load_gates(p, factor);
  const float2 gamma = scan_decays<true>(p, factor, rows);
  put_norms(p, s, norms);
  put_rows(p, s, factor, gamma, q, k);
  p.template sync<1>();
}
template <class P>
__device__ __forceinline__ void finish_scores(P& p, const PipeStage<P::kK>& s) {
  __syncwarp();
  p.forget_index();
  if (p.is_last()) invert(p, s);
  if constexpr (P::kHopper) ptx::fence_async_proxy();
}
/// Makes scores and the inverse. Of two warps the first moves v and o while the second makes the
/// inverse. kUsual: nothing has to be made again, and all rows are in range.
template <bool kUsual, class P>
__device__ __forceinline__ void make_scores(P& p, const PipeStage<P::kK>& s,
                                            Subchunk<P>& subchunk) {
  if constexpr (kFp16<typename P::Operand>)
    if (!kUsual && p.own.needs_rescale) [[unlikely]]
      make_rows_again(p, s, subchunk.norms, subchunk.q, subchunk.k, subchunk.rows);
  const int anchored = kUsual ? kSubchunk : p.own.num_anchored;
  if (p.is_first()) move_tiles(p);
  if (anchored == kSubchunk) load_raw(p, p.left - p.storage.turn_tokens);
  p.forget_index();
  anchored_scores(p, s);
  if (anchored < kSubchunk) [[unlikely]] {
    p.forget_index();
    fine_levels(p, s, subchunk.q, subchunk.k, subchunk.rows, anchored);
    load_raw(p, p.left - p.storage.turn_tokens);
  }
  finish_scores(p, s);
}
/// Makes all factors with dyadic levels alone. Between sync_begin() and sync_end() it waits for the
/// stage; after it raw rows may be overwritten, and needs_rescale is known.
template <class P>
__device__ void make_dyadic(P& p, const PipeStage<P::kK>& s, Subchunk<P>& subchunk) {
  float2 decay[kSubchunk];
  Pairs &q = subchunk.q, &k = subchunk.k;
  Squares squares[P::kEights];
  load_gates(p, decay);
  add_squares(p, squares);
  const float2 gamma = P::kDyadicOnly ? decays_of_tokens(p, decay, subchunk.rows)
                                      : decays_of_fast_head(p, decay, subchunk.rows);
  p.forget_index();
  Norms norms[P::kEights];
  find_norms(p, norms, squares, subchunk.rows, subchunk.raw_beta);
  load_pairs(p, q, k);
  p.sync_begin();
  wait_for_outputs(p);
  wait_for_peer(p);
  p.template sync_end<1>();
  if (p.own.needs_rescale) [[unlikely]] {
    take_powers(p, norms, q, k);
    p.template sync<1>();
  }
  put_norms(p, s, norms);
  put_operands(p, s, decay, q, k);
  put_gamma(p, s, gamma);
  if (p.is_first()) move_tiles(p);
  load_raw(p, p.left - p.storage.turn_tokens);
  all_levels(p, s, decay, q, k);
  finish_scores(p, s);
}

// ---- delivery

/// The last warp sends tiles and factors to the other block, once the first warp has done its part.
/// (Its own lanes have fenced what they wrote in finish_scores(), together.)
template <class P>
__device__ void send_factors(const P& p) {
  ptx::mbarrier_wait(p.own.scores_done, p.parity);
  if (p.thread != P::kLastWarp) return;
  const int mine = p.mine();
  ptx::Mbarrier& full = p.storage.full[mine];
  ptx::cp_async_bulk_to_cluster(&p.storage.tiles[mine], &p.storage.tiles[mine],
                                sizeof(Tiles<P::kK>), full, 1 - p.rank);
  ptx::cp_async_bulk_to_cluster(&p.storage.factors[mine], &p.storage.factors[mine],
                                sizeof(Factors<P::kK>), full, 1 - p.rank);
}
/// Sends factors of this sub-chunk to the other block, and expects those of the other one from
/// there.
template <class P>
__device__ __forceinline__ void exchange_factors(const P& p) {
  ptx::Mbarrier& other_full = p.storage.full[p.first() + 1 - p.rank];
  if (p.thread == P::kLastWarp)
    ptx::mbarrier_arrive_expect_tx(other_full, sizeof(Tiles<P::kK>) + sizeof(Factors<P::kK>));
  else
    ptx::mbarrier_arrive(other_full);
  if (p.is_last()) send_factors(p);
}
/// Hands a sub-chunk to the consumers, and moves on to the next one of this group.
template <class P>
__device__ __forceinline__ void deliver(P& p) {
  if (p.is_first()) {
    if constexpr (P::kWarps > 1) ptx::mbarrier_arrive(p.own.scores_done);
    ptx::cp_async_wait<1>();  // v: of this warp's copies only the raw rows were begun after it
  }
  ptx::mbarrier_arrive(p.storage.full_barrier(p.mine()));
  if constexpr (P::kBlocks > 1)
    exchange_factors(p);
  else if constexpr (P::kWarps > 1)
    if (p.is_last()) ptx::mbarrier_wait(p.own.scores_done, p.parity);
  p.parity = 1 - p.parity;
  p.left -= p.storage.turn_tokens;
}

// ---- loops

template <class P>
__device__ bool is_dyadic_only(const P& p) {
  return (p.own.dyadic_only[0] | p.own.dyadic_only[P::kWarps - 1]) != 0;
}
/// The loop of kernels with softplus gates and units, where the code of a sub-chunk fills the
/// instruction cache: all that is rare, and what comes after it, stands behind the inner loop
/// (docs/log/2026-11.md, "Instructions").
template <class P>
__device__ void produce_item_apart(P& p) {
  while (p.left > 0) {
    const PipeStage<P::kK> s = p.storage.stage(p.mine());
    Subchunk<P> subchunk;
    bool dyadic_only = false;
    for (; p.left > 0; deliver(p)) {
      begin_subchunk(p, subchunk);
      dyadic_only = is_dyadic_only(p);
      if (dyadic_only) break;
      make_rows(p, s, subchunk);
      if (p.own.num_anchored < kSubchunk || p.own.needs_rescale) break;
      make_scores<true>(p, s, subchunk);
    }
    if (p.left <= 0) return;
    if (dyadic_only)
      make_dyadic(p, s, subchunk);
    else
      make_scores<false>(p, s, subchunk);
    deliver(p);
  }
}
/// Makes this group's sub-chunks of an item.
template <class P>
__device__ void produce_item(P& p) {
  load_raw(p, p.left);
  if constexpr (P::kDyadicOnly)
    for (; p.left > 0; deliver(p)) {
      Subchunk<P> subchunk;
      begin_subchunk(p, subchunk);
      make_dyadic(p, p.storage.stage(p.mine()), subchunk);
    }
  else if constexpr (P::kSegments && P::kDyadicOnlyHeads)
    produce_item_apart(p);
  else
    for (; p.left > 0; deliver(p)) {
      const PipeStage<P::kK> s = p.storage.stage(p.mine());
      Subchunk<P> subchunk;
      begin_subchunk(p, subchunk);
      if constexpr (P::kDyadicOnlyHeads)
        if (is_dyadic_only(p)) {
          make_dyadic(p, s, subchunk);
          continue;
        }
      make_rows(p, s, subchunk);
      make_scores<false>(p, s, subchunk);
    }
}

/// Levels write only what is below the diagonal.
template <class P>
__device__ void clear_scores(const P& p) {
  constexpr int kPieces = kSubchunk * kSubchunk / 8;
  auto& Aqk = *reinterpret_cast<uint4(*)[kPieces]>(p.storage.stage(p.mine()).factors.Aqk);
  if (p.thread < kPieces) Aqk[p.thread] = {};
}
/// All items of the cluster, one after the other.
template <class P>
__device__ void run_producer(P& p, SchedulerState& scheduler) {
  if constexpr (P::kDyadicOnlyHeads || P::kDyadicOnly) clear_scores(p);
  int turn = 0;  // number of the group that has the first sub-chunks of the item
  while (next_item<P>(p.a, scheduler, p.storage.norm_check)) {
    const WorkItem& item = scheduler.item;
    const int groups = p.storage.block_groups;
    const int subchunk = (p.group + groups - turn) % groups * P::kBlocks;
    begin_pointers(p, item, subchunk);
    begin_gates(p, head_of<P::kColumnTiles>(item));
    produce_item(p);
    turn = (turn + subchunks_of<P::kBlocks>(item) / P::kBlocks) % groups;
  }
  if (p.is_first() && p.pending > 0) {
    wait_for_outputs(p);
    store_outputs(p);
  }
}

}  // namespace kda::cuda::sm90::fused
