// SPDX-License-Identifier: Apache-2.0
// Stages of the chunked forward on buffers of the caller (include/kda/stages.hpp).
#pragma once

#include "kda/stages.hpp"
#include "stage/forward.hpp"

namespace kda::stage {

enum class ChunkStage { kIntra, kRecomputeWU, kDeltaH, kO };

struct Chunk {
  Call call;
  ChunkStage which;
  const StageTensors& stages;
};

}  // namespace kda::stage
