// SPDX-License-Identifier: Apache-2.0
// The search for a cut as functions of numbers alone, for the planner and for the kernel that cuts
// where only the GPU knows the lengths. Both call these in files that are compiled without
// contraction of products and sums, so that both find the same cut, bit for bit.
//
// For every number of segments there are candidates, which differ in how long a first segment is.
// The best of them is the one with the least time, the first of equals. A walk over the numbers of
// segments then takes the best of a number where it gains enough.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.hpp"

namespace kda::plan {

KDA_HOST_DEVICE inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
KDA_HOST_DEVICE inline constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
KDA_HOST_DEVICE inline constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline constexpr int64_t kAutoChunk = 64;  ///< tokens; searched cuts lie at multiples of it
inline constexpr int64_t kAutoMaxSegments = 64;

/// Lengths of the segments of a sequence that is cut, in chunks.
struct CutLengths {
  int64_t first = 0, others = 0;
};

/// The cut of `chunks` chunks into `segments`, the first of which is `first` times as long as the
/// others.
KDA_HOST_DEVICE inline CutLengths cut_lengths(int64_t chunks, int64_t segments, double first) {
  const auto others = static_cast<int64_t>(
      ceil(static_cast<double>(chunks) / (static_cast<double>(segments - 1) + first)));
  return {larger(others, chunks - (segments - 1) * others), others};
}

/// The walk over numbers of segments.
struct CutWalk {
  double best;          ///< time of what is taken; uncut at first
  double minimum_step;  ///< of that time, for more segments: they take more memory
  int64_t patience;     ///< so many segments more without a gain: still more have none either
  int64_t segments = 0;

  /// Whether no cut into so many or more is looked at.
  KDA_HOST_DEVICE bool is_over(int64_t number) const {
    return number > larger(segments, 1) + patience;
  }
  /// Whether the best cut into `number` segments, which takes `time`, is taken.
  KDA_HOST_DEVICE bool take(int64_t number, double time) {
    if (!(time < (segments > 0 ? minimum_step : 1) * best)) return false;
    best = time;
    segments = number;
    return true;
  }
};

/// Segments of a sequence of `chunks` chunks. A first length of 0: as the others.
KDA_HOST_DEVICE inline int64_t num_segments_of(const CutLengths& lengths, int64_t chunks) {
  if (chunks <= 1) return 1;
  if (lengths.first == 0) return ceil_div(chunks, lengths.others);
  return 1 + ceil_div(larger(0, chunks - lengths.first), lengths.others);
}

/// Chunks of a sequence before segment `s` of `count`: the first one as long as it was asked for
/// (0: as the others), the others as even as they go.
KDA_HOST_DEVICE inline int64_t chunks_before(int64_t s, int64_t count, int64_t chunks,
                                             int64_t first) {
  if (count == 1 || s == 0) return s == 0 ? 0 : chunks;
  const int64_t even = count - (first > 0 ? 1 : 0);
  return first == 0 ? chunks * s / even : first + (chunks - first) * (s - 1) / even;
}

}  // namespace kda::plan
