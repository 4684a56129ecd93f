// SPDX-License-Identifier: Apache-2.0
// segment_merge for K = 64 and 128 where some M are known to be 0.
#pragma once

#include "cuda/segments/segment_merge_sm90.hpp"

namespace kda::cuda::gdn {

struct MergeArgs : sm90::BegunMergeArgs {
  const int32_t* forgotten = nullptr;  ///< [spans, HV]: 1 where M is 0; null: nothing is known
};

Status launch_merge(const MergeArgs& args, int64_t num_sms, const Launch& launch);

/// Merges of a backward: states before segments, unless null, and dS behind them, in one launch.
/// `gradients` is what launch_reverse_merge() takes (staged/backward/reverse_merge.hpp).
Status launch_both_merges(const MergeArgs* states, const MergeArgs& gradients, int64_t num_sms,
                          const Launch& launch);

}  // namespace kda::cuda::gdn
