// SPDX-License-Identifier: Apache-2.0
// Launches of segments and of their maps that backends share, from checked calls.
#pragma once

#include "cuda/segments/segment_merge.hpp"
#include "kda/span.hpp"
#include "stage/segment_merge.hpp"

namespace kda::cuda {

/// The stage of staged and recurrent.
Status segment_merge(const stage::SegmentMerge& args);

/// segment_merge with SegmentMergeArgs::forgotten.
Status merge_segments(const stage::SegmentMerge& args, const int32_t* forgotten);

/// segment_merge; `hopper`: merges_on_hopper() (segments/kernels.hpp).
Status launch_merge(const SegmentMergeArgs& args, bool hopper, const Launch& where);

/// kda::fold_states() (include/kda/span.hpp), of checked arguments.
Status fold_states(const StateFold& fold);

}  // namespace kda::cuda
