// SPDX-License-Identifier: Apache-2.0
// Launches of the fused forward, from checked calls: the functions of its row.
#pragma once

#include "stage/forward.hpp"
#include "stage/segment_correct.hpp"
#include "stage/segment_merge.hpp"
#include "stage/segment_scan.hpp"
#include "stage/span_maps.hpp"

namespace kda::cuda::fused {

/// An epoch of handoff words (FusedPrefillArgs).
uint64_t new_handoff_epoch();

Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);
Status segment_correct(const stage::SegmentCorrect& args);
Status span_begin(const stage::SpanMapsCall& args);
Status span_finish(const stage::SpanFinish& args);

}  // namespace kda::cuda::fused
