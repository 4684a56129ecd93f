// SPDX-License-Identifier: Apache-2.0
// Stage "segment_scan". A segment maps its start state to its end state by
//   S_out = M S_in + B,   M = prod_t (I - beta_t k_t k_t^T) Diag(exp g_t) [K, K],   B [K, V]
// M is the final state of the same recurrence with v = 0 and S_in = I; B that with S_in = 0.
// With `Qt` also the outputs of the one-pass form:
//   o_t = o_zero_t + S_in^T qt_t,  qt_t = scale (M of the tokens up to t)^T q_t
#pragma once

#include <span>

#include "stage/call.hpp"

namespace kda::stage {

/// Which segments M, B and states_in hold, one after the other.
enum class SegmentRows {
  kAll,  ///< NSEG: every segment
  /// NSEG - N: those behind the first segment of their sequence. A first segment runs from its
  /// initial state and needs none of the three.
  kBehindFirst,
};

struct SegmentScan {
  Call call;
  std::span<const Segment> segments;
  float* M = nullptr;      ///< [rows, HV, K, K]
  float* B = nullptr;      ///< [rows, HV, K, V]
  bool skip_last = false;  ///< leave out the last segment of each sequence: nothing follows it
  SegmentRows rows = SegmentRows::kAll;
  /// [B T, HV, V] fp32: outputs from S_in = 0. Null in a one-pass scan: they go to o.
  float* o_zero = nullptr;
  /// [B T, HV, K], in a type of the backend's. Null: no one-pass form.
  void* Qt = nullptr;
  /// [NSEG, HV] tokens for which Qt is set. Past them |M|_F was small enough to drop M (2^-20 at
  /// most), which is only done where the norm provably never grows (docs/algorithm.md). Null: M is
  /// kept to the end, or the backend keeps its own where Plan::early_exit says so.
  int64_t* exit_token = nullptr;
};

/// Are decays in [0, 1] whatever the raw gates?
constexpr bool never_amplifies(GateMode mode) {
  switch (mode) {
    case GateMode::kLog: return false;
    case GateMode::kSoftplus:
    case GateMode::kBounded: return true;
  }
  return false;
}

/// May M be dropped once it is small? Only where its norm cannot grow again: |k| <= 1, decays in
/// [0, 1] and beta in [0, 2] by construction.
inline bool transition_norm_never_grows(const Problem& p) {
  return p.qk_l2norm && never_amplifies(p.gate_mode) && p.beta_mode != BetaMode::kPlain;
}

}  // namespace kda::stage
