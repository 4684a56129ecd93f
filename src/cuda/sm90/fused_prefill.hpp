// SPDX-License-Identifier: Apache-2.0
// The whole forward in one kernel: producer warps make the factors of runs of 16 tokens in shared
// memory, a consumer warpgroup holds the state. Nothing but inputs and outputs goes through device
// memory.
#pragma once

#include "cuda/sm80/chunk_delta_h.hpp"

namespace kda::cuda::sm90 {

inline constexpr int kFusedRun = 16;  ///< tokens of a run

struct FusedPrefillArgs : ChunkDeltaHArgs {  // without its factors
  static constexpr unsigned kCluster = 2;    ///< blocks: the halves of V share factors
  RowView q, k, v, g, beta;
  GateView gate;
};

/// q, k, v, o bf16, g bf16 or fp32, rows aligned to 16 bytes; K = V = 128; checkpoints at multiples
/// of kFusedRun tokens.
Status launch_fused_prefill(const FusedPrefillArgs& args, const Launch& launch);

}  // namespace kda::cuda::sm90
