// SPDX-License-Identifier: Apache-2.0
// Stage chunk_intra of a backward with fp16 factors on Hopper, for K up to 128 and above 64.
#pragma once

#include "cuda/staged/chunk_intra.hpp"

namespace kda::cuda::sm90 {

/// q and k are bf16, the factors fp16, and scores as with bf16 factors. u is not made: factors.u
/// and v are not read. Norms and gates must bound the factors (has_half_chains()).
Status launch_chunk_intra_half(const ChunkIntraArgs& args, const Launch& launch);

}  // namespace kda::cuda::sm90
