// SPDX-License-Identifier: Apache-2.0
// Launches of segments and of their maps that backends share, from checked calls.
#pragma once

#include "cuda/launch/views.hpp"
#include "cuda/segments/segment_merge.hpp"
#include "kda/span.hpp"
#include "stage/segment_merge.hpp"

namespace kda::cuda {

/// The stage of staged and recurrent.
Status segment_merge(const stage::SegmentMerge& args);

/// Arguments of its kernels.
SegmentMergeArgs merge_args(const stage::SegmentMerge& args, const SequenceMaps& maps);

/// segment_merge; `hopper`: merges_on_hopper() (segments/kernels.hpp).
Status launch_merge(const SegmentMergeArgs& args, bool hopper, const Launch& where);

/// kda::fold_states() (include/kda/span.hpp), of checked arguments.
Status fold_states(const StateFold& fold);

}  // namespace kda::cuda
