// SPDX-License-Identifier: Apache-2.0
// Stage segment_merge: start states of segments, in fp32.
//   states_in[first] = initial state of the sequence, states_in[n + 1] = M_n states_in[n] + B_n
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

struct SegmentMergeArgs {
  Shape shape;
  SequenceMap map;  ///< with segments, those of a sequence together and in order
  /// [N + 1] segments before each sequence.
  const int64_t* segment_offsets = nullptr;
  StateView initial;
  const float* M = nullptr;    ///< [spans, HV, K, K]
  const float* B = nullptr;    ///< [spans, HV, K, V]
  float* states_in = nullptr;  ///< [spans, HV, K, V]
};

Status launch_segment_merge(const SegmentMergeArgs& args, const Launch& launch);

}  // namespace kda::cuda
