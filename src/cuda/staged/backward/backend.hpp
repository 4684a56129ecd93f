// SPDX-License-Identifier: Apache-2.0
// Plans of the staged backward, and what a forward keeps for it.
#pragma once

#include "cuda/common/cost_sizes.hpp"
#include "plan/builder.hpp"

namespace kda::cuda::staged {

/// Plans the backward in groups of heads of so many bytes, or of one q/k head. The row's own plans
/// have kGroupBytes (staged/backward/sizes.hpp).
void plan_backward_within(plan::PlanBuilder& builder, double group_bytes);

/// Says how many groups of heads a plan has.
void explain_groups(plan::PlanBuilder& builder, const HeadGroups& groups);

/// Books in `saved` the states before chunks and the errors, of all value heads
/// (KeepPolicy::kChunks).
void save_chunks(plan::PlanBuilder& builder);

/// Value heads of a group of the backward, whose tiles lie together in these blocks.
int64_t kept_group_heads(const Plan& plan);

}  // namespace kda::cuda::staged
