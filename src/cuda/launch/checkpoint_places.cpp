// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/checkpoint_places.hpp"
#include "core/text.hpp"
#include "cuda/launch/views.hpp"

namespace kda::cuda {

Status place_checkpoints(const stage::Call& call, int32_t* places) {
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, false, &maps));
  return launch_checkpoint_places(
      {maps.map, call.problem.checkpoint_every, call.problem.first_slot,
       call.tensors.checkpoint_offsets, call.tensors.checkpoint_indices, places},
      {call.stream});
}

}  // namespace kda::cuda
