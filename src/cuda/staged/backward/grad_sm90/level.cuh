// SPDX-License-Identifier: Apache-2.0
// fp16 operands of the workspace come with a power of two for each 16 columns of V. Sums over V
// need one for all: that of the largest columns. So nothing overflows, and what small columns lose
// is small beside large ones.
#pragma once

#include "cuda/staged/backward/grad_sm90/context.cuh"

namespace kda::cuda::sm90::grad {

__device__ __forceinline__ void scale_piece(Tile& tile, int piece, uint32_t factor) {
  uint4& x = reinterpret_cast<uint4*>(tile)[piece];
  x = {ptx::mul_x2<__half>(x.x, factor), ptx::mul_x2<__half>(x.y, factor),
       ptx::mul_x2<__half>(x.z, factor), ptx::mul_x2<__half>(x.w, factor)};
}

/// Does all pieces of 16 bytes; block(tile, piece): of its columns of V.
template <class C, int kTiles, class Block>
__device__ __forceinline__ bool level_tiles(const C& c, OperandKind kind, Tile (&tiles)[kTiles],
                                            Block&& block) {
  const auto& scales = c.s.of_elements.scales[c.turn & 1];
  if (!scales.differ[kind]) return false;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Tile)) / 16 / kComputeThreads; ++i) {
      const int piece = c.tid + i * kComputeThreads;
      scale_piece(tiles[tile], piece, scales.level[kind][block(tile, piece)]);
    }
  return true;
}

/// After all operands are there.
template <class C>
__device__ __forceinline__ void level_operands(const C& c) {
  constexpr int kPieces = 8;  // of a row
  auto& s = c.s;
  const auto of_row = [](int tile, int piece) { return tile / kHalves * 4 + piece / 16 / kPieces; };
  const auto of_column = [](int tile, int piece) {
    return tile * 4 + ((piece ^ piece / kPieces) & (kPieces - 1)) / 2;
  };
  using States = Tile[kHalves * kHalves];
  bool changed = level_tiles(c, kOfState, reinterpret_cast<States&>(s.state), of_row);
  changed = level_tiles(c, kOfDState, reinterpret_cast<States&>(s.d_state), of_row) || changed;
  changed = level_tiles(c, kOfErrors, s.errors, of_column) || changed;
  changed = level_tiles(c, kOfDz, s.dz, of_column) || changed;
  if (changed) {  // known to all threads
    ptx::fence_async_proxy();
    c.sync();
  }
  ptx::mbarrier_arrive(s.of_elements.scaled);
}

}  // namespace kda::cuda::sm90::grad
