// SPDX-License-Identifier: Apache-2.0
// Stage "chunk_o": the outputs of all chunks at once.
//   o = qg S + Aqk vn                    [C, V], with the diagonal of Aqk in fp32 (`diag`)
// Shapes and types: stage/buffers.hpp.
#pragma once

#include "kda/stages.hpp"
#include "stage/call.hpp"

namespace kda::stage {

/// Reads qg, Aqk, diag, h, vn; writes o of the problem.
struct ChunkO {
  Call call;
  const StageTensors& buffers;
};

}  // namespace kda::stage
