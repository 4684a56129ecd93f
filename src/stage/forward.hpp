// SPDX-License-Identifier: Apache-2.0
// Stage "forward": outputs, checkpoints and final states of every sequence or segment.
//   S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T,  o_t = scale S_t^T q_t
#pragma once

#include <span>

#include "stage/call.hpp"

namespace kda::stage {

struct Forward {
  Call call;
  std::span<const Segment> segments;  ///< empty: one span a sequence
  const float* states_in = nullptr;   ///< [NSEG, HV, K, V] fp32; null: the problem's initial state
  /// The scan of the same run() has left what this stage needs in the workspace.
  bool prepared = false;
  /// Where the states for a backward go (stage/backward.hpp); null: nowhere.
  float* kept_every_states = nullptr;
  int64_t kept_every = 0;
};

}  // namespace kda::stage
