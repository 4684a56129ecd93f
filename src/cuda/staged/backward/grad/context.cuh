// SPDX-License-Identifier: Apache-2.0
// Knowledge of a thread of chunk_grad. The steps are functions of this context, a file a topic;
// chunk_grad.cu calls them in order.
//
// Accumulators are [channels, tokens]: a warp has 16 channels and all 64 tokens, a lane the
// channels g and g + 8 and of every 8 tokens 2 t and 2 t + 1. So sums over tokens stay in a warp,
// and a rounded accumulator is an A operand as it stands.
#pragma once

#include "cuda/ptx/ptx.cuh"
#include "cuda/staged/backward/grad/shared.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/swizzle.hpp"

namespace kda::cuda::grad {

using Element16 = __nv_bfloat16;

/// [tile of 8 tokens][channel g: token 2 t, 2 t + 1; channel g + 8: the same].
using Tokens = float[kTokenTiles][4];
/// 16 tokens of it, in fp32 and as an A operand.
using Part = float[2][4];
using Operand = uint32_t[4];

struct GradContext {
  const ChunkGradArgs& a;
  Shared& s;
  const ChunkTokens& chunk;
  const int head;
  const int gate_step;  // as of HeadGates
  const bool tiled;
  mutable int tid;
  int current_round = 0;

  __device__ GradContext(const ChunkGradArgs& args, Shared& shared, const ChunkTokens& tokens,
                         unsigned chunk_and_head, int thread, int step = 1,
                         bool tiled_heads = false)
      : a(args),
        s(shared),
        chunk(tokens),
        head(static_cast<int>(args.shape.heads.remainder(chunk_and_head))),
        gate_step(step),
        tiled(tiled_heads),
        tid(thread),
        tile_(chunk_and_head),
        warp_(__shfl_sync(~0u, thread / 32, 0)) {}

  /// Numbers that were computed from the thread's index are computed again, not kept in registers
  /// or spilled.
  __device__ void forget_index() const { ptx::make_opaque(tid); }
  __device__ int warp() const { return warp_; }  // known to be the same in its lanes
  __device__ int lane() const { return tid & 31; }
  __device__ int g() const { return lane() / 4; }
  __device__ int t() const { return lane() % 4; }
  __device__ int rounds() const { return a.shape.K > kChannels ? 2 : 1; }
  __device__ int padded_K() const { return rounds() * kChannels; }
  __device__ int v_tiles() const { return (a.shape.V + kVTile - 1) / kVTile; }
  __device__ int q_head() const {
    const auto value_head = static_cast<unsigned>(head);
    return static_cast<int>(tiled ? value_head % static_cast<unsigned>(a.shape.H)
                                  : a.shape.group.quotient(value_head));
  }
  /// This lane's channel g, of all.
  __device__ int channel() const { return current_round * kChannels + warp() * 16 + g(); }
  __device__ int64_t tile() const { return tile_; }  // chunk and head

 private:
  const unsigned tile_;
  const int warp_;
};

// ---- operands from shared memory

/// Address of a tile's 16 x 16 elements from row 16 `block` and column 16 `step` on, for this
/// lane's row and piece of them. Of the address all but the step's two bits are the lane's or
/// known.
__device__ __forceinline__ uint32_t part_of(const Tile& tile, int row, int piece, int block,
                                            int step) {
  return ptx::shared_address(tile) + 2 * ((swizzled(row, piece) ^ step * 16) + block * 16 * 64);
}

/// Rows [16 block, + 16) and the warp's 16 columns of a tile, transposed: pairs of rows. As an A
/// operand its rows are the columns; pairs of tokens lie as Part has them.
__device__ __forceinline__ void load_transposed(const GradContext& c, const Tile& tile, int block,
                                                Operand& x) {
  const int row = c.lane() % 8 + c.lane() / 16 * 8;
  ptx::ldmatrix_x4_trans(x, part_of(tile, row, c.warp() * 2 + c.lane() / 8 % 2, block, 0));
}
/// Rows [16 block, + 16) and columns [16 step, + 16): an A operand.
__device__ __forceinline__ void load_rows(const GradContext& c, const Tile& tile, int block,
                                          int step, Operand& x) {
  ptx::ldmatrix_x4(x, part_of(tile, c.lane() % 16, c.lane() / 16, block, step));
}
/// Loads B operands of two n8 tiles, which the rows are: x[0], x[1] and x[2], x[3].
__device__ __forceinline__ void load_columns(const GradContext& c, const Tile& tile, int block,
                                             int step, Operand& x) {
  const int row = c.lane() % 8 + c.lane() / 16 * 8;
  ptx::ldmatrix_x4(x, part_of(tile, row, c.lane() / 8 % 2, block, step));
}
/// Loads B operands with rows [16 block, + 16) to be summed over, and n8 tiles of the columns.
__device__ __forceinline__ void load_columns_transposed(const GradContext& c, const Tile& tile,
                                                        int block, int step, Operand& x) {
  ptx::ldmatrix_x4_trans(x, part_of(tile, c.lane() % 16, c.lane() / 16, block, step));
}

/// acc += x y for two n8 tiles.
__device__ __forceinline__ void multiply(float (*acc)[4], const Operand& x, const Operand& y) {
  ptx::mma_16816<Element16>(acc[0], x, y[0], y[1]);
  ptx::mma_16816<Element16>(acc[1], x, y[2], y[3]);
}

// ---- elements of a Part

/// f(n, i) for the elements [n][i] of a Part.
template <class F>
__device__ __forceinline__ void for_each(F&& f) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) f(n, i);
}
template <class T = Element16>
__device__ __forceinline__ float element(const Operand& x, int n, int i) {
  const float2 pair = ptx::unpack<T>(x[2 * n + i / 2]);
  return i % 2 ? pair.y : pair.x;
}
/// The operand of numbers x(n, i).
template <class T = Element16, class Number>
__device__ __forceinline__ void to_operand(Operand& out, Number&& x) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2) out[2 * n + i / 2] = ptx::pack<T>(x(n, i), x(n, i + 1));
}
/// x times factors, rounded once.
template <class T = Element16, class Factor>
__device__ __forceinline__ void scale_operand(const Operand& x, Operand& out, Factor&& factor) {
  to_operand<T>(out, [&](int n, int i) { return element<T>(x, n, i) * factor(n, i); });
}

/// Numbers of this lane's tokens of a tile.
__device__ __forceinline__ float2 of_tokens(const GradContext& c, const float (&numbers)[kChunk],
                                            int n) {
  return *reinterpret_cast<const float2*>(&numbers[8 * n + 2 * c.t()]);
}
/// Decays the tiles of a sub-chunk.
struct TokenPair {
  float2 tile[2];
  __device__ TokenPair(const GradContext& c, const float (&numbers)[kChunk], int subchunk)
      : tile{of_tokens(c, numbers, 2 * subchunk), of_tokens(c, numbers, 2 * subchunk + 1)} {}
  __device__ float at(int n, int i) const { return i % 2 ? tile[n].y : tile[n].x; }
};

}  // namespace kda::cuda::grad
