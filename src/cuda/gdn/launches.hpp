// SPDX-License-Identifier: Apache-2.0
// Launches of Gated DeltaNet's forward, from checked calls: the functions of its row.
#pragma once

#include "stage/forward.hpp"

namespace kda::cuda::gdn {

Status forward(const stage::Forward& args);

}  // namespace kda::cuda::gdn
