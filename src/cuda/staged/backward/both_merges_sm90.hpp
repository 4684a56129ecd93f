// SPDX-License-Identifier: Apache-2.0
// States before the segments of a backward, and dS behind them, by one launch.
#pragma once

#include "cuda/segments/segment_merge.hpp"

namespace kda::cuda::sm90 {

/// K = 64 or 128, of the same segments. `reverse` is what launch_reverse_merge() takes. Neither
/// needs anything of the other.
Status launch_both_merges(const SegmentMergeArgs& forward, const SegmentMergeArgs& reverse,
                          const Launch& launch);

}  // namespace kda::cuda::sm90
