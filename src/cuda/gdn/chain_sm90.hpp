// SPDX-License-Identifier: Apache-2.0
// The serial part of Gated DeltaNet, chunk by chunk with the state in registers:
//   Z = v - row_k (k S);  E = Z + (T' - I) Z
//   o = row_q (q S) + A E + diag E;  S = exp(G_end) S + k^T (col_k E)
// Raw q and k, as tiles, are the operands; all decays and norms are factors of tokens
// (gdn/factors.hpp).
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::gdn {

/// The `factors` of ChainArgs are not used.
struct ChainArgs : cuda::ChainArgs {
  RowView v;  ///< bf16, rows aligned to 16 bytes
  Factors made;
  /// Scan: where the gates of a segment's last chunks bound their M by kForgottenLog2, M is 0, and
  /// B comes from these chunks alone.
  bool may_forget = false;
  int32_t* forgotten = nullptr;  ///< scan: [spans, HV] whether M is 0 for that reason
  /// How many segments a kernel of the call has made; null: the plan has made all of them. With 0
  /// whole sequences run, else they do not.
  const int64_t* made_segments = nullptr;
};

/// kForward: blocks of 64 columns of V, or of 128 where 64 would give more blocks than `num_sms`:
/// the values do not depend on it.
Status launch_chain(const HeadGates<ChainArgs>& args, int64_t num_sms, const Launch& launch);

/// kScan: M and B of segments.
Status launch_scan(const HeadGates<ChainArgs>& args, const Launch& launch);

}  // namespace kda::cuda::gdn
