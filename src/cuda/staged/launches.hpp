// SPDX-License-Identifier: Apache-2.0
// Launches of the staged forward, from checked calls: the functions of its row, and what its
// backward shares.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/staged/kernels.hpp"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/factors.hpp"
#include "kda/plan.hpp"
#include "stage/buffers.hpp"
#include "stage/chunk_delta_h.hpp"
#include "stage/chunk_intra.hpp"
#include "stage/chunk_o.hpp"
#include "stage/forward.hpp"
#include "stage/recompute_w_u.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::staged {

/// From addresses in the order of stage::kChunkBuffers.
inline Factors factors_at(const stage::ChunkPointers& at) {
  return {at[0],
          at[1],
          at[2],
          at[3],
          at[4],
          at[5],
          static_cast<float*>(at[6]),
          static_cast<float*>(at[7]),
          static_cast<float*>(at[8])};
}

Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status chunk_intra(const stage::ChunkIntra& args);
Status recompute_w_u(const stage::RecomputeWU& args);
Status chunk_delta_h(const stage::ChunkDeltaH& args);
Status chunk_o(const stage::ChunkO& args);

/// kForward or kScan of chunk_delta_h by that kernel.
Status launch_chain(const ChainArgs& args, ChainUse use, const ChainKernel& kernel,
                    const Launch& where);

}  // namespace kda::cuda::staged
