// SPDX-License-Identifier: Apache-2.0
// The two chains of a backward on Hopper's warpgroup products: what chunk_delta_h (kErrors) and
// chunk_reverse write, by one launch.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/staged/backward/reverse.hpp"

namespace kda::cuda::sm90 {

/// One of the two may be null. Neither chain needs anything of the other, so their blocks run
/// beside each other where they fit the device. `v`: that of the caller, with fp16 factors, which
/// are K = 128's and have no u; else null, with bf16 factors.
Status launch_chains(const ChainArgs* errors, const ReverseArgs* reverse, const RowView* v,
                     const Launch& launch);

}  // namespace kda::cuda::sm90
