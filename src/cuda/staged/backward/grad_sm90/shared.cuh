// SPDX-License-Identifier: Apache-2.0
// Shared memory of chunk_grad on Hopper, and who waits for whom.
//
// Warps 0 to 7 compute, two warps load and two store, each over all chunks of the block. Operands
// have one place each, but for gates and numbers, which have two; a place is given back as soon as
// all threads that compute have read it.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/grad/context.cuh"

namespace kda::cuda::sm90::grad {

using cuda::grad::Element16;
using cuda::grad::Tile;
using Args = HeadGates<FinishedGradArgs>;

constexpr int kK = 128;               // channels, and columns of V, that a block has at once
constexpr int kHalves = kK / 64;      // tiles of 64 of them
constexpr int kComputeThreads = 256;  // threads that compute: two warpgroups
constexpr int kComputeWarps = kComputeThreads / 32;
constexpr int kCopiers = 64;  // threads that load, and as many that store
constexpr int kThreads = kComputeThreads + 2 * kCopiers;
/// Registers of a thread: two warpgroups that compute and one that copies share 3 x 168.
constexpr int kComputeRegisters = 224, kCopierRegisters = 56;
/// Numbers of tokens are read in pairs: a place is aligned as a pair has to be.
constexpr int kPairBytes = 2 * sizeof(float);
constexpr unsigned kComputeBarrier = 1;  // the second warpgroup of a pair has the next one

/// Value heads that a block has at once.
enum class Heads {
  kOne,      // a value head, K = V = 128
  kGrouped,  // the same; all value heads of a q/k head in turn
  kPair,     // two value heads, K = V = 64: each half and each warpgroup is one, alone
};
template <Heads kHeads>
inline constexpr int kCountOf = kHeads == Heads::kPair ? 2 : 1;

/// Numbers for gates that are in no tile, from the warps that load.
template <int kHeads, GradGates kGates>
struct GateNumbers {};
template <int kHeads>
struct GateNumbers<kHeads, GradGates::kRows> {
  int64_t g_first[kHeads], dg_first[kHeads];  // elements before the rows of the chunk
  int rows[kHeads];                           // of tokens; none without the value head
};
template <int kHeads>
struct GateNumbers<kHeads, GradGates::kHead> {
  alignas(kPairBytes) float gate[kHeads][kChunk];  // raw; 0 past the sequence
};

/// Numbers of a chunk, one for each token, channel or value head, from the warps that load.
template <int kHeads, GradGates kGates>
struct Numbers : GateNumbers<kHeads, kGates> {
  float beta[kHeads][kChunk];
  float dbeta[kHeads][kChunk];  // gradient by the raw beta for dZ . E = 1
  float bias[kK];
  float rate[kHeads];
  int count;                                  // of tokens
  unsigned has_small[kHeads][kCopiers / 32];  // plain betas near 0
};

/// Factors of tokens, from the warps that compute. Without the norm |q| and |k| stand for 1.
struct alignas(kPairBytes) Factors {
  float q_row[kChunk];        // scale / |q|
  float minus_k_row[kChunk];  // -1 / |k|
  float column[kChunk];       // beta / |k|
  // Factors for products with the states, beside decays that are held times kAnchor.
  float q_state[kChunk], minus_k_state[kChunk], column_state[kChunk];
  float q_along[kChunk], k_along[kChunk];  // 1 / |q|^2 and 1 / |k|^2; 0 without the norm
};

/// Sums of a chunk for parameters.
struct Sums {
  float ddt_bias[kK], dA_log[kComputeWarps];
};

/// S0^T or dS^T: tiles of V, then of K.
template <int kHeads>
using State = Tile[kHalves / kHeads][kHalves];

/// fp16 operands are times powers of two, one for each 16 columns of V.
enum OperandKind { kOfState, kOfErrors, kOfDState, kOfDz };
static_assert(kOfDz + 1 == kOperandKinds && kK / 16 == kScaledColumns);

/// By elements of the operands. Pairs, [later, earlier]: in the other's 16 bits, or in tf32.
template <class T>
struct ElementParts {
  using PairTile = Tile;
};
template <>
struct ElementParts<__half> {
  using PairTile = float[kChunk * kChunk];  // rows of 64, swizzled (wide_swizzle())
  struct Scales {
    float back[kOperandKinds];  // what takes operands of one power of two back
    // Factors that take 16 columns to that one, as pairs of fp16.
    uint32_t level[kOperandKinds][kScaledColumns];
    bool differ[kOperandKinds];  // whether any is not 1
  } scales[2];                   // of a turn, from the warps that load
  ptx::Mbarrier scaled;          // operands have one power of two
};

/// Shared memory that gates need, beside numbers.
template <GradGates kGates>
struct GatePlaces;
template <>
struct GatePlaces<GradGates::kTiles> {
  Tile of_turn[2][kHalves];  // dg takes their place
};
template <>
struct alignas(1024) GatePlaces<GradGates::kRows> {};  // none; tiles behind it stay aligned
template <>
struct alignas(1024) GatePlaces<GradGates::kHead> {
  float dg[kChunk][kComputeWarps + 1];  // sums over channels, by warp
};

/// Halves are those of a value head or two value heads.
template <int kOfBlock, GradGates kOf, class ElementT>
struct alignas(1024) Shared {
  static constexpr int kHeads = kOfBlock;
  static constexpr GradGates kGates = kOf;
  using T = ElementT;  // of q, k, d_o and of the tiles of the workspace
  static constexpr bool kWide = std::is_same_v<T, __half>;
  Tile d_o[kHalves], errors[kHalves], dz[kHalves];  // tiles of V
  State<kHeads> state, d_state;
  Tile q[kHalves], k[kHalves];  // tiles of K
  GatePlaces<kGates> gates;
  typename ElementParts<T>::PairTile pairs[kHeads][2];  // by d_o, by dZ: [later, earlier]
  Tile out[kHalves];                                    // dq, then dk
  float shares[2][kChunk][kComputeWarps + 1];           // of q . dq and k . dk, by warp
  alignas(kPairBytes) float along_q[kHeads][kChunk];    // their sums, / |q|^2
  alignas(kPairBytes) float along_k[kHeads][kChunk];    // and / |k|^2
  alignas(kPairBytes) float own_pair[kHeads][kChunk];   // of a token with itself
  float products[kHeads][kChunk];                       // dZ . E
  Numbers<kHeads, kGates> numbers[2];
  Factors factors[kHeads];
  Sums sums;
  unsigned out_of_range[2][kComputeWarps];
  [[no_unique_address]] ElementParts<T> of_elements;
  // Full: by the warps that load.
  ptx::Mbarrier numbers_full;  // also where rows of gates lie
  ptx::Mbarrier values_full;   // gates, d_o, E, dZ, S0, dS
  ptx::Mbarrier rows_full;     // q, k
  // Empty: by the warps that compute; state_empty also by those that store, which read dZ.
  ptx::Mbarrier d_o_empty, d_state_empty, state_empty, q_empty, k_empty;
  ptx::Mbarrier out_full, out_empty;            // dq, dk
  ptx::Mbarrier gates_done[2], gates_empty[2];  // dg is there; it is stored
};
template <Heads kHeads, GradGates kGates, class T>
using SharedOf = Shared<kCountOf<kHeads>, kGates, T>;

/// Called by one thread. Every other thread arrives for itself: racecheck does not follow
/// __syncwarp() to one that arrives.
template <class S>
__device__ __forceinline__ void init_barriers(S& s) {
  ptx::mbarrier_init(s.numbers_full, kCopiers);
  ptx::mbarrier_init(s.values_full, kCopiers + 1);
  ptx::mbarrier_init(s.rows_full, kCopiers);
  for (ptx::Mbarrier* empty : {&s.d_o_empty, &s.d_state_empty, &s.q_empty, &s.k_empty})
    ptx::mbarrier_init(*empty, kComputeThreads);
  ptx::mbarrier_init(s.state_empty, kComputeThreads + kCopiers);
  ptx::mbarrier_init(s.out_full, kComputeThreads);
  ptx::mbarrier_init(s.out_empty, kCopiers);
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(s.gates_done[i], kComputeThreads);
    ptx::mbarrier_init(s.gates_empty[i], kCopiers);
  }
  if constexpr (S::kWide) ptx::mbarrier_init(s.of_elements.scaled, kComputeThreads);
  ptx::mbarrier_init_fence();
}

/// Waits of a consumer (the first is over when something came) and of a producer (the first is over
/// at once) in turn 0, 1, ..
__device__ __forceinline__ void wait_full(ptx::Mbarrier& barrier, int turn) {
  ptx::mbarrier_wait(barrier, turn & 1);
}
__device__ __forceinline__ void wait_empty(ptx::Mbarrier& barrier, int turn) {
  ptx::mbarrier_wait(barrier, (turn & 1) ^ 1);
}

/// Chunks and value heads, or pairs of value heads; all of them, and those that exist, which come
/// first.
template <Heads kHeads>
__device__ __forceinline__ unsigned all_tasks(const Args& a) {
  return kHeads == Heads::kPair ? a.pair_tasks : a.tiles;
}
template <Heads kHeads>
__device__ __forceinline__ unsigned existing_tasks(const Args& a) {
  const unsigned all = all_tasks<kHeads>(a);
  if (!a.map.cu_seqlens) return all;
  const int64_t chunks = a.map.chunk_offsets[a.map.num_sequences];
  const int64_t of_each = kHeads == Heads::kPair ? a.pairs.value : a.shape.HV;
  return static_cast<unsigned>(min(chunks * of_each, static_cast<int64_t>(all)));
}

/// The tile of a task. Tiled value heads of a q/k head are no neighbours, but their tasks are.
template <Heads kHeads, GradGates kGates>
__device__ __forceinline__ unsigned tile_of(const Args& a, unsigned task) {
  if (kHeads != Heads::kGrouped || kGates == GradGates::kTiles || !a.tiled) return task;
  const unsigned head = a.shape.heads.remainder(task);
  return task - head + a.shape.group.quotient(head) +
         a.shape.group.remainder(head) * static_cast<unsigned>(a.shape.H);
}

/// Tasks that a block takes, in order.
template <Heads kHeads>
struct Turns {
  unsigned task, member = 0;  // member: of the value heads of a q/k head
  int count = 0;              // of turns before

  __device__ explicit Turns(const Args& a)
      : task(kHeads == Heads::kGrouped ? blockIdx.x * a.shape.group.value : blockIdx.x) {}
  __device__ bool has_earlier() const { return kHeads == Heads::kGrouped && member > 0; }
  __device__ bool has_later(const Args& a) const {
    return kHeads == Heads::kGrouped && member + 1 < a.shape.group.value;
  }
  __device__ void advance(const Args& a) {
    ++count;
    if constexpr (kHeads == Heads::kGrouped) {
      ++task, ++member;
      if (member == a.shape.group.value) member = 0, task += (gridDim.x - 1) * a.shape.group.value;
    } else {
      task += gridDim.x;
    }
  }
};

}  // namespace kda::cuda::sm90::grad
