// SPDX-License-Identifier: Apache-2.0
// Products with the states, [16 channels, 64 tokens] a warp.
#pragma once

#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/pipeline.cuh"

namespace kda::cuda::grad {

__device__ __forceinline__ void multiply_tokens(const GradContext& c, const Operand& state,
                                                const Tile& tokens, int step, Tokens& acc) {
#pragma unroll
  for (int block = 0; block < kSubchunks; ++block) {
    Operand x;
    load_columns(c, tokens, block, step, x);
    multiply(acc + 2 * block, state, x);
  }
}

/// S0 d_o^T and S0 dZ^T.
__device__ __forceinline__ void multiply_state(const GradContext& c, const Tile (&tiles)[3],
                                               Tokens& queries, Tokens& keys) {
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    Operand state;
    load_transposed(c, tiles[0], step, state);
    multiply_tokens(c, state, tiles[1], step, queries);
    multiply_tokens(c, state, tiles[2], step, keys);
  }
}

/// dS E^T, and S0 dS^T of the warp's channels, whose diagonal is rowsum(S0 dS).
__device__ __forceinline__ void multiply_d_state(const GradContext& c, const Tile (&tiles)[3],
                                                 Tokens& columns, Part& both) {
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    Operand d_state, state;
    load_transposed(c, tiles[0], step, d_state);
    load_transposed(c, tiles[2], step, state);
    multiply_tokens(c, d_state, tiles[1], step, columns);
    multiply(both, state, {d_state[0], d_state[2], d_state[1], d_state[3]});
  }
}

/// The diagonal of a [16 channels, 16 channels] product, for this lane's channels.
template <class Context>
__device__ __forceinline__ float2 diagonal_of(const Context& c, const Part& x) {
  const int lane = c.g() * 4 + c.g() / 2;
  const auto from = [&](float even, float odd) {
    even = __shfl_sync(~0u, even, lane);
    odd = __shfl_sync(~0u, odd, lane);
    return c.g() % 2 ? odd : even;
  };
  return {from(x[0][0], x[0][1]), from(x[1][2], x[1][3])};
}

__device__ __forceinline__ void scale_all(float factor, Tokens& x) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] *= factor;
}

}  // namespace kda::cuda::grad
