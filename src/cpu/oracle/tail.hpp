// SPDX-License-Identifier: Apache-2.0
// Calls with a tail in float64: the states behind its rows are made one after the other.
#pragma once

#include "plan/builder.hpp"
#include "stage/call.hpp"

namespace kda::cpu::oracle {

void plan_tail(plan::PlanBuilder& builder);
Status tail_call(const stage::Call& call);

}  // namespace kda::cpu::oracle
