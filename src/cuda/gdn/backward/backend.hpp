// SPDX-License-Identifier: Apache-2.0
// Plans of Gated DeltaNet's backward.
#pragma once

#include "plan/builder.hpp"

namespace kda::cuda::gdn {

/// Plans the backward in groups of heads of so many bytes, or of one q/k head. The row's own plans
/// have kBackwardGroupBytes (gdn/backward/sizes.hpp).
void plan_backward_within(plan::PlanBuilder& builder, double group_bytes);

}  // namespace kda::cuda::gdn
