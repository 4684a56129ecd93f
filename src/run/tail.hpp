// SPDX-License-Identifier: Apache-2.0
// Checks of what a call with a tail is told of its sequences, in host memory.
#pragma once

#include "kda/run.hpp"
#include "stage/sequences.hpp"

namespace kda {

/// Positions, folded, sources and accepted_rows fit each other. Slots are in range, and pointers
/// are there.
Status check_tail(const Problem& problem, const Tensors& tensors,
                  const stage::Sequences& sequences);

}  // namespace kda
