// SPDX-License-Identifier: Apache-2.0
// Outputs of a chunk on Hopper: the warps of a chain leave them in shared memory, in 16 bits, where
// other warps take them to the caller's rows.
#pragma once

#include "cuda/chain/chain.cuh"
#include "cuda/chain/products_sm90.cuh"

namespace kda::cuda::chain {

/// o of this warp's columns in 16 bits, to its columns of a tile [64 tokens, 64], which it has
/// read.
template <class C, class T>
__device__ __forceinline__ void put_outputs(const C& c, const float (&o)[C::kTokenTiles][4],
                                            T* tile) {
  const bool bf16 = c.a.o.type == Element::kBFloat16;
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = o[2 * step + i / 2] + i % 2 * 2;
      pairs[i] = bf16 ? ptx::pack<__nv_bfloat16>(x[0], x[1]) : ptx::pack<__half>(x[0], x[1]);
    }
    ptx::stmatrix_x4_trans(ptx::shared_address(c.u_piece(tile, step)), pairs);
  }
}

/// Tiles of kGroups times 64 columns to the rows of their tokens, by kThreads threads: each has one
/// piece of a row in every kThreads / 8.
template <int kThreads, class C, class T, int kGroups>
__device__ void store_tiles(const C& c, int chunk, const T (&tiles)[kGroups][kChunk * kVTile],
                            int thread) {
  constexpr int kStep = kThreads / 8, kRows = (kChunk + kStep - 1) / kStep, kAtOnce = kRows / 2;
  const int64_t token0 = c.tokens.begin + chunk * kChunk, stride = c.a.o.stride_t;
  const auto count = static_cast<int>(min(static_cast<int64_t>(kChunk), c.tokens.end - token0));
  const int row0 = thread / 8 % kStep, piece = thread % 8;
  uint16_t* base = static_cast<uint16_t*>(c.a.o.base) +
                   row_offset(c.a.o, c.a.map, c.tokens.sequence, token0, c.head) + row0 * stride;
#pragma unroll 1  // two warps have few registers for addresses
  for (int group = 0; group < kGroups; ++group) {
    const int v = (c.u_tile + group) * kVTile + piece * 8;
    uint16_t* to = base + v;
#pragma unroll 1
    for (int first = row0; first < kChunk; first += kAtOnce * kStep) {
      uint4 pieces[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        pieces[n] = *reinterpret_cast<const uint4*>(
            tiles[group] + swizzled(min(first + n * kStep, kChunk - 1), piece));
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n, to += kStep * stride)
        if (first + n * kStep < count) store_piece(to, pieces[n], c.a.shape.V - v);
    }
  }
}

}  // namespace kda::cuda::chain
