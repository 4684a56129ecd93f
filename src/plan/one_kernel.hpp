// SPDX-License-Identifier: Apache-2.0
// When a forward that one kernel could do (cuda.sm90.fused) goes to it. By heads and device alone:
// lengths and batches never change the kernel.
#pragma once

#include <string>

#include "plan/partition.hpp"

namespace kda::plan {

/// A policy of context parallelism that does not leave it to the planner.
bool asks_for_segments(const PlanOptions& options);

/// Why stages should serve where no backend is asked for; empty if one kernel should. `may_cut`:
/// segments can be joined, whether or not the policy wants any.
std::string stages_preferred(const Plan& plan, bool may_cut);

/// Predicted times of a forward in one kernel, and in stages.
CostEstimate predict_one_kernel(const Workload& work, const DeviceFacts& device);

}  // namespace kda::plan
