// SPDX-License-Identifier: Apache-2.0
// Launches of Gated DeltaNet's forward, from checked calls: the functions of its row, and what a
// backward makes alike.
#pragma once

#include "cuda/gdn/factors.hpp"
#include "cuda/gdn/intra_sm90.hpp"
#include "cuda/launch/views.hpp"
#include "stage/forward.hpp"
#include "stage/segment_merge.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::gdn {

/// Where a call has the factors of its chunks, and what the kernel that makes them is given.
Factors factors_of(const stage::Call& call);
HeadGates<IntraArgs> intra_args(const stage::Call& call, const SequenceMaps& maps);

Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);

}  // namespace kda::cuda::gdn
