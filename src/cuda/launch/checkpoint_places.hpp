// SPDX-License-Identifier: Apache-2.0
// Kernels of a forward take a slot every so many tokens. Where a sequence has one checkpoint, at an
// offset that the device knows, this makes them: all others name no slot.
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::stage {
struct Call;
}

namespace kda::cuda {

struct CheckpointPlacesArgs {
  SequenceMap map;
  int64_t every = 16;
  StateView checkpoints;             ///< with an index a sequence
  const int32_t* offsets = nullptr;  ///< [N]
  int32_t* places = nullptr;  ///< out: those of all sequences; beyond every buffer for a bad offset
};

/// A block a sequence.
Status launch_checkpoint_places(const CheckpointPlacesArgs& args, const Launch& launch);

/// ForwardRow::place_checkpoints of all rows.
Status place_checkpoints(const stage::Call& call, int32_t* places);

}  // namespace kda::cuda
