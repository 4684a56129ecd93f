// SPDX-License-Identifier: Apache-2.0
// segment_merge for K = 64 and 128 where some M are known to be 0.
#pragma once

#include "cuda/segments/segment_merge_sm90.hpp"

namespace kda::cuda::gdn {

struct MergeArgs : sm90::BegunMergeArgs {
  const int32_t* forgotten = nullptr;  ///< [spans, HV]: 1 where M is 0; null: nothing is known
};

Status launch_merge(const MergeArgs& args, const Launch& launch);

}  // namespace kda::cuda::gdn
