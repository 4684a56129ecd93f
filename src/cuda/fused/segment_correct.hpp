// SPDX-License-Identifier: Apache-2.0
// Stage segment_correct: what the start state of a segment adds to outputs that were made from
// zero, and the final states.
//   o_t += S_in^T qt_t,  qt_t = scale (M of the tokens up to t)^T q_t;  S_final = M S_in + B
#pragma once

#include "cuda/fused/fused_prefill.hpp"

namespace kda::cuda::sm90 {

struct SegmentCorrectArgs {
  Shape shape;
  SequenceMap map;
  RowView o;                   ///< bf16 or, of `fp16_operands`, fp16; rows aligned to 16 bytes
  bool fp16_operands = false;  ///< Qt is fp16 and bf16 outputs have a rest; else Qt is bf16
  const void* Qt = nullptr;    ///< with the strides of o
  int qt_exponent = 0;         ///< of `fp16_operands`: it is times 2 to this
  const uint32_t* residual = nullptr;  ///< of `fp16_operands`, the same
  const WorkUnit* units = nullptr;     ///< the segments to correct, by their transitions
  int64_t num_units = 0;
  int64_t longest = 0;  ///< tokens of a unit, at most
  // Of the segments behind the first ones of their sequences:
  const float* M = nullptr;          ///< [segments, HV, K, K]
  const float* B = nullptr;          ///< [segments, HV, K, V]
  const float* states_in = nullptr;  ///< the same
  const int64_t* offsets = nullptr;  ///< [N + 1] such segments before each sequence
  /// [segments, HV] tokens before which Qt is there: behind them it is as zeros. Null: all.
  const int64_t* exit_tokens = nullptr;
  StateView final_state;

  int64_t block_tokens = 0;  ///< of a segment, a block: set by the launch
};

/// K = V = 64 or 128.
Status launch_segment_correct(SegmentCorrectArgs args, int64_t num_sms, const Launch& launch);

}  // namespace kda::cuda::sm90
