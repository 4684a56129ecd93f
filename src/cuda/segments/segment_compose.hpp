// SPDX-License-Identifier: Apache-2.0
// Spans of longer sequences, each cut into an empty segment and others behind it
// (PlanOptions::spans).
//   compose: M = M_last .. M_first,  B = M_last (.. (B_first) ..) + B_last   of a whole sequence
//   place:   states_in[second segment] = the state before the sequence
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

/// Rows are segments behind the first one of their sequence. K and V are 64 or 128, all is dense.
struct SegmentComposeArgs {
  Shape shape;
  int64_t num_sequences = 0;
  const int64_t* offsets = nullptr;  ///< [N + 1] rows before each sequence
  const float* M = nullptr;          ///< [rows, HV, K, K]
  const float* B = nullptr;          ///< [rows, HV, K, V]
  float* M_out = nullptr;            ///< [N, HV, K, K]; null: not wanted
  float* B_out = nullptr;            ///< [N, HV, K, V]; null: not wanted
};

/// A sequence has at least one row.
Status launch_segment_compose(const SegmentComposeArgs& args, const Launch& launch);

struct SegmentPlaceArgs {
  int64_t num_sequences = 0;
  int64_t state_floats = 0;          ///< HV K V
  const int64_t* offsets = nullptr;  ///< as above
  const float* starts = nullptr;     ///< [N, HV, K, V]
  float* states_in = nullptr;        ///< [rows, HV, K, V]
};

Status launch_segment_place(const SegmentPlaceArgs& args, const Launch& launch);

}  // namespace kda::cuda
