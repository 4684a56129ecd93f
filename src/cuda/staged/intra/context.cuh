// SPDX-License-Identifier: Apache-2.0
// Knowledge of a thread of chunk_intra and recompute_w_u. The steps are functions of this context,
// a file a topic; chunk_intra.cu calls them in order.
#pragma once

#include <type_traits>

#include "cuda/ptx/ptx.cuh"
#include "cuda/staged/intra/shared.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::intra {

/// Elementwise work is a thread's own: one channel pair of one sub-chunk of 16 tokens, whose decays
/// it keeps. All factors are running products of decays: no difference of sums, one exponential a
/// token and channel. Indices are functions of the thread: in registers they made others spill.
template <class ElementT, int kChannels, class FactorT = ElementT,
          bool kWithU = std::is_same_v<ElementT, FactorT>>
struct IntraContext {
  using T = ElementT;  // of q, k and v, and of what scores are products of
  using F = FactorT;   // of the factors
  static constexpr int kK = kChannels;
  static constexpr bool kMakesU = kWithU;
  using S = Shared<T, kK, F>;
  static constexpr int kStride = S::kStride;
  static constexpr int kPairs = kK / 2;
  static constexpr int kThreads = kPairs * kSubchunks;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kVectors = kK / 8;  // 16-byte pieces of a row
  static constexpr int kSteps = kK / 16;   // k16 steps of an mma

  /// Pairs inside a sub-chunk are anchored at its start where 16 bits have fp32's range: rows start
  /// at kAnchor, and may decay to kLeast.
  static constexpr bool kAnchored = std::is_same_v<T, __nv_bfloat16>;
  static constexpr float kAnchor = kAnchored ? 0x1p48f : 1.0f, kLeast = 0x1p-96f;

  const HeadGates<ChunkIntraArgs>& a;
  S& s;
  const ChunkTokens& chunk;
  const int head;
  int tid;
  float2 decay[kSubchunk];              // of each token; 1 past the sequence
  uint32_t q[kSubchunk], k[kSubchunk];  // of each token, as they came; after keep_pairs()

  __device__ IntraContext(const HeadGates<ChunkIntraArgs>& args, S& shared,
                          const ChunkTokens& tokens, int value_head, int thread)
      : a(args), s(shared), chunk(tokens), head(value_head), tid(thread) {}

  __device__ int warp() const { return tid / 32; }
  __device__ int lane() const { return tid % 32; }
  __device__ int subchunk() const { return tid / kPairs; }     // of this thread's tokens
  __device__ int channel() const { return tid % kPairs * 2; }  // first of its pair
  /// Numbers that were computed from the thread's index are computed again, not kept in registers
  /// or spilled.
  __device__ void forget_index() { ptx::make_opaque(tid); }

  __device__ static int64_t tile() { return blockIdx.x; }  // chunk and head
  __device__ F* tile_of(void* base, int64_t elements) const {
    return static_cast<F*>(base) + tile() * elements;
  }
};

/// Rows of q, k or v in shared memory.
template <class C>
using RowsOf = typename C::T[C::kStride];

__device__ __forceinline__ void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }

}  // namespace kda::cuda::intra
