// SPDX-License-Identifier: Apache-2.0
// Tiles of 64 columns of V on their way to shared memory, two steps ahead of their products. A step
// has three tiles of one V tile; a pass has as many steps as there are V tiles:
//   pairs        E, d_o, dZ
//   and of each round of 64 channels
//   rows         S0, d_o, dZ
//   columns      dS, E, S0
#pragma once

#include "cuda/staged/backward/grad/context.cuh"

namespace kda::cuda::grad {

/// visit(row, piece, piece of 16 bytes in order) of those that this thread copies.
template <class Visit>
__device__ __forceinline__ void for_each_piece(const GradContext& c, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < 64 * 8 / kThreads; ++i) {
    const int at = c.tid + i * kThreads, row = at / 8;
    visit(row, (at ^ row) % 8, at);
  }
}

/// Columns of rows of a [.., size] tensor; zeros past the sequence and past `size`.
__device__ __forceinline__ void copy_rows(const GradContext& c, Tile& to, const RowView& view,
                                          int head, int column0, int size) {
  const auto* from = static_cast<const Element16*>(view.base) +
                     (view.base ? chunk_offset(view, c.chunk, head) + column0 : 0);
  for_each_piece(c, [&](int row, int piece, int at) {
    const bool there = view.base && row < c.chunk.count && column0 + piece * 8 < size;
    const void* source = there ? static_cast<const void*>(from + row * view.stride_t + piece * 8)
                               : static_cast<const void*>(c.a.h);
    ptx::cp_async<16>(ptx::shared_address(to + at * 8), source, there);
  });
}

/// A tile of E or dZ; zeros past the sequence and past V.
__device__ __forceinline__ void copy_values(const GradContext& c, Tile& to, const void* base,
                                            int v_tile) {
  const auto* from = static_cast<const Element16*>(base) +
                     (GradContext::tile() * c.v_tiles() + v_tile) * (64 * 64);
  for_each_piece(c, [&](int row, int piece, int at) {
    const bool there = row < c.chunk.count && v_tile * kVTile + piece * 8 < c.a.shape.V;
    ptx::cp_async<16>(ptx::shared_address(to + at * 8), from + at * 8, there);
  });
}

/// A round's channels of a tile of a state; zeros past V.
__device__ __forceinline__ void copy_state(const GradContext& c, Tile& to, const void* base,
                                           int v_tile, int round) {
  const auto* from =
      static_cast<const Element16*>(base) +
      ((GradContext::tile() * c.v_tiles() + v_tile) * c.rounds() + round) * (64 * 64);
  for_each_piece(c, [&](int row, int, int at) {
    ptx::cp_async<16>(ptx::shared_address(to + at * 8), from + at * 8,
                      v_tile * kVTile + row < c.a.shape.V);
  });
}

/// q and k of the round.
__device__ __forceinline__ void copy_channels(const GradContext& c) {
  copy_rows(c, c.s.q, c.a.q, c.q_head(), c.current_round * kChannels, c.a.shape.K);
  copy_rows(c, c.s.k, c.a.k, c.q_head(), c.current_round * kChannels, c.a.shape.K);
  ptx::cp_async_commit();
}

class Pipeline {
 public:
  __device__ explicit Pipeline(const GradContext& context) : c_(context) {
    start(0);
    start(1);
  }
  /// Runs multiply(tiles) on each step of the next pass.
  template <class Multiply>
  __device__ __forceinline__ void run_pass(Multiply&& multiply) {
#pragma unroll 1
    for (int i = 0; i < c_.v_tiles(); ++i, ++step_) {
      ptx::cp_async_wait<1>();
      __syncthreads();
      multiply(c_.s.stages[step_ % 2]);
      __syncthreads();
      start(step_ + 2);
    }
  }

 private:
  __device__ __forceinline__ void start(int step) {
    const int pass = step / c_.v_tiles(), v = step % c_.v_tiles(), round = (pass - 1) / 2;
    Tile(&to)[3] = c_.s.stages[step % 2];
    const ChunkGradArgs& a = c_.a;
    if (pass == 0 || (pass % 2 == 1 && round < c_.rounds())) {
      pass == 0 ? copy_values(c_, to[0], a.errors, v) : copy_state(c_, to[0], a.h, v, round);
      copy_rows(c_, to[1], a.d_o, c_.head, v * kVTile, a.shape.V);
      copy_values(c_, to[2], a.dz, v);
    } else if (round < c_.rounds()) {
      copy_state(c_, to[0], a.dh, v, round);
      copy_values(c_, to[1], a.errors, v);
      copy_state(c_, to[2], a.h, v, round);
    }
    ptx::cp_async_commit();
  }

  const GradContext& c_;
  int step_ = 0;
};

}  // namespace kda::cuda::grad
