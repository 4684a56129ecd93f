// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/backward.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "cuda/backward/chunk_grad.cuh"
#include "cuda/backward/gradients.cuh"
#include "cuda/backward/reverse.cuh"
#include "cuda/backward/states.cuh"
#include "cuda/launch/launch.cuh"

namespace kda::cuda {
namespace {

using namespace backward;

template <int kK, int kBV>
Status launch(BackwardArgs args, const Launch& where) {
  static_assert(backward_tile(kK).rows == kK && backward_tile(kK).columns == kBV);
  static_assert(sizeof(ReverseShared<kK, kBV>) <= kMostShared);
  static_assert(chunk_grad_bytes<kK, kBV>(kBackwardTiles * 32 / kBV) <= kMostShared);
  const int64_t chains = args.map.num_sequences * args.shape.HV * args.sizes.tiles;
  const auto run = [&](const char* name, auto kernel, int64_t blocks, std::size_t shared) {
    Status status =
        launch_kernel(name, kernel, blocks, kThreads, static_cast<int>(shared), where, args);
    args.flags = nullptr;  // the first launch has set them
    return status;
  };
  const auto states = [&](const char* name) {
    return run(name, backward_states_kernel<kK, kBV>, chains, sizeof(StatesShared<kK, kBV>));
  };
  if (args.sizes.windows > 1) {
    args.starts_only = true;
    KDA_RETURN_IF_ERROR(states("backward_starts"));
    args.starts_only = false;
  }
  for (args.index = args.sizes.windows - 1; args.index >= 0; --args.index) {
    KDA_RETURN_IF_ERROR(states("backward_states"));
    KDA_RETURN_IF_ERROR(run("backward_reverse", backward_reverse_kernel<kK, kBV>, chains,
                            sizeof(ReverseShared<kK, kBV>)));
    const int64_t low = args.index * args.sizes.window;
    const int64_t tokens = std::min(args.sizes.window, args.num_tokens - low);
    KDA_RETURN_IF_ERROR(run("backward_chunk_grad", backward_chunk_grad_kernel<kK, kBV>,
                            (tokens + kTokens - 1) / kTokens * args.shape.HV,
                            chunk_grad_bytes<kK, kBV>(args.sizes.tiles)));
    KDA_RETURN_IF_ERROR(run("backward_gradients", backward_gradients_kernel<kK>,
                            pieces_of(tokens) * args.shape.H, sizeof(GradientsShared<kK>)));
  }
  if (!args.sums) return {};
  return run("backward_parameters", backward_parameters_kernel, parameter_blocks(args), 0);
}

}  // namespace

Status launch_backward(const BackwardArgs& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64, 64>(args, where);
  if (args.shape.K <= 128) return launch<128, 64>(args, where);
  return launch<256, 32>(args, where);
}

Status launch_parameters(const BackwardArgs& args, const Launch& where) {
  return launch_kernel("backward_parameters", backward_parameters_kernel, parameter_blocks(args),
                       kThreads, 0, where, args);
}

}  // namespace kda::cuda
