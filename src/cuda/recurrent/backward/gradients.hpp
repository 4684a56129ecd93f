// SPDX-License-Identifier: Apache-2.0
// From a checked Backward to what kernels are given.
#pragma once

#include "cuda/launch/views.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "stage/backward.hpp"

namespace kda::cuda {

/// The members that kernels of all backwards share: inputs, gradients, flags, sums of parameters.
void set_gradient_views(const stage::Backward& b, const SequenceMaps& maps, BackwardArgs* args);
/// And where dt_bias has one bias a head, that of each channel.
Status set_gradients(const stage::Backward& b, const SequenceMaps& maps, BackwardArgs* args);

/// With what kernels of one gate a head ask for.
inline HeadGates<BackwardArgs> with_head_gates(const stage::Backward& b, const BackwardArgs& args) {
  HeadGates<BackwardArgs> with = with_head_gates(b.call.problem, args);
  if (b.gradients.dg && is_a_head(b.call.problem, *b.gradients.dg)) with.dgate_step = 0;
  return with;
}

}  // namespace kda::cuda
