// SPDX-License-Identifier: Apache-2.0
// Decode with a tail (docs/design/decode.md, "Tails"). A block has one head of one sequence, of
// whose boundary state S_0 a warp has 32 columns: 4 warps at K = V = 128. Rows of the tail and of
// the tokens are made first; S_0 passes through registers in patches. A step writes rows; S_0 is
// written by folds, which come before the first token.
//
// A block writes itself what it alone has. Rows of k are shared where several value heads have one
// q/k head: those of the tokens are then copied by a kernel behind (launch_append_keys), since a
// row may take the place of one that another block still folds.
#pragma once

#include "cuda/decode/decode.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::tail {

/// `base.in_place` is true and `base.index_columns` 1: a sequence has one slot.
struct TailArgs : HeadGates<DecodeArgs> {
  RowView tail_k, tail_g, tail_v_new;  ///< [slots, R, heads, size]; the row of position p is p % R
  StateView rest;                      ///< of split states (SplitDesc), as `initial`
  RowView tail_v, tail_beta;           ///< beside it, as tail_v_new
  int32_t* folded = nullptr;           ///< [slots, HV]
  int64_t stride_folded_slot = 0, stride_folded_head = 0;
  int32_t rows = 0;         ///< R
  bool vectors = false;     ///< states and rows without gaps, at multiples of 16 bytes
  int32_t most_sure = 0;    ///< rows in front of the tokens of a sequence of this call
  int32_t most_tokens = 0;  ///< of a sequence of this call
  bool settle = false;
  /// [N], what is written to `folded`, and where folds end that do not end in front of it: a
  /// forward goes on from there. Null: a decode.
  const int32_t* boundaries = nullptr;
  const int32_t* positions = nullptr;  ///< [N]
  const int32_t* sources = nullptr;    ///< [N], or null
  const int32_t* accepted = nullptr;   ///< [N, accepted_columns], or null
  int64_t accepted_columns = 0;
  const int32_t* parents = nullptr;  ///< [N, parent_columns], or null
  int64_t parent_columns = 1;
  /// [N], written by launch_move_accepted(): 1 where accepted rows are wrong; null: there are none
  int32_t* wrong_accepted = nullptr;
  /// [num_found], of launch_ends(): 1 where a tail is wrong. `flags` has all other bits then.
  const int32_t* found = nullptr;
  int64_t num_found = 0;
};

/// Blocks of a kernel that has one for each head of a sequence, and one for flags.
inline int64_t num_blocks(const TailArgs& args) {
  return args.map.num_sequences * args.shape.HV + (args.flags ? 1 : 0);
}

/// A forward with a tail folds the rows in front of the boundary where it ends, runs a forward
/// without a tail up to there, and appends rows of the tokens behind it. So it is three calls:
///   folds:    N sequences without tokens settle up to `boundaries`
///   forward:  packs of sequences 2n, the tokens up to the boundary, and 2n + 1, those behind it,
///             which have no slot there. Its states are the pool, or fp32 states [N] of sequences
///             whose states in the pool are split
///   rows:     the same packs as a decode, where the sequences 2n have no slot
struct EndsArgs {
  TailArgs tail;       ///< `settle`, `accepted`, `parents` and what belongs to them unset
  bool packed = true;  ///< else a sequence is a pack of its own
  int64_t* cu_seqlens = nullptr;  ///< out, of each pack: [2M + 1] for its M sequences
  int32_t* found = nullptr;       ///< [N] out: 1 where a tail is wrong: the sequence is skipped
  int32_t* fold_slots = nullptr;  ///< [N] out, as all below; -1: nothing is folded, or skipped
  int32_t* boundaries = nullptr;
  int32_t* forward_slots = nullptr;  ///< [2N]
  int32_t* row_slots = nullptr;      ///< [2N]
  int32_t* row_positions = nullptr;  ///< [2N]
};

/// Finds where the sequences of a forward end.
Status launch_ends(const EndsArgs& args, const Launch& launch);

/// Split states of sequences [first, first + count) of a forward, and their fp32 [N, HV, ..]: those
/// that have tokens in front of a boundary. `join`: from split to fp32, else back.
struct PlanesArgs {
  Shape shape;
  StateView pool, rest;  ///< TailArgs::initial and rest
  StateView states;      ///< fp32
  const int32_t* forward_slots = nullptr;
  int64_t first = 0, count = 0;
  bool join = true;
};
Status launch_planes(const PlanesArgs& args, const Launch& launch);

/// Moves the rows that accepted_rows lists together, before the decode.
Status launch_move_accepted(const TailArgs& args, const Launch& launch);
/// Folds split states, before the decode, which writes `folded`.
Status launch_fold_split(const TailArgs& args, const Launch& launch);
Status launch_tail_decode(const TailArgs& args, const Launch& launch);
/// The decode of at most one token a sequence, and of chains of several: kernel_of().
Status launch_step(const TailArgs& args, const Launch& launch);
Status launch_verify(const TailArgs& args, const Launch& launch);
/// Copies the tokens' rows of k into the tail, behind the decode.
Status launch_append_keys(const TailArgs& args, const Launch& launch);

}  // namespace kda::cuda::tail
