// SPDX-License-Identifier: Apache-2.0
// Launches of Gated DeltaNet's backward, from a checked call: the function of its row.
#pragma once

#include "stage/backward.hpp"

namespace kda::cuda::gdn {

Status backward(const stage::Backward& b);

}  // namespace kda::cuda::gdn
