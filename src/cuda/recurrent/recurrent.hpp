// SPDX-License-Identifier: Apache-2.0
// The recurrence token by token in fp32 (math: docs/operation.md), for every problem: all types, K
// and V up to 256, segments. One state tile a block, in registers from first to last token.
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

struct RecurrentArgs {
  Shape shape;
  SequenceMap map;
  RowView q, k, v, g, beta, o;
  GateView gate;
  StateView initial, final_state, checkpoints;
  int64_t checkpoint_every = 0;
  StateView states_in;  ///< slot: span; instead of `initial`

  StateView M;  ///< scan, slot: span; end states from v = 0, S = I; no outputs
  StateView B;  ///< scan: end states from S = 0
  bool skip_last = false;

  int32_t* flags = nullptr;       ///< MetadataFlag bits, or null
  bool accumulate_flags = false;  ///< an earlier kernel of this call has set the word
};

Status launch_recurrent(const RecurrentArgs& args, const Launch& launch);

}  // namespace kda::cuda
