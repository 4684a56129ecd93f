// SPDX-License-Identifier: Apache-2.0
// Products over V. They run while the warps do something else: begun here, waited for by the
// caller.
#pragma once

#include "cuda/staged/backward/grad/states.cuh"
#include "cuda/staged/backward/grad_sm90/context.cuh"

namespace kda::cuda::sm90::grad {

__device__ __forceinline__ uint64_t descriptor(const Tile& tile) {
  return ptx::tile_descriptor(ptx::shared_address(tile));
}

/// [64 tokens, 64 tokens] = rows E^T of the warpgroup, both from the half that its value head
/// begins with.
template <class C>
__device__ __forceinline__ void begin_pairs(const C& c, const Tile (&of_rows)[kHalves],
                                            Tokens& pairs) {
  const uint64_t rows = descriptor(of_rows[c.head()]);
  const uint64_t errors = descriptor(c.s.errors[c.head()]);
  ptx::wgmma_n64_shared<typename C::T, false, false>(pairs, rows, errors);
#pragma unroll
  for (int step = 1; step < C::kSteps; ++step)
    ptx::wgmma_n64_shared<typename C::T, false, true>(pairs, ptx::next_columns(rows, 16 * step),
                                                      ptx::next_columns(errors, 16 * step));
}

/// [64 channels of the warpgroup, 64 tokens] = state rows^T, the state by rows of V.
template <class C>
__device__ __forceinline__ void begin_state(const C& c, const State<C::kHeads>& state,
                                            const Tile (&rows)[kHalves], Tokens& acc) {
  const uint64_t a[kHalves] = {descriptor(state[0][c.group()]),
                               descriptor(state[kHalves / C::kHeads - 1][c.group()])};
  const uint64_t b = descriptor(rows[c.head()]);
  ptx::wgmma_n64_shared<typename C::T, true, false>(acc, a[0], b);
#pragma unroll
  for (int step = 1; step < C::kSteps; ++step)
    ptx::wgmma_n64_shared<typename C::T, true, true>(
        acc, ptx::next_rows(a[step / 4], step % 4 * 16), ptx::next_columns(b, 16 * step));
  ptx::wgmma_commit();
}

/// rowsum(S0 dS) of the warp's channels: the diagonal of a product of 16 x 16 channels.
template <class C>
__device__ __forceinline__ float2 multiply_states(const C& c) {
  float acc[2][4] = {};
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    Operand state, d_state;
    const auto load = [&](const State<C::kHeads>& tiles, Operand& x) {
      C::load(ptx::shared_address(tiles[step / 4]) + c.transposed, step % 4, x);
    };
    load(c.s.state, state), load(c.s.d_state, d_state);
    C::multiply(acc, state, {d_state[0], d_state[2], d_state[1], d_state[3]});
  }
  return cuda::grad::diagonal_of(c, acc);
}

}  // namespace kda::cuda::sm90::grad
