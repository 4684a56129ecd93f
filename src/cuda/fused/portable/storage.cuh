// SPDX-License-Identifier: Apache-2.0
// Shared memory of the portable form: a chain is 64 columns of V of a head, and one block makes all
// of its factors. There are as many producer groups as a block has memory for, at run time.
#pragma once

#include "cuda/fused/shared_storage.cuh"

namespace kda::cuda::sm90::fused {

/// See ClusterForm.
template <int kK>
struct BlockForm {
  static constexpr int kBlocks = 1, kColumnTiles = kK / kVTile;
  static constexpr bool kHopper = false;
  __device__ static int rank() { return 0; }
};

constexpr int kPortableThreads = 128 + kProducerWarps * 32;  // of a block, at most

template <int kChannels, class OperandType, class GateElement>
struct PortableStorage {
  static constexpr int kK = kChannels;
  using Operand = OperandType;
  using E = GateElement;
  using Form = BlockForm<kK>;
  static constexpr int kMostGroups = kProducerWarps / kGroupWarps<kK>;

  /// A producer group has one pipeline stage.
  struct Group {
    Tiles<kK> tiles;
    ProducerStorage<kK, Operand, E> producer;
    alignas(128) Bits v[kSubchunk * kVTile];  // then o
    Factors<kK> factors;
    ptx::Mbarrier full, done;
  };

  WorkRange range;
  int longest;  // cost of the longest chain, while the range is looked for
  int block_groups, turn_tokens;
  NormCheck<Form::kBlocks> norm_check;  // unused: transitions never end early
  SchedulerState schedulers[4 + kProducerWarps];
  ConsumerState consumers[4];
  Group groups[kMostGroups];  // those that a block has no memory for do not exist

  __device__ PipeStage<kK> stage(int i) { return {groups[i].tiles, groups[i].factors}; }
  __device__ Bits* values(int i) { return groups[i].v; }
  __device__ ptx::Mbarrier& full_barrier(int i) { return groups[i].full; }
  __device__ ptx::Mbarrier& done_barrier(int i) { return groups[i].done; }
  __device__ ProducerStorage<kK, Operand, E>& producer(int i) { return groups[i].producer; }

  static constexpr int bytes(int groups) {
    constexpr auto kAll = static_cast<int>(sizeof(PortableStorage));
    return kAll - (kMostGroups - groups) * static_cast<int>(sizeof(Group));
  }
  /// Groups of a block that may have so many bytes.
  static constexpr int groups_in(int most_bytes) {
    int groups = kMostGroups;
    while (groups > 1 && bytes(groups) > most_bytes) --groups;
    return groups;
  }
};

/// Blocks of sm_86, 89 and 12x may have 99 KB, those of sm_80 and 87 have 163 KB.
template <int kK, class Operand, class E>
constexpr bool has_groups(int small, int large) {
  using Storage = PortableStorage<kK, Operand, E>;
  return Storage::groups_in(99 * 1024) >= small && Storage::groups_in(163 * 1024) >= large;
}
static_assert(has_groups<128, __half, __nv_bfloat16>(2, 4));
static_assert(has_groups<128, __nv_bfloat16, AnyGate>(2, 4));
static_assert(has_groups<64, __half, __nv_bfloat16>(4, 7));
static_assert(has_groups<64, __nv_bfloat16, AnyGate>(4, 7));

}  // namespace kda::cuda::sm90::fused
