// SPDX-License-Identifier: Apache-2.0
// Names of the CUDA backends' own blocks in the workspace. What they hold and how large they are is
// said where they are booked: backend.cpp of their owner, or common.cpp for those that all have.
#pragma once

#include <cstddef>

namespace kda::cuda::block {

// Blocks that every backend books.
inline constexpr const char* kSequenceMap = "sequence_map";
inline constexpr const char* kDeviceFlags = "device_flags";
// Blocks of a decode with a tail.
inline constexpr const char* kWrongAccepted = "wrong_accepted";
// Blocks of a forward with a tail: what tail_ends writes, and the workspace of the forward inside.
inline constexpr const char* kTailEnds = "tail_ends";
inline constexpr std::size_t kTailEndsOfSequence = 9;  // int32
inline constexpr const char* kTailPacks = "tail_packs";
inline constexpr const char* kTailForward = "tail_forward";
inline constexpr const char* kTailStates = "tail_states";  // in fp32, where the pool has split ones
// Where dt_bias has one bias a head, and kernels read a bias a channel.
inline constexpr const char* kHeadBias = "head_bias";
// Blocks of cuda.sm90.fused; the first one is of cuda.sm90.gdn too.
inline constexpr const char* kDeviceCut = "device_cut";
inline constexpr const char* kSegmentUnits = "segment_units";
inline constexpr const char* kOutputResidual = "output_residual";
inline constexpr const char* kCheckpointM = "checkpoint_M";
inline constexpr const char* kCheckpointB = "checkpoint_B";
inline constexpr const char* kHandoffStates = "handoff_states";
inline constexpr const char* kHandoffFlags = "handoff_flags";
// Blocks of cuda.sm90.gdn.
inline constexpr const char* kGdnQ = "gdn_q";
inline constexpr const char* kGdnK = "gdn_k";
inline constexpr const char* kGdnInverse = "gdn_inverse";
inline constexpr const char* kGdnScores = "gdn_scores";
inline constexpr const char* kGdnNumbers = "gdn_numbers";
inline constexpr const char* kGdnForgotten = "gdn_forgotten";
inline constexpr const char* kGdnBackwardNumbers = "gdn_backward_numbers";
// Blocks that cuda.sm90.fused saves for a backward.
inline constexpr const char* kKeptChunkStates = "kept_chunk_states";
inline constexpr const char* kKeptErrors = "kept_errors";
// Blocks of both backwards.
inline constexpr const char* kBackwardErrors = "backward_errors";
inline constexpr const char* kBackwardDz = "backward_dz";
inline constexpr const char* kParameterSums = "parameter_sums";
// Blocks of the backward of cuda.sm80.staged.
inline constexpr const char* kFactorsThenRows = "factors_then_rows";
inline constexpr const char* kChunkStates = "chunk_states";
inline constexpr const char* kChunkDStates = "chunk_d_states";
inline constexpr const char* kOperandScales = "operand_scales";
inline constexpr const char* kSegmentSequences = "segment_sequences";
inline constexpr const char* kSegmentD = "segment_D";
inline constexpr const char* kSegmentDStates = "segment_d_states";
// Blocks of the backward of cuda.smxx.recurrent.
inline constexpr const char* kBackwardStates = "backward_states";
inline constexpr const char* kBackwardDStates = "backward_d_states";
inline constexpr const char* kBackwardStarts = "backward_starts";
inline constexpr const char* kBackwardCarry = "backward_carry";
inline constexpr const char* kBackwardRows = "backward_rows";

}  // namespace kda::cuda::block
