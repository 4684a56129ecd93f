// SPDX-License-Identifier: Apache-2.0
// Stages chunk_delta_h and chunk_o: the serial part, chunk by chunk, with the state in registers.
//   E = u - w S;  vn = beta E;  o = qg S + Aqk vn + diag vn;  S = Diag(gamma) S + kg^T vn
// One kernel serves all uses of ChainUse but kReverse; staged/backward/chunk_delta_h_errors.hpp has
// kErrors. Chains (kForward, kScan, kErrors) are sources of their own: where Hopper's are built,
// they have no code for compute capability 9.0.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"

namespace kda::cuda {

/// Launches a chain, kForward or kScan. `fp16`: factors are fp16, else bf16. `narrow`: a block has
/// 32 columns of V instead of 64, for few heads.
Status launch_chunk_delta_h(const ChainArgs& args, ChainUse use, bool fp16, bool narrow,
                            const Launch& launch);

/// Launches stage chunk_delta_h (kStates), on every device.
Status launch_chunk_states(const ChainArgs& args, bool fp16, bool narrow, const Launch& launch);

/// Launches stage chunk_o (kOutputs), on every device.
Status launch_chunk_outputs(const ChainArgs& args, bool fp16, const Launch& launch);

}  // namespace kda::cuda
