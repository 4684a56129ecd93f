// SPDX-License-Identifier: Apache-2.0
// Launches of the backward in fp32, from a checked call.
#pragma once

#include "stage/backward.hpp"

namespace kda::cuda::recurrent {

Status backward(const stage::Backward& args);

}  // namespace kda::cuda::recurrent
