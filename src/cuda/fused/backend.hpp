// SPDX-License-Identifier: Apache-2.0
// Parts that the rows of the fused forward share.
#pragma once

#include <string>

#include "kda/plan.hpp"
#include "kda/problem.hpp"
#include "plan/partition.hpp"

namespace kda::cuda::fused {

/// Why the fused forward does not serve; empty if it does.
std::string decline_problem(const Problem& problem);

/// The work that one kernel and stages are compared by: one sequence of kTypicalTokens, so that
/// heads and device alone decide, and lengths and batches never change the kernel.
inline constexpr int64_t kTypicalTokens = 8192;
plan::Workload typical_work(const Problem& problem, const DeviceFacts& device);
/// The sentence about it.
std::string typical_times(const plan::Workload& work, double fused_us, double stages_us);

}  // namespace kda::cuda::fused
