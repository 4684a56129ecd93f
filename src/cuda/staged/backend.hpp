// SPDX-License-Identifier: Apache-2.0
// Inputs that the forward and the backward of cuda.sm80.staged serve.
#pragma once

#include <string>

#include "kda/problem.hpp"

namespace kda::cuda::staged {

/// Empty if it serves inputs such as these: types, sizes, alignment.
std::string decline_inputs(const Problem& problem);

}  // namespace kda::cuda::staged
