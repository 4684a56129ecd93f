// SPDX-License-Identifier: Apache-2.0
// Segments of a backward pass. dS behind each segment, in fp32:
//   dS[last] = d_final of the sequence, dS[n - 1] = M_n^T dS[n] + D_n
// where D_n is the gradient of the state before segment n if that of the state behind it is zero.
#pragma once

#include "cuda/segments/segment_merge.hpp"

namespace kda::cuda {

/// In `args` is d_final `initial`, slot: sequence; D is `B` and dS `states_in`. K <= 128.
Status launch_reverse_merge(const SegmentMergeArgs& args, const Launch& launch);

/// A map in which each segment is a sequence of its own, and slots of states by such sequences.
/// Tokens of the batch must be one row after the other.
struct SegmentSequencesArgs {
  SequenceMap map;                    ///< with segments
  StateView initial;                  ///< of the forward
  int64_t* cu_seqlens = nullptr;      ///< [spans + 1] out
  int64_t* chunk_offsets = nullptr;   ///< [spans + 1] out
  int32_t* initial_slots = nullptr;   ///< [spans] out: of first segments, as `initial` has it or -1
  int32_t* sequence_slots = nullptr;  ///< [spans] out: of first segments their sequence, else -1
};

Status launch_segment_sequences(const SegmentSequencesArgs& args, const Launch& launch);

}  // namespace kda::cuda
