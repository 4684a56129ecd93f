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

/// The pieces of 16 bytes of a tile that a thread copies: one of every 16th row, in the same place.
struct Pieces {
  static constexpr int kRows = kThreads / 8, kCount = 64 / kRows, kStep = kRows * 128;  // bytes
  int row, column;  // first row; elements
  uint32_t to;
  __device__ Pieces(const GradContext& c, const Tile& tile)
      : row(c.tid / 8), column((c.tid ^ row) % 8 * 8), to(ptx::shared_address(tile) + c.tid * 16) {}
  /// From a tile that lies as it is copied; zeros but for `rows`.
  __device__ __forceinline__ void copy_tile(const GradContext& c, const void* base, int64_t tile,
                                            int rows) const {
    const char* from =
        static_cast<const char*>(base) + tile * static_cast<int>(sizeof(Tile)) + c.tid * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      ptx::cp_async<16>(to + i * kStep, from + i * kStep, row + i * kRows < rows);
  }
};

/// Columns of rows of a [.., size] tensor; zeros past the sequence and past `size`, and without the
/// tensor.
__device__ __forceinline__ void copy_rows(const GradContext& c, Tile& to, const RowView& view,
                                          int head, int column0, int size) {
  const Pieces pieces(c, to);
  const int column = column0 + pieces.column;
  const int rows = view.base && column < size ? c.chunk.count : 0;
  const auto* base = static_cast<const Element16*>(view.base ? view.base : c.a.h);
  const auto* from =
      base +
      (rows > 0 ? chunk_offset(view, c.chunk, head) + pieces.row * view.stride_t + column : 0);
  const int64_t step = rows > 0 ? Pieces::kRows * view.stride_t : 0;
#pragma unroll
  for (int i = 0; i < Pieces::kCount; ++i, from += step)
    ptx::cp_async<16>(pieces.to + i * Pieces::kStep, from, pieces.row + i * Pieces::kRows < rows);
}

/// A tile of E or dZ; zeros past the sequence and past V.
__device__ __forceinline__ void copy_values(const GradContext& c, Tile& to, const void* base,
                                            int v_tile) {
  const Pieces pieces(c, to);
  pieces.copy_tile(c, base, c.tile() * c.v_tiles() + v_tile,
                   v_tile * kVTile + pieces.column < c.a.shape.V ? c.chunk.count : 0);
}

/// A round's channels of a tile of a state; zeros past V.
__device__ __forceinline__ void copy_state(const GradContext& c, Tile& to, const void* base,
                                           int v_tile, int round) {
  Pieces(c, to).copy_tile(c, base, (c.tile() * c.v_tiles() + v_tile) * c.rounds() + round,
                          c.a.shape.V - v_tile * kVTile);
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
    for (int i = 0; i < c_.v_tiles(); ++i, stage_ ^= 1) {
      ptx::cp_async_wait<1>();
      __syncthreads();
      multiply(c_.s.stages[stage_]);
      __syncthreads();
      start(stage_);
    }
  }

 private:
  /// Asks for the tiles of the next step that was not asked for.
  __device__ __forceinline__ void start(int stage) {
    const ChunkGradArgs& a = c_.a;
    const int round = (pass_ - 1) / 2;
    Tile(&to)[3] = c_.s.stages[stage];
    if (pass_ == 0 || (pass_ % 2 == 1 && round < c_.rounds())) {
      if (pass_ == 0)
        copy_values(c_, to[0], a.errors, v_tile_);
      else
        copy_state(c_, to[0], a.h, v_tile_, round);
      copy_rows(c_, to[1], a.d_o, c_.head, v_tile_ * kVTile, a.shape.V);
      copy_values(c_, to[2], a.dz, v_tile_);
    } else if (round < c_.rounds()) {
      copy_state(c_, to[0], a.dh, v_tile_, round);
      copy_values(c_, to[1], a.errors, v_tile_);
      copy_state(c_, to[2], a.h, v_tile_, round);
    }
    ptx::cp_async_commit();
    if (++v_tile_ == c_.v_tiles()) v_tile_ = 0, ++pass_;
  }

  const GradContext& c_;
  int stage_ = 0;
  int pass_ = 0, v_tile_ = 0;  // of the next step that is asked for
};

}  // namespace kda::cuda::grad
