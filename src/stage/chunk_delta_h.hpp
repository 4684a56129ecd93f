// SPDX-License-Identifier: Apache-2.0
// Stage "chunk_delta_h": the chain of states, chunk by chunk, for every sequence and value head.
//   h  = S^T                             the state before the chunk
//   vn = diag(beta) (u - w S)            [C, V]
//   S  = Diag(gamma) S + kg^T vn         [K, V]
// Also final states and checkpoints. Shapes and types: stage/buffers.hpp.
#pragma once

#include "kda/stages.hpp"
#include "stage/call.hpp"

namespace kda::stage {

/// Reads w, u, kg, gamma, beta; writes h and vn.
struct ChunkDeltaH {
  Call call;
  const StageTensors& buffers;
};

}  // namespace kda::stage
