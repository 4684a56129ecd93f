// SPDX-License-Identifier: Apache-2.0
// segment_merge with Hopper's bulk copies.
#pragma once

#include "cuda/segments/device_cut.hpp"
#include "cuda/segments/segment_merge.hpp"

namespace kda::cuda::sm90 {

struct BegunMergeArgs : SegmentMergeArgs {
  bool begun = false;         ///< states_in[first] is there
  int64_t most_segments = 0;  ///< of a sequence, if that is known; 0: not
  /// Which sequences are cut, for a walking merge (segments/device_cut.hpp).
  const CutHeader* cut = nullptr;
};

/// K = 64 or 128.
Status launch_segment_merge(const BegunMergeArgs& args, const Launch& launch);

/// Merges the sequences of `cut` that are cut: blocks, one an SM at most, walk over them.
Status launch_walking_merge(const BegunMergeArgs& args, int64_t num_sms, const Launch& launch);

}  // namespace kda::cuda::sm90
