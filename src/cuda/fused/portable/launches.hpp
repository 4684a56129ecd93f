// SPDX-License-Identifier: Apache-2.0
// Launches of the portable fused forward, from checked calls: the functions of its row.
#pragma once

#include "stage/forward.hpp"

namespace kda::cuda::fused::portable {

Status forward(const stage::Forward& args);

}  // namespace kda::cuda::fused::portable
