// SPDX-License-Identifier: Apache-2.0
// segment_merge with Hopper's bulk copies.
#pragma once

#include "cuda/smxx/segment_merge.hpp"

namespace kda::cuda::sm90 {

/// K = 64 or 128.
Status launch_segment_merge(const SegmentMergeArgs& args, const Launch& launch);

}  // namespace kda::cuda::sm90
