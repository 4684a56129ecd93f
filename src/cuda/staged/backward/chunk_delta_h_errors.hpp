// SPDX-License-Identifier: Apache-2.0
// Stage chunk_delta_h of a backward: the states before chunks and the errors of their tokens.
//   E = u - w S;  S = Diag(gamma) S + kg^T beta E
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"

namespace kda::cuda {

/// ChainUse::kErrors, with factors in bf16. `narrow`: a block has 32 columns of V instead of 64,
/// for few heads.
Status launch_chunk_delta_h_errors(const ChainArgs& args, bool narrow, const Launch& launch);

}  // namespace kda::cuda
