// SPDX-License-Identifier: Apache-2.0
// Parts that the rows of the fused forward share.
#pragma once

#include <string>

#include "kda/problem.hpp"

namespace kda::cuda::fused {

/// Why the fused forward does not serve; empty if it does.
std::string decline_problem(const Problem& problem);

}  // namespace kda::cuda::fused
