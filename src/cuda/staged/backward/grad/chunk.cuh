// SPDX-License-Identifier: Apache-2.0
// All gradients of a chunk and a value head, 64 channels at a time, by the threads of a block.
#pragma once

#include "cuda/staged/backward/grad/context.cuh"
#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/outputs.cuh"
#include "cuda/staged/backward/grad/pairs.cuh"
#include "cuda/staged/backward/grad/pipeline.cuh"
#include "cuda/staged/backward/grad/states.cuh"
#include "cuda/staged/backward/grad/sums.cuh"
#include "cuda/staged/backward/grad/tokens.cuh"

namespace kda::cuda::grad {

/// Products of all pairs of tokens, for all channels.
__device__ __forceinline__ void run_pairs(const GradContext& c, Pipeline& pipeline) {
  Pairs pairs;
  pipeline.run_pass([&](const Tile(&tiles)[3]) { multiply_pairs(c, tiles, pairs); });
  store_pairs(c, pairs);
}

/// All gradients of 64 channels.
__device__ __forceinline__ void run_round(const GradContext& c, Pipeline& pipeline) {
  RawGates gates;  // on their way
  load_gates(c, gates);
  Tokens queries = {}, keys = {}, dG;
  pipeline.run_pass([&](const Tile(&tiles)[3]) { multiply_state(c, tiles, queries, keys); });
  ptx::cp_async_wait<1>();  // q and k
  __syncthreads();
  Decays decays;
  find_decays(c, gates, decays);
  scale_all(1 / kAnchor, queries);
  scale_all(-1 / kAnchor, keys);
  Operand ends[kSubchunks];
  add_rows(c, decays, queries, keys, dG, ends);

  Tokens columns = {};
  Part both = {};
  pipeline.run_pass([&](const Tile(&tiles)[3]) { multiply_d_state(c, tiles, columns, both); });
  scale_all(kAnchor, columns);
  float2 boundary = boundary_of_columns(decays, ends, columns);
  const float2 states = diagonal_of(c, both);
  const auto over_chunk = [&](int half) {
    return decays.total[0][half] * decays.total[1][half] * decays.total[2][half] *
           decays.total[3][half];
  };
  boundary.x = fmaf(over_chunk(0), states.x, boundary.x);
  boundary.y = fmaf(over_chunk(1), states.y, boundary.y);
  add_boundary(c, boundary, dG);
  add_columns(c, decays, ends, keys, columns, dG);
  store_log_decays(c, decays, dG);
}

/// To the rows of its tokens.
__device__ __forceinline__ void run_chunk(GradContext& c) {
  copy_channels(c);
  Pipeline pipeline(c);
  prefetch_gates(c);
  find_norms(c);
  __syncthreads();
  load_betas(c);
  look_for_small(c);
  run_pairs(c, pipeline);
  __syncthreads();
#pragma unroll 1
  for (c.current_round = 0; c.current_round < c.rounds(); ++c.current_round) {
    if (c.current_round > 0) copy_channels(c);
    run_round(c, pipeline);
    __syncthreads();  // q and k give way to those of the next round
  }
  ptx::cp_async_wait<0>();
  store_betas(c);
}

}  // namespace kda::cuda::grad
