// SPDX-License-Identifier: Apache-2.0
// chunk_delta_h on Hopper's warpgroup products, for the uses that are serial chains: forward and
// scan. The other uses are those of sm_80.
#pragma once

#include "cuda/staged/chunk_delta_h.hpp"

namespace kda::cuda::sm90 {

/// Tiles of 64 columns of V, or of 128 where 64 would give more blocks than `num_sms`: the values
/// do not depend on it.
Status launch_chunk_delta_h(const ChainArgs& args, ChainUse use, bool fp16, int64_t num_sms,
                            const Launch& launch);

}  // namespace kda::cuda::sm90
