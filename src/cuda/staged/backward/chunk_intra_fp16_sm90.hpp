// SPDX-License-Identifier: Apache-2.0
// Stage chunk_intra of a backward with fp16 factors on Hopper, for K above 64 and up to 128.
#pragma once

#include "cuda/staged/chunk_intra.hpp"

namespace kda::cuda::sm90 {

/// q and k are bf16 or fp16, the factors fp16, and scores products of operands of q's type. u is
/// not made: factors.u and v are not read. Needs normalised q and k, and beta of a sigmoid. A chunk
/// with a positive log gate gets a gamma of NaN.
Status launch_chunk_intra_fp16(const HeadGates<ChunkIntraArgs>& args, bool fp16_rows,
                               const Launch& launch);

/// Makes all factors in bf16, for chains that the fp16 kernel could not finish (chains_sm90.hpp).
Status launch_fallback_chunk_intra(const HeadGates<ChunkIntraArgs>& args, const uint32_t* fallback,
                                   const Launch& launch);

}  // namespace kda::cuda::sm90
