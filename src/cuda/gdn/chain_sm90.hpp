// SPDX-License-Identifier: Apache-2.0
// The serial part of Gated DeltaNet, chunk by chunk with the state in registers:
//   Z = v - row_k (k S);  E = Z + (T' - I) Z
//   o = row_q (q S) + A E + diag E;  S = exp(G_end) S + k^T (col_k E)
// Raw q and k, as tiles, are the operands; all decays and norms are factors of tokens
// (gdn/factors.hpp).
#pragma once

#include "core/host_device.hpp"
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
  /// How many segments a kernel of the call has made (device_cut.hpp); null: the plan has made all
  /// of them. Places of segments hold whole sequences where it is 0.
  const int64_t* made_segments = nullptr;
  const int64_t* made_followed = nullptr;  ///< those that have one behind them, which a scan has
  const float* made_states_in = nullptr;   ///< in place of states_in, of segments that are made
  int64_t num_sms = 0;
};

/// Whether blocks of so many spans have 128 columns: two warpgroups on an SM share all operands but
/// v, which is worth it where one for each is too many.
KDA_HOST_DEVICE constexpr bool is_wide(int64_t spans, int64_t value_heads, int64_t V,
                                       int64_t num_sms) {
  return V % 128 == 0 && spans * value_heads * (V / 64) > num_sms;
}

/// Where a kernel makes the segments: whether each width has a launch. One of the two ends at once.
constexpr bool has_both_widths(int64_t num_sequences, int64_t places, int64_t value_heads,
                               int64_t V, int64_t num_sms) {
  return !is_wide(num_sequences, value_heads, V, num_sms) &&
         is_wide(places, value_heads, V, num_sms);
}

/// kForward: blocks of 64 columns of V, or of 128 where 64 would give more blocks than `num_sms`:
/// the values do not depend on it.
Status launch_chain(const HeadGates<ChainArgs>& args, const Launch& launch);

/// kScan: M and B of segments.
Status launch_scan(const HeadGates<ChainArgs>& args, const Launch& launch);

}  // namespace kda::cuda::gdn
