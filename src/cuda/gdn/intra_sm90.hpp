// SPDX-License-Identifier: Apache-2.0
// Factors of all chunks of Gated DeltaNet, from the raw inputs: what of a chunk needs no state.
// q k^T and k k^T are made once for all value heads of a q/k head. Exact for every gate (sums of
// gates are integers and fractions), and row i depends on nothing after token i.
#pragma once

#include "cuda/gdn/factors.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::gdn {

/// Gates are one a head. K <= 128; rows of q and k in bf16, aligned to 16 bytes, g and beta of any
/// type, dt_bias one a head.
struct IntraArgs : ChunkIntraArgs {
  Divisor q_heads;  ///< H
  Factors made;
  /// The next launch may begin with the last blocks of this one; what was launched before this one
  /// is done then.
  bool early = false;
};

/// And numbers for a backward, whose tiles of q and k have 128 columns whatever K is.
struct BackwardIntraArgs : HeadGates<IntraArgs> {
  BackwardNumbers* numbers = nullptr;  ///< [tiles]
};

Status launch_intra(const HeadGates<IntraArgs>& args, const Launch& launch);
Status launch_intra(const BackwardIntraArgs& args, const Launch& launch);

}  // namespace kda::cuda::gdn
