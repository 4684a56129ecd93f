// SPDX-License-Identifier: Apache-2.0
// Launches of segments that the forward and the backward share.
#pragma once

#include "cuda/segments/segment_merge.hpp"
#include "kda/plan.hpp"

namespace kda::cuda {

/// segment_merge in the form of the device.
Status launch_merge(const SegmentMergeArgs& args, const DeviceFacts& device, const Launch& where);

}  // namespace kda::cuda
