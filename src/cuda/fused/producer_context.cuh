// SPDX-License-Identifier: Apache-2.0
// Knowledge of a producer thread. The steps of its work are functions of this context, a file a
// topic: global_io.cuh, decay.cuh, norms.cuh, anchored_scores.cuh, dyadic_scores.cuh, inverse.cuh.
// producer.cuh calls them in order.
//
// A function that needs no more than constants and types of the context takes it as a template
// argument. As a parameter that is not used it changed how the compiler groups addresses elsewhere,
// and cost a register.
#pragma once

#include <type_traits>

#include "cuda/fused/scheduler.cuh"
#include "cuda/fused/shared_storage.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::sm90::fused {

/// A pair of a thread's channels of each token, as two elements of 16 bits.
using Pairs = uint32_t[kSubchunk];

/// A group is one warp where K is 64 and two where it is 128. In every turn of
/// kGroups sub-chunks it has as many as the cluster has blocks: it makes the factors of one of them
/// for both blocks (the group of the same number in the other block makes those of the other one),
/// and moves v and o of both for its own block. Items have a multiple of that many sub-chunks; the
/// last may be empty.
template <class StorageType, GateMode kMode, bool kUnits>
struct ProducerContext {
  static_assert(kMode <= GateMode::kBounded, "a new gate mode needs anchors and decays of its own");
  using Storage = StorageType;
  static constexpr int kK = Storage::kK;
  using Operand = typename Storage::Operand;
  using E = typename Storage::E;
  using T = InputOf<E>;
  using Gate = typename GateOf<E>::Value;
  static constexpr bool kOneAHead = GateOf<E>::kOneAHead, kAnyGate = std::is_same_v<E, AnyGate>;
  static constexpr GateMode kGateMode = kMode;
  static constexpr bool kSegments = kUnits;
  static constexpr int kBlocks = Storage::Form::kBlocks, kColumnTiles = Storage::Form::kColumnTiles;
  static constexpr bool kHopper = Storage::Form::kHopper;
  static constexpr int kWarps = kGroupWarps<kK>;
  /// Rows that a warp and a group copy at once, 16 bytes a lane.
  static constexpr int kWarpRows = 4, kGroupRows = kWarps * kWarpRows;
  /// Sets of 8 tokens whose norms a warp computes.
  static constexpr int kEights = kSubchunk / 8 / kWarps;
  static constexpr unsigned kLastWarp = (kWarps - 1) * 32;  // its first thread

  static constexpr float kAnchor = fused::kAnchor<Operand>, kLeast = fused::kLeast<Operand>,
                         kScoreAnchor = fused::kScoreAnchor<Operand, kGateMode>,
                         kLogAnchor = fused::kLogScoreAnchor<Operand, kGateMode>;
  /// All scores come from dyadic levels. Rows of the anchored form span more powers of two than
  /// fp16 has (with inputs in bf16 they are bf16). And with softplus gates a group of one warp
  /// would have both forms to make.
  static constexpr bool kDyadicOnly =
      std::is_same_v<T, __half> || (kK == 64 && kFp16<Operand> && kGateMode == GateMode::kSoftplus);
  /// Some heads are made that way: those whose gates take some channel half through the range in a
  /// sub-chunk, at raw gates of 0. Most of their sub-chunks would leave it.
  static constexpr bool kDyadicOnlyHeads =
      kFp16<Operand> && kGateMode == GateMode::kSoftplus && !kDyadicOnly;

  const FusedPrefillArgs& a;
  Storage& storage;
  ProducerStorage<kK, Operand, E>& own;
  const int rank, group;  // rank of the block in the cluster; number of the group in the block
  int left;               // tokens of the item from the next sub-chunks of this group on
  /// Outputs of earlier sub-chunks that are still in this group's stages: tokens of their item from
  /// the first of them on (what `left` was); 0: there are none.
  int pending = 0;
  unsigned thread;  // of the group; unsigned, so that divisions of it are shifts
  /// Where this lane's pieces of the next sub-chunk lie. Pointers walk from sub-chunk to sub-chunk:
  /// offsets from indices cost more than the copies.
  char *q, *k, *g, *v, *o, *beta;
  /// Where the outputs of the item begin, until those of the item before have left.
  char* next_o;
  /// Bias and rate of the gates, with the constants of their formulas (decay.cuh).
  float2 bias;
  float rate, bound;
  int parity = 0;  // of the next phase of this group's barriers: its stages are used in turn

  __device__ ProducerContext(const FusedPrefillArgs& args, Storage& shared, int block, int which,
                             unsigned index)
      : a(args),
        storage(shared),
        own(shared.producer(which)),
        rank(block),
        group(which),
        thread(index) {}

  /// Number of the first stage of this group, and of the one whose factors it makes.
  __device__ int first() const { return group * kBlocks; }
  __device__ int mine() const { return first() + rank; }
  __device__ int lane() const { return static_cast<int>(thread % 32); }
  __device__ int warp() const { return kWarps == 1 ? 0 : static_cast<int>(thread / 32); }
  __device__ bool is_first() const { return kWarps == 1 || warp() == 0; }
  __device__ bool is_last() const { return kWarps == 1 || warp() == 1; }
  /// Calls what the first and the last warp of a group do at the same time; one warp alone does
  /// both.
  template <class First, class Last>
  __device__ __forceinline__ void on_each_warp(First&& first_does, Last&& last_does) const {
    if constexpr (kWarps == 1)
      first_does(), last_does();
    else if (warp() == 0)
      first_does();
    else
      last_does();
  }
  /// The first of this thread's two channels.
  __device__ unsigned channel() const { return thread * 2; }
  /// This lane's piece among the 8 pieces of 16 bytes in 128 bytes of a row.
  __device__ int column() const { return static_cast<int>(thread % 8); }
  /// The token whose norms this lane computes, if has_norms().
  __device__ int norm_row(int eight) const { return (warp() + eight) * 8 + lane() / 4; }
  /// The lane that holds the diagonal of its token's products, one of four.
  __device__ bool has_norms() const { return lane() % 4 == lane() / 8; }

  /// Barrier of a group's warps: an even number a sub-chunk, of parity 0, 1, 0, ... (Racecheck
  /// follows mbarriers; of named barriers of 64 threads it reported accesses on both sides as
  /// races.)
  template <int kParity>
  __device__ void sync() const {
    sync_begin();
    sync_end<kParity>();
  }
  __device__ void sync_begin() const {
    if constexpr (kWarps == 1)
      __syncwarp();
    else
      ptx::mbarrier_arrive(own.rows_ready);
  }
  template <int kParity>
  __device__ void sync_end() const {
    if constexpr (kWarps > 1) ptx::mbarrier_wait(own.rows_ready, kParity);
  }
  /// Numbers that were computed from the thread's index are computed again, not kept in registers
  /// or spilled.
  __device__ void forget_index() { ptx::make_opaque(thread); }
};

/// x *= y, by element.
__device__ __forceinline__ void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }
__device__ __forceinline__ float2 product(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }

/// This thread's channels in row 0 of a swizzled tile of kRows rows, as an address in shared
/// memory.
template <int kRows, class P, class Item>
__device__ uint32_t swizzled_channels(const P& p, const Item* tile) {
  return ptx::shared_address(tile + p.channel() / 64 * kRows * 64 + p.channel() % 64);
}
/// Stores a pair of row i there. Rows are known to the compiler: one XOR and an offset each.
__device__ __forceinline__ void put_swizzled(uint32_t place, int i, uint32_t pair) {
  ptx::st_shared((place ^ i % 8 * 16) + i * 128, pair);
}

}  // namespace kda::cuda::sm90::fused
