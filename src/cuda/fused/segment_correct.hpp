// SPDX-License-Identifier: Apache-2.0
// Stage segment_correct: what the start state of a segment adds to outputs that were made from
// zero, final states, and checkpoints that lie in such segments.
//   o_t += S_in^T qt_t,  qt_t = scale (M of the tokens up to t)^T q_t;  S_final = M S_in + B
#pragma once

#include "cuda/fused/fused_prefill.hpp"
#include "cuda/segments/device_cut.hpp"

namespace kda::cuda::sm90 {

struct SegmentCorrectArgs {
  Shape shape;
  SequenceMap map;
  RowView o;                   ///< bf16, or fp16 with fp16_operands; rows aligned to 16 bytes
  bool fp16_operands = false;  ///< Qt is fp16, and bf16 outputs have a residual; else Qt is bf16
  const void* Qt = nullptr;    ///< with the strides of o
  int qt_exponent = 0;         ///< with fp16_operands: Qt is times 2 to this
  const uint32_t* residual = nullptr;  ///< with fp16_operands (fused/output_residual.cuh)
  const WorkUnit* units = nullptr;     ///< the transitions of the segments to correct
  int64_t num_units = 0;
  int64_t longest = 0;  ///< tokens of the longest unit
  // "Segments" below are those behind the first ones of their sequences.
  const float* M = nullptr;          ///< [segments, HV, K, K]
  const float* B = nullptr;          ///< [segments, HV, K, V]
  const float* states_in = nullptr;  ///< [segments, HV, K, V]
  const int64_t* offsets = nullptr;  ///< [N + 1] segments before each sequence
  /// [segments, HV] tokens before which Qt is there; behind them it counts as zeros. Null: all.
  const int64_t* exit_tokens = nullptr;
  StateView final_state;
  // One checkpoint a sequence (FusedPrefillArgs); without `checkpoints` none.
  StateView checkpoints;
  const int32_t* checkpoint_offsets = nullptr;
  uint32_t checkpoint_multiple = 16;
  const float *checkpoint_M = nullptr, *checkpoint_B = nullptr;

  /// A cut that only the device knows: units, num_units and longest are then those of `cut`, with
  /// `units` the first of all, and exit_tokens are there.
  const CutHeader* cut = nullptr;

  int64_t block_tokens = 0;  ///< tokens that a block corrects: set by the launch
};

/// K = V = 64 or 128.
Status launch_segment_correct(SegmentCorrectArgs args, int64_t num_sms, const Launch& launch);

}  // namespace kda::cuda::sm90
