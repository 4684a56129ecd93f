// SPDX-License-Identifier: Apache-2.0
// Stage "segment_correct", the end of the one-pass form.
//   o_t = o_zero_t + states_in^T qt_t       for every token of a segment
//   final state = M states_in + B           of the last segment of each sequence
#pragma once

#include "stage/segment_scan.hpp"

namespace kda::stage {

/// Buffers as in SegmentScan and SegmentMerge.
struct SegmentCorrect {
  Call call;
  std::span<const Segment> segments;
  const float* M = nullptr;
  const float* B = nullptr;
  const float* states_in = nullptr;
  SegmentRows rows = SegmentRows::kAll;
  const float* o_zero = nullptr;
  const void* Qt = nullptr;
  const int64_t* exit_token = nullptr;
};

}  // namespace kda::stage
