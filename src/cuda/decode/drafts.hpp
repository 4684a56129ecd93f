// SPDX-License-Identifier: Apache-2.0
// Decode of drafts whose states go to a buffer of their own, or that are a tree: the kernel of
// src/cuda/decode with other arguments, in a folder of its own, so that the others keep their
// machine code. A state leaves the registers after each token in any case; a token whose parent is
// not the one before it reads that parent's back, which is still in the L2.
#pragma once

#include "cuda/decode/decode.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda {
namespace drafts {

struct DraftArgs : HeadGates<DecodeArgs> {
  const int32_t* parents = nullptr;  ///< [N, index_columns]; null: each token follows the last one
};

Status launch_decode(const DraftArgs& args, const Launch& launch);

}  // namespace drafts

/// Their kernel serves a gate a channel too, which pays for no step.
template <>
inline constexpr bool kReadsHeadBias<drafts::DraftArgs> = false;

}  // namespace kda::cuda
