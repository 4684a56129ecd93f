// SPDX-License-Identifier: Apache-2.0
// Products that chains of a warpgroup share, which has 64 columns of V as rows: products by wgmma,
// which are begun here (who calls commits and waits), and stores of rows.
#pragma once

#include "cuda/ptx/ptx.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::chain {

template <class T>
__device__ __forceinline__ uint64_t tile_at(const T* tile) {
  return ptx::tile_descriptor(ptx::shared_address(tile));
}

/// acc [V, tokens] = or += x [V, columns] rows^T, rows [64 tokens, columns].
template <bool kAdd, class T, int kSteps>
__device__ __forceinline__ void multiply_rows(const uint32_t (&x)[kSteps][4], const T* rows,
                                              float (&acc)[kChunk / 8][4]) {
  const uint64_t tile = tile_at(rows);
  ptx::wgmma_n64_k_major<T, kAdd>(acc, x[0], tile);
#pragma unroll
  for (int step = 1; step < kSteps; ++step)
    ptx::wgmma_n64_k_major<T, true>(acc, x[step], ptx::next_columns(tile, step * 16));
}

/// acc [V, columns] += x [V, tokens] rows for each x in turn, rows [64 tokens, columns].
template <class T, int kTiles, class... X>
__device__ __forceinline__ void multiply_tokens(float (&acc)[kTiles][4], const T* rows,
                                                const X&... x) {
  const uint64_t tile = tile_at(rows);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step)
    (ptx::wgmma_mn_major<T>(acc, x[step], ptx::next_rows(tile, step * 16)), ...);
}

/// 8 columns of a row, of which `count` exist, by the widest stores that fit.
template <class Count>
__device__ __forceinline__ void store_piece(uint16_t* to, uint4 piece, Count count) {
  if (count >= 8 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = piece;
    return;
  }
  const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (2 * i < count) reinterpret_cast<uint32_t*>(to)[i] = pairs[i];
}

}  // namespace kda::cuda::chain
