// SPDX-License-Identifier: Apache-2.0
#include "cuda/recurrent/backward/head_gates.hpp"
#include "cuda/recurrent/backward/launch.cuh"

namespace kda::cuda::head_gates {

Status launch_backward(const HeadGates<BackwardArgs>& args, const Launch& where) {
  if (args.shape.K <= 64) return backward::launch<64, 64>(args, where);
  if (args.shape.K <= 128) return backward::launch<128, 64>(args, where);
  return backward::launch<256, 32>(args, where);
}

}  // namespace kda::cuda::head_gates
