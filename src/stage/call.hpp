// SPDX-License-Identifier: Apache-2.0
// Call: what every stage is given. Arguments have been checked before a stage is called.
#pragma once

#include <cstdint>

#include "kda/plan.hpp"
#include "kda/run.hpp"
#include "stage/sequences.hpp"

namespace kda::stage {

struct Call {
  const Problem& problem;
  const Tensors& tensors;
  Sequences sequences;
  int32_t num_threads;
  void* scratch;  ///< CPU: the block thread_scratch, aligned to kWorkspaceAlignment
  const Plan* plan = nullptr;
  void* workspace = nullptr;  ///< Plan::workspace; plan::find_block() has the addresses
  void* stream = nullptr;     ///< CUDA
};

}  // namespace kda::stage
