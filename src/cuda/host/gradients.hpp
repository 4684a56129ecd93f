// SPDX-License-Identifier: Apache-2.0
// From a checked Backward to what kernels are given.
#pragma once

#include "cuda/backward/backward.hpp"
#include "cuda/host/views.hpp"
#include "stage/backward.hpp"

namespace kda::cuda {

/// The members that kernels of both backwards share: inputs, gradients, flags, sums of parameters.
void set_gradients(const stage::Backward& b, const Maps& maps, BackwardArgs* args);

}  // namespace kda::cuda
