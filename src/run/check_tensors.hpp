// SPDX-License-Identifier: Apache-2.0
// Checks of the pointers, lengths and indices of one run(), before anything is written.
#pragma once

#include "kda/backward.hpp"
#include "kda/run.hpp"
#include "registry/rows.hpp"
#include "stage/sequences.hpp"

namespace kda {

Status check_workspace(const Plan& plan, const void* workspace, std::size_t workspace_bytes);
Status check_saved(const Plan& plan, const Tensors& tensors, const void* workspace);

/// Gradients that a backward has beside the inputs of the forward.
struct GradientCheck {
  const Gradients& gradients;
  const GradientTensors& tensors;
};

/// `device`: of the plan's row; null: all tensors are host memory. `backward`: the outputs of the
/// forward are not looked at, but these.
Status check_tensors(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
                     void* workspace, const registry::DeviceChecks* device,
                     const GradientCheck* backward = nullptr);

}  // namespace kda
