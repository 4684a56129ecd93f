// SPDX-License-Identifier: Apache-2.0
// Which kernel of the fused forward serves a problem.
#pragma once

#include "kda/problem.hpp"

namespace kda::cuda::fused {

/// Are operands fp16? No factor and no decay is above 1 then.
bool has_fp16_operands(const Problem& problem);

}  // namespace kda::cuda::fused
