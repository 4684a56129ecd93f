// SPDX-License-Identifier: Apache-2.0
// Memory that a forward keeps for its backward: of every chunk of 64 tokens the state before it,
// and the errors E of its tokens, in bf16, as the staged backward's chunk_grad reads them (the
// tiles that staged/backward/chains_sm90.cu makes otherwise).
//
// A consumer warp has its state and E in registers, as accumulators lie: rows of V, 4 bytes a lane.
// Shared memory is full. So both go 512 bytes at a time through the place of this warp's own v,
// which is in registers by then, and o is not there yet: stmatrix turns them, and each lane takes
// 16 bytes back. A store of the warp then writes 16 whole sectors.
#pragma once

#include "cuda/fused/state_scale.cuh"

namespace kda::cuda::sm90::fused {

/// A consumer that keeps them.
template <int kChannels, class InputT, class OperandType>
struct ChunkKeepingContext : ConsumerContext<kChannels, InputT, OperandType, false> {
  static constexpr bool kKeeps = true;
  static constexpr int kStateBytes = kVTile * kChannels * 2, kErrorBytes = kChunk * kVTile * 2;
  static constexpr int kSubchunkBytes = kSubchunk * kVTile * 2;

  char* kept_state;   // the next chunk's tile, this block's
  char* kept_errors;  // this lane's piece of the next sub-chunk; a chunk too early before a chunk
  int chunk_tiles;    // tiles from a chunk to the next one
  int turn;           // sub-chunks of the item that are done

  __device__ explicit ChunkKeepingContext(const KeepArgs& args)
      : ConsumerContext<kChannels, InputT, OperandType, false>(args) {}
  __device__ bool begins_chunk() const {  // a vote: branches stay uniform
    return __any_sync(0xffffffff, turn % (kChunk / kSubchunk) == 0);
  }
};

/// Where this lane's piece of a sub-chunk is behind the start of its tile: as piece_of().
template <class C>
__device__ uint32_t piece_offset(const C& c) {
  return piece_of(c, 0);
}

/// Points the context at an item, which begins with a chunk.
template <class C>
__device__ void begin_kept(C& c) {
  const auto& a = static_cast<const KeepArgs&>(c.a);
  const int64_t first = c.head / a.group_heads * a.group_heads;
  const int64_t heads = min(a.group_heads, a.shape.HV - first);
  const int64_t place =
      first * a.num_chunks + first_chunk(a.map, c.tokens) * heads + c.head - first;
  const int64_t tile = place * C::kBlocks + c.column / kVTile;
  c.chunk_tiles = static_cast<int>(heads) * C::kBlocks;
  c.kept_state = static_cast<char*>(a.h) + tile * C::kStateBytes;
  c.kept_errors =
      static_cast<char*>(a.vn) + piece_offset(c) + (tile + 1 - c.chunk_tiles) * C::kErrorBytes;
  c.turn = 0;
}

/// Turns 16 x 16 numbers in pairs at `piece`, this lane's: it gets 8 of a row. kTransposed: rows
/// are tokens, else columns of V.
template <bool kTransposed>
__device__ __forceinline__ float4 exchange(uint32_t piece, const uint32_t (&pairs)[4]) {
  __syncwarp();  // all have read what was there
  if constexpr (kTransposed)
    ptx::stmatrix_x4_trans(piece, pairs);
  else
    ptx::stmatrix_x4(piece, pairs);
  __syncwarp();
  return ptx::ld_shared_v4(piece);
}
/// Pairs of numbers as they are without the state's scale.
template <class C>
__device__ __forceinline__ void take_scale_back(const C& c, uint32_t (&pairs)[4]) {
  if constexpr (kFp16<typename C::Operand>)
#pragma unroll
    for (uint32_t& pair : pairs)
      pair = ptx::mul_x2<__nv_bfloat16>(pair,
                                        static_cast<uint32_t>(127 - c.scale.exponent) * 0x800080);
}
/// Keeps the state before a chunk. `piece`: of the chunk's first sub-chunk.
template <class C>
__device__ __forceinline__ void keep_state(C& c, uint32_t piece) {
  const int row = c.lane % 16, column = c.lane / 16;
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    uint32_t pairs[4];
    chain::round_pairs<__nv_bfloat16>(c.state[2 * step], c.state[2 * step + 1], pairs);
    take_scale_back(c, pairs);
    *reinterpret_cast<float4*>(c.kept_state +
                               2 * swizzled_from(c.tile_column, 2 * step, row, column)) =
        exchange<false>(piece, pairs);
  }
  c.kept_state += static_cast<int64_t>(c.chunk_tiles) * C::kStateBytes;
  c.kept_errors += static_cast<int64_t>(c.chunk_tiles - 1) * C::kErrorBytes;
}
/// The errors of a sub-chunk, as put_outputs() has outputs, in pairs.
template <class C>
__device__ __forceinline__ void round_kept(const C& c, const float (&error)[2][4],
                                           uint32_t (&pairs)[4]) {
  chain::round_pairs<__nv_bfloat16>(error[0], error[1], pairs);
  take_scale_back(c, pairs);
}
template <class C>
__device__ __forceinline__ void keep_errors(C& c, uint32_t piece, const uint32_t (&pairs)[4]) {
  *reinterpret_cast<float4*>(c.kept_errors) = exchange<true>(piece, pairs);
  __syncwarp();  // o takes the place
  c.kept_errors += C::kSubchunkBytes;
  ++c.turn;
}
/// Keeps the errors of the sub-chunk before this one once more.
template <class C>
__device__ void keep_errors_again(C& c, uint32_t piece, const float (&error)[2][4]) {
  uint32_t pairs[4];
  round_kept(c, error, pairs);
  c.kept_errors -= C::kSubchunkBytes;
  --c.turn;
  keep_errors(c, piece, pairs);
}
/// Errors of tokens that a last chunk does not have are zeros.
template <class C>
__device__ void end_kept(C& c) {
  for (; c.turn % (kChunk / kSubchunk) != 0; ++c.turn, c.kept_errors += C::kSubchunkBytes)
    *reinterpret_cast<float4*>(c.kept_errors) = {};
}

}  // namespace kda::cuda::sm90::fused
