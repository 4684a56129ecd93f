// SPDX-License-Identifier: Apache-2.0
// Parts that the kernels of chunk_reverse share.
#pragma once

#include "cuda/chain/chain.cuh"
#include "cuda/staged/backward/reverse.hpp"

namespace kda::cuda::reverse {

/// Arguments of a kernel. The chain's state is dS: it begins with d_final as `initial` and ends as
/// d_initial, `final_state`. dh is its `h`, dZ its `vn`, dv its `o`.
struct KernelArgs {
  ChainArgs chain;
  RowView d_o;
  StateView initial;  // of the forward
};

inline KernelArgs kernel_args(const ReverseArgs& args) {
  KernelArgs given;
  given.chain.shape = args.shape;
  given.chain.map = args.map;
  given.chain.factors = args.factors;
  given.chain.o = args.dv;
  given.chain.initial = args.d_final;
  given.chain.final_state = args.d_initial;
  given.chain.h = args.dh;
  given.chain.vn = args.dz;
  given.d_o = args.d_o;
  given.initial = args.initial;
  return given;
}

/// d_initial. Without an initial state its gradient is zero.
template <class Chain>
__device__ __forceinline__ void store_gradient(Chain& c, const StateView& initial) {
  if (state_slot(initial, c.tokens.sequence) < 0)
#pragma unroll
    for (int n = 0; n < Chain::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c.state[n][i] = 0;
  c.store_end();
}

/// d_o^T of a chunk from shared memory: as A operands, and in fp32.
template <class T, class Chain, int kTokenTiles>
__device__ __forceinline__ void load_d_o(const Chain& c, const T* tile, uint32_t (&d_o)[4][4],
                                         float (&x)[kTokenTiles][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    ptx::ldmatrix_x4_trans(d_o[step], ptx::shared_address(c.u_piece(tile, step)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = ptx::unpack<T>(d_o[step][i]);
      x[2 * step + i / 2][i % 2 * 2] = pair.x;
      x[2 * step + i / 2][i % 2 * 2 + 1] = pair.y;
    }
  }
}

/// Copies d_o of a chunk and the columns [column, column + kColumns), which lie in one tile of V:
/// what a warp does, by cp.async. Zeros for tokens and columns that are not there.
template <int kColumns, class Chain, class Row>
__device__ __forceinline__ void copy_d_o(const Chain& c, const RowView& d_o, int chunk,
                                         int first_column, Row* target) {
  constexpr int kPieces = kColumns / 8, kRowStep = 32 / kPieces;
  const int row0 = c.lane / kPieces, column = first_column + c.lane % kPieces * 8;
  const int64_t token0 = c.tokens.begin + chunk * kChunk;
  const int count = static_cast<int>(min(static_cast<int64_t>(kChunk), c.tokens.end - token0));
  const bool inside = d_o.base && column < c.a.shape.V;
  const Row* source = static_cast<const Row*>(d_o.base) + column + row0 * d_o.stride_t +
                      row_offset(d_o, c.a.map, c.tokens.sequence, token0, c.head);
#pragma unroll
  for (int row = row0; row < kChunk; row += kRowStep, source += kRowStep * d_o.stride_t)
    ptx::cp_async<16>(ptx::shared_address(target + swizzled(row, column % kVTile / 8)), source,
                      inside && row < count);
}

}  // namespace kda::cuda::reverse
