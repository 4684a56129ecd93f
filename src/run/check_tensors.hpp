// SPDX-License-Identifier: Apache-2.0
// check_tensors(): every check of run() that needs the caller's pointers. Nothing is written but
// the slot marks in the workspace.
#pragma once

#include "kda/run.hpp"
#include "stage/sequences.hpp"

namespace kda {

Status check_workspace(const Plan& plan, const void* workspace, std::size_t workspace_bytes);
Status check_tensors(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
                     void* workspace);

}  // namespace kda
