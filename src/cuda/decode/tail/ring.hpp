// SPDX-License-Identifier: Apache-2.0
// Decode with a ring (TailDesc::ring): rows of normalised keys, of log decays and of v_new, which
// are folded behind the token that fills the ring. A block has one head of one sequence.
#pragma once

#include "cuda/decode/tail/tail.hpp"

namespace kda::cuda::tail {

/// The tensors of rows, `rows` and `positions` of TailArgs are set; each sequence has one token.
struct RingArgs : TailArgs {
  const int32_t* flush = nullptr;  ///< [N], or null
};

Status launch_ring_decode(const RingArgs& args, const Launch& launch);

}  // namespace kda::cuda::tail
