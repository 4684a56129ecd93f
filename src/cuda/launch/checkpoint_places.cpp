// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/checkpoint_places.hpp"
#include "core/text.hpp"
#include "cuda/launch/views.hpp"

namespace kda::cuda {

Status place_checkpoints(const stage::Call& call, int32_t* places) {
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, false, &maps));
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  const StateView checkpoints =
      state_view(p, p.checkpoints, t.checkpoints, t.checkpoint_indices, nullptr);
  return launch_checkpoint_places(
      {maps.map, p.checkpoint_every, checkpoints, t.checkpoint_offsets, places}, {call.stream});
}

}  // namespace kda::cuda
