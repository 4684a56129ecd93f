// SPDX-License-Identifier: Apache-2.0
// Where a head of a sequence stands: tail_start() of core/tail.hpp on the device, and what is wrong
// there, which the host cannot see.
#pragma once

#include "cuda/decode/decode.cuh"
#include "cuda/decode/tail/tail.hpp"
#include "kda/problem.hpp"

namespace kda::cuda::tail {

using decode::Unit;

/// Where a head of a sequence starts.
struct Start {
  bool skip = true;     ///< it has no slot, or something is wrong
  bool wrong = false;   ///< its tail, not its slot
  int32_t slot = -1;    ///< of its tail, and of what folds write
  int32_t source = -1;  ///< slot of S_0; -1: zero, which is written to `slot` first
  int32_t folded = 0;   ///< tokens in front of S_0
  int32_t position = 0;

  __device__ int32_t sure() const { return position - folded; }
};

__device__ __forceinline__ int32_t last_boundary(int32_t position) {
  return position / static_cast<int32_t>(kTailBoundary) * static_cast<int32_t>(kTailBoundary);
}

__device__ __forceinline__ int32_t* folded_word(const TailArgs& a, int64_t slot, int64_t head) {
  return a.folded + slot * a.stride_folded_slot + head * a.stride_folded_head;
}

/// Where the folds of sequence n end in this call, behind `start.folded`.
__device__ __forceinline__ int32_t fold_target(const TailArgs& a, int64_t n, const Start& start) {
  if (a.boundaries) return min(start.position, a.boundaries[n]);
  if (a.settle) return start.position;
  return start.sure() < kTailBoundary ? start.folded : last_boundary(start.position);
}

/// Whether S_0 is written to the sequence's slot.
__device__ __forceinline__ bool writes_state(const TailArgs& a, const Start& start, int target) {
  return target > 0 || start.source < 0 || (a.settle && start.source != start.slot);
}

/// How many rows sequence n of accepted_rows lists.
__device__ __forceinline__ int32_t num_accepted(const TailArgs& a, int64_t n) {
  int32_t count = 0;
  while (count < a.accepted_columns && a.accepted[n * a.accepted_columns + count] >= 0) ++count;
  return count;
}

/// Whether accepted_rows of sequence n ascend and are in its tail.
__device__ __forceinline__ bool has_accepted_rows(const TailArgs& a, int64_t n,
                                                  const Start& start) {
  const int32_t count = num_accepted(a, n);
  const int32_t* rows = a.accepted + n * a.accepted_columns;
  if (count > start.sure()) return false;
  const int32_t first = start.sure() - count;
  for (int32_t i = 0; i < count; ++i)
    if ((i > 0 && rows[i] <= rows[i - 1]) || rows[i] >= a.rows - first) return false;
  return true;
}

/// The part that does not depend on `folded`; without sources that is where S_0 lies. A sequence
/// whose accepted rows are wrong is skipped.
__device__ __forceinline__ Start place_of(const TailArgs& a, int64_t n, bool rows_moved = true) {
  Start start;
  // All on their way before any is looked at.
  const int64_t slot = a.initial.indices[n];
  const int32_t position = a.positions[n];
  const bool masked = a.initial.mask && a.initial.mask[n] == 0;
  if (lacks_slot(a.initial, slot)) return start;
  start.slot = static_cast<int32_t>(slot);
  start.position = position;
  start.wrong = start.position < 0 || (rows_moved && a.wrong_accepted && a.wrong_accepted[n] != 0);
  start.skip = start.wrong;
  if (!masked) start.source = start.slot;
  return start;
}

/// Reads the state of its source until the first fold (TailDesc::sources).
__device__ __forceinline__ void apply_source(const TailArgs& a, int64_t n, int64_t head,
                                             Start* start) {
  const int64_t source = a.sources[n];
  if (is_none(a.initial, source) || source == start->slot) return;
  if (source >= a.initial.num_slots) {
    start->wrong = true;
    return;
  }
  const int32_t boundary = *folded_word(a, source, head);
  if (start->position == boundary) start->folded = boundary;
  if (start->folded == boundary) start->source = static_cast<int32_t>(source);
  start->wrong |= boundary < 0 || start->folded < boundary;
}

__device__ __forceinline__ void read_folded(const TailArgs& a, int64_t n, int64_t head,
                                            Start* start) {
  if (start->slot < 0) return;
  start->folded = start->position;
  if (start->source >= 0) {
    start->folded = *folded_word(a, start->slot, head);
    if (a.sources) apply_source(a, n, head, start);
  }
  start->wrong |= start->folded < 0 || start->folded > start->position || start->sure() > a.rows;
  start->skip = start->wrong;
}

__device__ __forceinline__ Start start_of(const TailArgs& a, int64_t n, int64_t head,
                                          bool rows_moved = true) {
  Start start = place_of(a, n, rows_moved);
  read_folded(a, n, head, &start);
  return start;
}

/// Whether the token `i` > 0 of sequence n has a parent in front of it.
__device__ __forceinline__ bool has_parent(const TailArgs& a, int64_t n, int64_t i) {
  const int64_t parent = a.parents[n * a.parent_columns + i];
  return parent >= 0 && parent < i;
}

__device__ __forceinline__ int64_t most_tokens(const TailArgs& a) {
  return a.parents ? min(static_cast<int64_t>(a.most_tokens), a.parent_columns)
                   : static_cast<int64_t>(a.most_tokens);
}

/// How many of the tokens of a sequence are computed; -1: they are too many, and it is skipped.
__device__ __forceinline__ int32_t num_computed(const TailArgs& a, int64_t n,
                                                const TokenRange& tokens) {
  const int64_t count = tokens.end - tokens.begin;
  if (count > most_tokens(a)) return -1;
  for (int64_t i = 1; a.parents && i < count; ++i)
    if (!has_parent(a, n, i)) return static_cast<int32_t>(i);
  return static_cast<int32_t>(count);
}

/// The flag of sequences that a forward has left out.
__device__ inline void add_found(const TailArgs& a) {
  bool any = false;
  for (int64_t i = threadIdx.x; i < a.num_found; i += blockDim.x) any |= a.found[i] != 0;
  const int bad = __syncthreads_or(any);
  if (bad && threadIdx.x == 0) *a.flags |= kBadTail;
}

/// Flags of device metadata, by a block that has nothing else to do. Other blocks write words of
/// `folded` meanwhile, of sequences where nothing is wrong: before and after, a word is in range
/// and has the same target. A thread has a few heads of a sequence. Kernels share its code, which
/// is long and takes one block.
__device__ __noinline__ inline void write_flags(const TailArgs& a) {
  constexpr unsigned kHeads = 8;
  if (a.found) return add_found(a);
  const DecodeArgs& base = a;
  decode::write_flags(base);
  bool wrong = false, many = false, parents = false;
  const auto HV = static_cast<unsigned>(a.shape.HV), groups = (HV + kHeads - 1) / kHeads;
  const int64_t all = a.map.num_sequences * groups;
  for (int64_t i = threadIdx.x; i < all; i += blockDim.x) {
    const int64_t n = i / groups;
    const unsigned group = static_cast<unsigned>(i % groups);
    const Start place = place_of(a, n);
    if (place.slot < 0) continue;
    const Start first = start_of(a, n, 0);
#pragma unroll
    for (unsigned j = 0; j < kHeads; ++j) {
      const unsigned head = min(group * kHeads + j, HV - 1);
      Start start = place;
      read_folded(a, n, head, &start);
      wrong |= start.wrong || fold_target(a, n, start) != fold_target(a, n, first);
    }
    if (group != 0 || first.skip) continue;
    const TokenRange tokens = decode::tokens_of(a, n);
    const int64_t count = tokens.end - tokens.begin;
    many |= count > most_tokens(a);
    for (int64_t t = 1; a.parents && t < min(count, a.parent_columns); ++t) {
      if (a.parents[n * a.parent_columns + t] < 0) break;
      parents |= !has_parent(a, n, t);
    }
  }
  const int any_wrong = __syncthreads_or(wrong), any_many = __syncthreads_or(many),
            any_parents = __syncthreads_or(parents);
  if (threadIdx.x != 0) return;
  *a.flags |= (any_wrong ? kBadTail : 0) | (any_many ? kTooManyDecodeTokens : 0) |
              (any_parents ? kBadTokenParents : 0);
}

}  // namespace kda::cuda::tail
