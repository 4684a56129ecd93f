// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward of cuda.sm80.staged share.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/factors.hpp"
#include "kda/plan.hpp"
#include "stage/buffers.hpp"

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

/// Narrow tiles of V while that gives idle SMs work. The values do not depend on it. `chains`: of
/// `columns` columns of a state each.
inline bool narrow_tiles(int64_t num_sms, int64_t chains, int64_t columns) {
  return 2 * chains * ((columns + kVTile - 1) / kVTile) <= num_sms;
}

/// kForward or kScan of chunk_delta_h in the form of the device, on `columns` columns of the state
/// of each span.
Status launch_chain(const ChainArgs& args, ChainUse use, bool fp16, const DeviceFacts& device,
                    int64_t spans, int64_t columns, const Launch& where);

}  // namespace kda::cuda::staged
