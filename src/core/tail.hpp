// SPDX-License-Identifier: Apache-2.0
// Where the sequences of a call with a tail stand: which rows are theirs, which state is their
// boundary state, and how far a fold goes (docs/design/decode.md, "Tails").
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/layout.hpp"
#include "kda/run.hpp"

namespace kda {

inline int64_t last_boundary(int64_t position) { return position / kTailBoundary * kTailBoundary; }

/// Where a sequence of one call starts.
struct TailStart {
  int64_t slot = -1;    ///< of its tail, and of what folds write; -1: the sequence is skipped
  int64_t source = -1;  ///< slot of S_0; -1: zero, which is written to `slot` first
  int64_t folded = 0;   ///< tokens in front of S_0
  int64_t position = 0;
  int64_t accepted = 0;  ///< rows of the call before that accepted_rows moves together

  int64_t sure() const { return position - folded; }
  /// Position of the first row of the call before, where accepted_rows says which ones stay.
  int64_t first_accepted() const { return position - accepted; }
};

/// The word of a slot's head.
inline int32_t* tail_folded(const Problem& p, const TailTensors& t, int64_t slot, int64_t head) {
  const TensorDesc& desc = p.tail->folded;
  return t.folded + slot * desc.strides[0] + head * desc.strides[1];
}

/// How many rows sequence n of accepted_rows lists.
inline int64_t tail_accepted(const Problem& p, const TailTensors& t, int64_t n) {
  const int64_t columns = p.tail->accepted_columns;
  int64_t count = 0;
  while (count < columns && t.accepted_rows[n * columns + count] >= 0) ++count;
  return count;
}

/// The slot that sequence n names as its source; -1: its own.
inline int64_t tail_source(const Problem& p, const TailTensors& t, int64_t n, int64_t slot) {
  if (!p.tail->sources) return -1;
  const int64_t source = slot_or_none(p, t.sources[n]);
  return source == slot ? -1 : source;
}

/// `head`: any that only the caller writes. Nothing is checked.
inline TailStart tail_start(const Problem& p, const Tensors& t, int64_t n, int64_t head) {
  TailStart start;
  start.slot = state_slot(p, *p.initial_state, t.initial_state_indices, n);
  if (start.slot < 0) return start;
  start.position = t.tail.positions[n];
  if (p.initial_state_mask && t.initial_state_mask[n] == 0) {
    start.folded = start.position;
    return start;
  }
  start.source = start.slot;
  if (p.tail->ring) return start;  // positions count from S_0 on
  start.accepted = tail_accepted(p, t.tail, n);
  start.folded = *tail_folded(p, t.tail, start.slot, head);
  const int64_t source = tail_source(p, t.tail, n, start.slot);
  if (source < 0) return start;
  // A sequence that has no token behind the source's boundary begins its tail; it reads that state
  // until it has a boundary of its own.
  const int64_t boundary = *tail_folded(p, t.tail, source, head);
  if (start.position == boundary) start.folded = boundary;
  if (start.folded == boundary) start.source = source;
  return start;
}

/// Where the folds of a decode end, which come before its tokens.
inline int64_t fold_target(const Problem& p, const TailStart& start) {
  if (p.tail->settle) return start.position;
  return start.sure() < kTailBoundary ? start.folded : last_boundary(start.position);
}

/// Where the next fold on the way to `target` ends: folds are of at most 16 rows, up to boundaries,
/// so that states do not depend on when they were folded.
inline int64_t fold_end(int64_t folded, int64_t target) {
  return std::min(target, last_boundary(folded) + kTailBoundary);
}

/// Tokens of a forward that are rows together: up to the next boundary, and to the end of the ring.
inline int64_t tail_block(const Problem& p, int64_t folded, int64_t position, int64_t left) {
  return std::min(
      {left, last_boundary(position) + kTailBoundary - position, folded + p.tail->rows - position});
}

/// Where the folds behind such rows end.
inline int64_t fold_target_behind(int64_t folded, int64_t position) {
  const bool full = position - folded >= kTailBoundary || position % kTailBoundary == 0;
  return full ? last_boundary(position) : folded;
}

/// First element of a row of tail.k, tail.g or tail.v_new.
inline int64_t tail_row(const Problem& p, const TensorDesc& desc, int64_t slot, int64_t head,
                        int64_t position) {
  return slot * desc.strides[0] + head * desc.strides[1] +
         position % p.tail->rows * desc.strides[2];
}

}  // namespace kda
