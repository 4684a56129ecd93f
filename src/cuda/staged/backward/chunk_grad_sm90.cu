// SPDX-License-Identifier: Apache-2.0
// Chunk gradients with wgmma: a block takes one chunk and value head after the other, all value
// heads of a q/k head before the next one. Two warpgroups multiply, all channels at once; warps
// beside them load the next chunk and store the one before. This source has gates in tiles.
#include "cuda/staged/backward/grad_sm90/kernel.cuh"

namespace kda::cuda::sm90 {

Status launch_grad_tiles(const grad::Args& args, int64_t num_sms, const Launch& where) {
  return launch<GradGates::kTiles>(args, num_sms, where);
}

Status launch_chunk_grad(const HeadGates<FinishedGradArgs>& args, GradGates gates, int64_t num_sms,
                         const Launch& where) {
  HeadGates<FinishedGradArgs> mine = args;
  mine.tiles = static_cast<unsigned>(args.num_chunks * args.shape.HV);
  mine.pairs = Divisor((args.shape.HV + 1) / 2);
  mine.pair_tasks = static_cast<unsigned>(args.num_chunks) * mine.pairs.value;
  if (args.scales) return launch_grad_fp16(mine, num_sms, where);
  switch (gates) {
    case GradGates::kTiles: return launch_grad_tiles(mine, num_sms, where);
    case GradGates::kRows: return launch_grad_rows(mine, num_sms, where);
    case GradGates::kHead: return launch_grad_head(mine, num_sms, where);
  }
  return {};
}

}  // namespace kda::cuda::sm90
