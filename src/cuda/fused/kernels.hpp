// SPDX-License-Identifier: Apache-2.0
// Which kernel of the fused forward serves a plan: decided once. The plan lists it, launches read
// it.
#pragma once

#include "plan/builder.hpp"

namespace kda::cuda::fused {

/// Are operands fp16? No factor and no decay is above 1 then.
bool has_fp16_operands(const Problem& problem);

/// Returns the tokens between checks of a transition's norm; 0 where none may exit early, or where
/// whether it does would depend on what else is in the batch.
int64_t check_tokens_of(const Problem& problem);

/// Why operands have the type that they have.
std::string why_operands(const Problem& problem);

struct Kernels {
  bool fp16_operands = false;  ///< else bf16
  bool head_gate = false;      ///< of one gate a head, in a source of its own
  bool keeps = false;          ///< stores states before chunks and errors for a backward
};
Kernels kernels_of(const Plan& plan);

/// Adds them to the plan, with what joins segments.
void list_kernels(plan::PlanBuilder& builder);

}  // namespace kda::cuda::fused
