// SPDX-License-Identifier: Apache-2.0
// The launches of backward.cu and, with other arguments, of head_gates.cu.
#pragma once

#include "cuda/launch/launch.cuh"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/recurrent/backward/chunk_grad.cuh"
#include "cuda/recurrent/backward/gradients.cuh"
#include "cuda/recurrent/backward/reverse.cuh"
#include "cuda/recurrent/backward/states.cuh"

namespace kda::cuda::backward {

/// All launches of a backward pass whose blocks have kK channels and kBV columns.
template <int kK, int kBV, class Args>
Status launch(Args args, const Launch& where) {
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
    return run(name, backward_states_kernel<kK, kBV, Args>, chains, sizeof(StatesShared<kK, kBV>));
  };
  if (args.sizes.windows > 1) {
    args.starts_only = true;
    KDA_RETURN_IF_ERROR(states("backward_starts"));
    args.starts_only = false;
  }
  for (args.index = args.sizes.windows - 1; args.index >= 0; --args.index) {
    KDA_RETURN_IF_ERROR(states("backward_states"));
    KDA_RETURN_IF_ERROR(run("backward_reverse", backward_reverse_kernel<kK, kBV, Args>, chains,
                            sizeof(ReverseShared<kK, kBV>)));
    const int64_t low = args.index * args.sizes.window;
    const int64_t tokens = min(args.sizes.window, args.num_tokens - low);
    KDA_RETURN_IF_ERROR(run("backward_chunk_grad", backward_chunk_grad_kernel<kK, kBV, Args>,
                            (tokens + kTokens - 1) / kTokens * args.shape.HV,
                            chunk_grad_bytes<kK, kBV>(args.sizes.tiles)));
    KDA_RETURN_IF_ERROR(run("backward_gradients", backward_gradients_kernel<kK, Args>,
                            pieces_of(tokens) * args.shape.H, sizeof(GradientsShared<kK>)));
  }
  return args.sums ? launch_parameters(args, where) : Status{};
}

}  // namespace kda::cuda::backward
