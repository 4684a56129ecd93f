// SPDX-License-Identifier: Apache-2.0
// Stages of context parallelism. A segment maps its start state to its end state by
//   S_out = M S_in + B,   M = prod_t (I - beta_t k_t k_t^T) Diag(exp g_t) [K, K],   B [K, V]
// M is the final state of the same recurrence with v = 0 and S_in = I; B that with S_in = 0.
#pragma once

#include <span>

#include "stage/forward.hpp"

namespace kda::stage {

/// M and B of every segment. With `Qt`, also the outputs of the one-pass form:
///   o_t = o_zero_t + S_in^T qt_t,  qt_t = scale (M of the tokens up to t)^T q_t
/// On the CPU o_zero and Qt are fp32 buffers. On a GPU there is no o_zero: outputs from zero go to
/// o, and Qt is 16-bit with the strides of o. The first segment of a sequence runs from its initial
/// state there; M, B and states_in are those of the segments behind first ones, [NSEG - N, HV, K,
/// V].
struct SegmentScan {
  Call call;
  std::span<const Segment> segments;
  float* M = nullptr;       ///< [NSEG, HV, K, K]
  float* B = nullptr;       ///< [NSEG, HV, K, V]
  bool skip_last = false;   ///< leave out the last segment of each sequence: nothing follows it
  float* o_zero = nullptr;  ///< [B T, HV, V] outputs from S_in = 0
  void* Qt = nullptr;       ///< [B T, HV, K]
  /// [NSEG, HV] tokens for which Qt is set; past them |M|_F was small enough to drop M (2^-20 at
  /// most), which is only done where the norm provably never grows (docs/planning.md). Of the CPU:
  /// a GPU keeps its own where Plan::transitions_stop says so.
  int64_t* exit_token = nullptr;
};

/// states_in[first] = initial state of the sequence, states_in[n + 1] = M_n states_in[n] + B_n.
struct SegmentMerge {
  Call call;
  std::span<const Segment> segments;
  const float* M = nullptr;
  const float* B = nullptr;
  float* states_in = nullptr;  ///< [NSEG, HV, K, V]
  bool prepared = false;       ///< as in Forward
  bool behind_first = false;   ///< GPU, after a scan with outputs
};

/// o = o_zero + Qt states_in, and final state = M states_in + B of each last segment.
struct SegmentCorrect {
  Call call;
  std::span<const Segment> segments;
  const float* M = nullptr;
  const float* B = nullptr;
  const float* states_in = nullptr;
  const float* o_zero = nullptr;
  const void* Qt = nullptr;
  const int64_t* exit_token = nullptr;
};

/// May M be dropped once it is small? Only where its norm cannot grow again: |k| <= 1, decays in
/// [0, 1] and beta in [0, 2] by construction.
inline bool transition_norm_never_grows(const Problem& p) {
  return p.qk_l2norm && p.gate_mode != GateMode::kLog && p.beta_mode != BetaMode::kPlain;
}

}  // namespace kda::stage
