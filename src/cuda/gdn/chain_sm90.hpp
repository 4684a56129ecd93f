// SPDX-License-Identifier: Apache-2.0
// The serial part of Gated DeltaNet's forward, chunk by chunk with the state in registers:
//   Z = v - row_k (k S);  E = Z + (T' - I) Z;  vn = beta E
//   o = row_q (q S) + A vn + diag vn;  S = exp(G_end) S + k^T (col_k vn)
// Raw q and k are the operands; all decays and norms are factors of tokens (gdn/factors.hpp).
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::gdn {

/// Sequences are whole: no segments, no states_in. The `factors` of ChainArgs are not used.
struct ChainArgs : cuda::ChainArgs {
  RowView q, k, v;  ///< bf16, rows aligned to 16 bytes
  Factors made;
};

/// Blocks of 64 columns of V, or of 128 where 64 would give more blocks than `num_sms`: the values
/// do not depend on it.
Status launch_chain(const HeadGates<ChainArgs>& args, int64_t num_sms, const Launch& launch);

}  // namespace kda::cuda::gdn
