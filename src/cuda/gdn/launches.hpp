// SPDX-License-Identifier: Apache-2.0
// Launches of Gated DeltaNet's forward, from checked calls: the functions of its row.
#pragma once

#include "stage/forward.hpp"
#include "stage/segment_merge.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::gdn {

Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);

}  // namespace kda::cuda::gdn
