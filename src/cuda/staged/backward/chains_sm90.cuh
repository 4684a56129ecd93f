// SPDX-License-Identifier: Apache-2.0
// Parts that chains of a backward on Hopper share, whatever their factors are: a block has 64
// columns of V of one head and one direction. One warpgroup has the state in its accumulators and
// does all products of a chunk. Of the other one a warp copies the operands of the next chunks into
// a ring of stages, and three warps write results, which the chain leaves in the stage of their
// chunk.
#pragma once

#include "cuda/chain/products_sm90.cuh"
#include "cuda/chain/ring_sm90.cuh"
#include "cuda/staged/backward/reverse_chain.cuh"

namespace kda::cuda::sm90::chains {

using T = __nv_bfloat16;  // of the caller's rows and of what is handed on, but for fp16 rows

constexpr int kColumns = 64;        // of V, of a block
constexpr int kChainThreads = 128;  // the first ones
constexpr int kStorers = 96;        // the last ones
constexpr int kThreads = kChainThreads + 32 + kStorers;
constexpr int kStages = 3;

/// visit(where it goes, where it lies, bytes) for a factor of a chunk.
template <class C, class Target, class Visit>
__device__ __forceinline__ void visit_factor(const C& c, int chunk, Target& target,
                                             const void* source, Visit&& visit) {
  visit(&target, static_cast<const char*>(source) + c.tile(chunk) * sizeof(target),
        static_cast<int>(sizeof(target)));
}

/// Tile of this block and of a chunk, of kRows rows of V or tokens, of 16 bits.
template <int kElements, class C>
__device__ __forceinline__ T* tile_of(const C& c, void* tiles, int chunk) {
  return static_cast<T*>(tiles) + (c.tile(chunk) * c.v_tiles() + c.u_tile) * kElements;
}

/// The state as A operands to a tile [64 columns of V, kK].
template <class C, class Row>
__device__ __forceinline__ void put_state(const C& c, const uint32_t (&rounded)[C::kSteps][4],
                                          Row* tile) {
  const int row = c.tile_column + c.lane % 16;
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step)
    ptx::stmatrix_x4(ptx::shared_address(tile + swizzled(row, step * 2 + c.lane / 16)),
                     rounded[step]);
}

/// x^T as A operands to this warp's columns of a tile [64 tokens, 64], which it has read.
template <class C, class Row>
__device__ __forceinline__ void put_tokens(const C& c, const uint32_t (&x)[4][4], Row* tile) {
  __syncwarp();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    ptx::stmatrix_x4_trans(ptx::shared_address(c.u_piece(tile, step)), x[step]);
}

/// `factor` times the state in pairs, as A operands.
template <class Row = T, class C>
__device__ __forceinline__ void round_state(const C& c, uint32_t (&rounded)[C::kSteps][4],
                                            float factor = 1) {
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = c.state[2 * step + i / 2] + i % 2 * 2;
      rounded[step][i] = ptx::pack<Row>(factor * pair[0], factor * pair[1]);
    }
}

/// Rows of dv from a tile of dZ, by the warps that store.
template <class C, class Row>
__device__ __forceinline__ void store_values(const C& c, int chunk, const Row* dz, int thread) {
  const int64_t token0 = c.tokens.begin + chunk * kChunk;
  uint16_t* base = static_cast<uint16_t*>(c.a.o.base) +
                   row_offset(c.a.o, c.a.map, c.tokens.sequence, token0, c.head);
  const auto count = static_cast<int>(min(static_cast<int64_t>(kChunk), c.tokens.end - token0));
#pragma unroll 2
  for (int i = thread; i < kChunk * 8; i += kStorers) {
    const int token = i / 8, v = c.u_tile * kVTile + i % 8 * 8;
    const auto piece = *reinterpret_cast<const uint4*>(dz + swizzled(token, i % 8));
    if (token < count)
      chain::store_piece(base + token * c.a.o.stride_t + v, piece, c.a.shape.V - v);
  }
}

template <class Direction>
using Ring = chain::Ring<typename Direction::Stage, kStages>;

template <class Direction>
struct Pipeline {
  Direction d;
  Ring<Direction>& ring;

  template <class Args>
  __device__ Pipeline(const Args& args, Ring<Direction>& shared) : d(args), ring(shared) {}

  __device__ void init_barriers() const {
    ring.init_barriers(Direction::kRows ? 33 : 1, kChainThreads, kStorers);
  }

  /// A warp.
  __device__ void run_copies() const {
    for (int turn = 0; turn < d.c.num_chunks; ++turn) {
      const int i = turn % kStages, round = turn / kStages, chunk = d.chunk_at(turn);
      ring.wait_until_free(i, round);
      auto& s = ring.stages[i];
      if (d.c.lane == 0) ring.copy(i, [&](auto&& visit) { d.for_each_factor(chunk, s, visit); });
      if constexpr (Direction::kRows) {
        d.copy_rows(chunk, s);
        ring.arrive_after_copies(i);
      }
    }
  }

  __device__ void run_stores(int thread) const {
    for (int turn = 0; turn < d.c.num_chunks; ++turn) {
      const int chunk = d.chunk_at(turn);
      const auto& s = ring.stage(turn);
      ring.wait_for_results(turn);
      if (thread == 0) d.begin_stores(chunk, s);
      d.store_rows(chunk, s, thread);
      if (thread == 0) ptx::cp_async_bulk_wait_read();
      ptx::fence_async_proxy();  // what was read here goes before the next copies
      ring.is_read(turn);
    }
  }

  __device__ void wait_for_operands(int turn) const {
    if (turn < d.c.num_chunks) ring.wait_for_operands(turn);
  }

  __device__ void run_chain() {
    d.c.load_start();
    wait_for_operands(0);
    for (int turn = 0; turn < d.c.num_chunks; ++turn) {
      d.run_chunk(d.chunk_at(turn), ring.stage(turn));  // products may pend
      ptx::fence_async_proxy();                         // results go by bulk copies
      ring.results_are_there(turn);
      wait_for_operands(turn + 1);
      ptx::wgmma_wait<0>();
      ptx::fence_operands(d.c.state);
      ring.is_read(turn);
    }
    d.finish();
  }
};

/// The warps of a block that has something to do.
template <class Direction>
__device__ __forceinline__ void run_warps(Pipeline<Direction>& pipeline, int warp) {
  if (threadIdx.x == 0) pipeline.init_barriers();
  __syncthreads();
  if (warp < kChainThreads / 32)
    pipeline.run_chain();
  else if (warp == kChainThreads / 32)
    pipeline.run_copies();
  else
    pipeline.run_stores(static_cast<int>(threadIdx.x) - (kThreads - kStorers));
}

}  // namespace kda::cuda::sm90::chains
