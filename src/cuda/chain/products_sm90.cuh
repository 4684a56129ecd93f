// SPDX-License-Identifier: Apache-2.0
// Products of chains by wgmma: a warpgroup has 64 columns of V as rows. They are begun here; who
// calls commits and waits.
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

}  // namespace kda::cuda::chain
