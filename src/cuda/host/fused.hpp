// SPDX-License-Identifier: Apache-2.0
// Registry row of the fused kernel (rows.cpp), and what it calls.
#pragma once

#include "stage/implementation.hpp"

namespace kda::cuda {

/// One kernel for Hopper (sm_90a), bf16 or fp16, K = V = 64 or 128.
extern const stage::Implementation kFused;

/// Are operands fp16? No factor and no decay is above 1 then.
bool fp16_operands(const Problem& problem);

namespace fused {
Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);
Status segment_correct(const stage::SegmentCorrect& args);
}  // namespace fused

}  // namespace kda::cuda
