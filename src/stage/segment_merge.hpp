// SPDX-License-Identifier: Apache-2.0
// Stage "segment_merge": the start states of all segments, in order.
//   states_in[first] = initial state of the sequence
//   states_in[n + 1] = M_n states_in[n] + B_n
#pragma once

#include "stage/segment_scan.hpp"

namespace kda::stage {

struct SegmentMerge {
  Call call;
  std::span<const Segment> segments;
  const float* M = nullptr;  ///< as in SegmentScan
  const float* B = nullptr;
  float* states_in = nullptr;  ///< [rows, HV, K, V] fp32
  bool prepared = false;       ///< as in Forward
  SegmentRows rows = SegmentRows::kAll;
};

}  // namespace kda::stage
