// SPDX-License-Identifier: Apache-2.0
// The chains of a backward of Gated DeltaNet, from the factors of its forward (gdn/factors.hpp).
// From left to right:
//   Z = v - row_k (k S);  E = Z + (T' - I) Z
//   S = exp(G_end) S + k^T (col_k E)
// From right to left:
//   X = col_k (k dS) + A^T d_o + diag d_o;  dZ = X + (T' - I)^T X
//   dS = exp(G_end) dS + q^T (row_q d_o) - k^T (row_k dZ)
// A holds the steps of its columns, and so do diag and col_k. dZ is dv.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::gdn {

/// K <= 128; bf16 rows of v and d_o, aligned to 16 bytes. `factors` of both are not used.
struct BackwardChainsArgs {
  Shape shape;
  /// From left to right: leaves S0^T in h and E in vn. Without h only its flags are written.
  cuda::ChainArgs errors;
  ReverseArgs reverse;
  const float* d_states = nullptr;  ///< [spans, HV, K, V]: dS behind segments, not reverse.d_final
  RowView v;
  Factors made;
  const int64_t* made_segments = nullptr;  ///< as in ChainArgs of the forward

  // A scan has these.
  float* D = nullptr;  ///< [spans, HV, K, V]: dS before a segment if that behind it is zero
  /// [spans, HV] out: whether nothing that is before a segment is left at its end, and nothing of
  /// dS behind it at its start (gdn/forgotten.cuh). Null: M is kept.
  int32_t *forgets_before = nullptr, *forgets_behind = nullptr;
};

/// Neither chain needs anything of the other: one launch has the blocks of both.
Status launch_backward_chains(const HeadGates<BackwardChainsArgs>& args, const Launch& launch);

/// Makes what merges of segments need: D of all but first segments, B of all but last ones, where
/// errors.h is given, and M of those whose M is read and not known to be small; zeros of the
/// others.
Status launch_backward_scan(const HeadGates<BackwardChainsArgs>& args, const Launch& launch);

}  // namespace kda::cuda::gdn
