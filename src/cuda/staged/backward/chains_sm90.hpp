// SPDX-License-Identifier: Apache-2.0
// The two chains of a backward on Hopper's warpgroup products: what chunk_delta_h (kErrors) and
// chunk_reverse write, by one launch.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/staged/backward/reverse.hpp"

namespace kda::cuda::sm90 {

/// One of the two may be null. Neither chain needs anything of the other, so their blocks run
/// beside each other where they fit the device. Errors without h are there already: of these
/// arguments only flags are written.
Status launch_chains(const ChainArgs* errors, const ReverseArgs* reverse, const Launch& launch);

/// With the fp16 factors of launch_chunk_intra_fp16(); v: the caller's. `fallback`: null, or
/// workspace, kFallbackWords of each chunk and value head; those of the first chunk of a sequence
/// tell whether its chains have to be made again.
Status launch_fp16_chains(const ChainArgs* errors, const ReverseArgs& reverse, const RowView& v,
                          uint32_t* fallback, const Launch& launch);
/// Takes fp16 v and d_o, and hands on fp16. Workspace `scales`: as of FinishedGradArgs. No chain
/// falls back.
Status launch_fp16_row_chains(const ChainArgs* errors, const ReverseArgs& reverse, const RowView& v,
                              float* scales, const Launch& launch);
/// Makes again the chains that the fp16 kernel could not finish, with bf16 factors.
Status launch_fallback_chains(const ChainArgs* errors, const ReverseArgs& reverse,
                              uint32_t* fallback, const Launch& launch);

}  // namespace kda::cuda::sm90
