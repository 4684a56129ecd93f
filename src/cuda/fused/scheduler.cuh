// SPDX-License-Identifier: Apache-2.0
// Which chains a cluster works on. A chain is a value head of a work unit (a sequence, or a segment
// of one).
//
// All chains stand in one schedule, the heads of a unit after each other. The cost of a chain is
// its chunks plus a fixed cost. Each cluster gets a work range of equal cost, none smaller than the
// longest chain: the wrap-around rule of McNaughton (1959). Where a range ends inside a chain, the
// next range begins with the first tokens of that chain, and this range ends with its last tokens.
// So two clusters may share a chain, each with a work item of its own: the one with the first
// tokens has its item first and hands the state over; the other one has its item last, seldom
// waits, and stores the end state. A chain is in no more than two ranges. Ranges go to clusters in
// reverse, so that a cluster waits only for one that was launched before it. Results do not depend
// on ranges: a state is handed over in fp32, with its scale, between two sub-chunks.
//
// An example: units of 4 and 6 chunks, one head, two clusters, fixed cost 0. The schedule has 10
// chunks, each range 6 (the longest chain). Range 0 has unit 0 and 2 chunks of unit 1, range 1 the
// other 4 chunks of unit 1. Range 0 ends inside unit 1, so range 1 takes the first 4 chunks of unit
// 1 and stores the state; range 0 runs unit 0, then takes that state and runs the last 2 chunks of
// unit 1. It writes the final state, since its item ends where the sequence does.
//
// Transitions that may exit early are not in the schedule: nobody knows their length. A cluster
// runs one of them after its range, in exit intervals of kNormCheckTokens. After each interval the
// consumers of all blocks add up the norm of M. Where it was small, no interval follows the next
// one: that one is on its way already, and so no warp waits.
#pragma once

#include <type_traits>

#include "cuda/fused/fused_prefill.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/segments/device_cut.hpp"
#include "cuda/tile/chunk_map.cuh"

namespace kda::cuda::sm90::fused {

/// The part of a chain that a cluster runs at once.
struct WorkItem {
  TokenRange tokens;
  int64_t segment, head;
  FusedState state;
  bool takes_state, stores_state;  // by a handoff: from another cluster, for another cluster
  int exit_interval;               // number, for a transition that may exit early; or kNoInterval
  static constexpr int kNoInterval = -1;
};

/// The norm of M after exit intervals. kBlocks: blocks of a cluster.
template <int kBlocks>
struct NormCheck {
  static constexpr int kWarps = 4 * kBlocks;  // consumer warps of the cluster
  float squares[2][kWarps];                   // sum of squares of each warp, by parity of interval
  // All consumer warps have put theirs. A slot is used again two intervals later: by then all
  // warps have read it, since that interval does not end without them.
  ptx::Mbarrier norms_arrived[2];

  /// Called by all lanes of a consumer warp, whose number in the cluster is `warp`: tells every
  /// block the sum of squares of the warp's part of M.
  __device__ void put(int interval, int warp, float sum) {
    const int slot = interval % 2, rank = static_cast<int>(threadIdx.x % 32);
    if (rank >= kBlocks) return;
    ptx::st_cluster(&squares[slot][warp], sum, rank);
    ptx::mbarrier_arrive_cluster(norms_arrived[slot], rank);
  }
  /// Whether |M|_F <= 2^-20 after the interval (stage/segment_scan.hpp says why that is enough).
  __device__ bool small_after(int interval) {
    const int slot = interval % 2;
    ptx::mbarrier_wait_cluster(norms_arrived[slot], interval / 2 % 2);
    float sum = 0;
    for (const float x : squares[slot]) sum += x;
    return sum <= 0x1p-40f;
  }
};

/// Where a cluster is in the schedule.
struct WorkRange {
  int64_t unit, head;
  int64_t before;  // cost of that chain's end, which the range before (number - 1) has
  int64_t left;    // cost that is left of this range
};

/// Arguments of a kernel with units. Few units travel with the arguments.
struct UnitArgs : FusedPrefillArgs {
  /// A cut that only the device knows: num_units and num_scheduled are then those of `cut`, and
  /// there are no words.
  const CutHeader* cut = nullptr;
  static constexpr int64_t kMostWords = 256;  // 41 units of one sequence
  int64_t num_words = 0;                      // 0: units are in device memory
  int64_t words[kMostWords];

  /// Where the words will lie.
  __host__ __device__ int64_t* target() const {
    return reinterpret_cast<int64_t*>(const_cast<WorkUnit*>(units + num_units + 1)) - num_words;
  }
  __device__ const WorkUnit& unit(int64_t n) const {
    const auto* carried = reinterpret_cast<const WorkUnit*>(words + num_words);
    return num_words > 0 ? carried[n - num_units - 1] : units[n];
  }
  /// The first block writes the words for kernels after this one.
  __device__ void write_words() const {
    if (blockIdx.x == 0)
      for (int64_t i = threadIdx.x; i < num_words; i += blockDim.x) target()[i] = words[i];
  }
};
static_assert(sizeof(UnitArgs) <= 4096);
template <bool kSegments>
using ArgsOf = std::conditional_t<kSegments, UnitArgs, FusedPrefillArgs>;
__device__ inline const WorkUnit& unit_of(const FusedPrefillArgs& a, int64_t n) {
  return static_cast<const UnitArgs&>(a).unit(n);
}

/// How many units there are, and how many of them are in the schedule.
struct NumUnits {
  int64_t all, scheduled;
};
/// kSegments: the call has units; else each sequence is one.
template <bool kSegments>
__device__ inline NumUnits num_units(const FusedPrefillArgs& a) {
  if constexpr (!kSegments) return {a.map.num_sequences, a.map.num_sequences};
  const CutHeader* cut = static_cast<const UnitArgs&>(a).cut;
  if (!cut) return {a.num_units, a.num_scheduled};
  const int64_t all = cut->num_segments + cut->num_behind;
  return {all, cut->early_exit ? cut->num_segments : all};
}
/// Cost of the units before `n`, one head.
template <bool kSegments>
__device__ inline int64_t cost_before(const FusedPrefillArgs& a, int64_t n) {
  if constexpr (kSegments) return unit_of(a, n).before;
  const int64_t chunks =
      a.map.cu_seqlens ? a.map.chunk_offsets[n] : n * chunks_of(a.map.num_tokens);
  return chunks + n * kWorkUnitCost;
}
template <bool kSegments>
__device__ inline int64_t chain_cost(const FusedPrefillArgs& a, int64_t n) {
  return cost_before<kSegments>(a, n + 1) - cost_before<kSegments>(a, n);
}
/// All of a chain as one item.
template <bool kSegments>
__device__ inline WorkItem whole_chain(const FusedPrefillArgs& a, int64_t n, int64_t head) {
  if constexpr (!kSegments)
    return {sequence_range(a.map, n), n, head, FusedState::kGiven, false, false,
            WorkItem::kNoInterval};
  const WorkUnit& unit = unit_of(a, n);
  return {unit.tokens, unit.segment, head, unit.state, false, false, WorkItem::kNoInterval};
}
/// A form of the kernel says how many blocks work on a chain and which part of a head is a chain.
/// Here the blocks of a cluster share the factors of a chain, which is all of a head.
template <int kK>
struct ClusterForm {
  static constexpr int kBlocks = fused_blocks(kK);
  static constexpr int kColumnTiles = 1;  // chains of a head
  /// Has wgmma and bulk copies, which read shared memory behind a fence, and stmatrix.
  static constexpr bool kHopper = true;
  __device__ static int rank() { return ptx::cluster_rank(); }
};
/// Where a chain is 64 columns of V of a head (kTiles > 1), WorkItem::head counts these.
template <int kTiles>
__device__ __forceinline__ int64_t head_of(const WorkItem& item) {
  return item.head / kTiles;
}
template <int kTiles>
__device__ __forceinline__ int column_tile(const WorkItem& item) {
  return static_cast<int>(item.head % kTiles);
}
/// Number of this cluster's range.
template <int kBlocks>
__device__ inline int64_t range_number() {
  return (gridDim.x - 1 - blockIdx.x) / static_cast<unsigned>(kBlocks);
}

/// Called by all threads of a block; `range` and `longest` are in shared memory.
template <int kBlocks, bool kSegments, int kTiles = 1>
__device__ inline void find_range(const FusedPrefillArgs& a, WorkRange& range, int& longest) {
  const int64_t N = num_units<kSegments>(a).scheduled, HV = a.shape.HV * kTiles,
                number = range_number<kBlocks>(),
                ranges = gridDim.x / static_cast<unsigned>(kBlocks);
  if (threadIdx.x == 0) range = {N, 0, 0, 0}, longest = 0;
  __syncthreads();
  if (N * HV <= ranges) {  // a chain each, where there is one
    if (threadIdx.x == 0 && number < N * HV)
      range = {number / HV, number % HV, 0, chain_cost<kSegments>(a, number / HV)};
    __syncthreads();
    return;
  }
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
    atomicMax(&longest, static_cast<int>(chain_cost<kSegments>(a, n)));
  __syncthreads();
  const int64_t total = cost_before<kSegments>(a, N) * HV;
  const int64_t size = max((total + ranges - 1) / ranges, static_cast<int64_t>(longest));
  const int64_t begin = number * size;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const int64_t in = begin - cost_before<kSegments>(a, n) * HV,
                  length = chain_cost<kSegments>(a, n);
    if (in >= 0 && in < length * HV) range = {n, in / length, in % length, size};
  }
  __syncthreads();
}

/// Sub-chunks of an item, a multiple of the blocks of a cluster.
template <int kBlocks>
__device__ __forceinline__ int subchunks_of(const WorkItem& item) {
  constexpr int kTokens = kBlocks * kSubchunk;
  return static_cast<int>((item.tokens.end - item.tokens.begin + kTokens - 1) / kTokens * kBlocks);
}

/// Where a warp is. It lies in shared memory: while the warp works on an item, none of this is in
/// registers.
struct SchedulerState {
  WorkRange range;
  WorkItem item;
};

/// Called by all lanes of a warp: moves to the first exit interval of a transition, or to the next
/// one. Returns false, and leaves the state as it is, if there is none.
template <int kBlocks>
__device__ inline bool next_interval(const FusedPrefillArgs& a, SchedulerState& scheduler,
                                     NormCheck<kBlocks>& norm_check) {
  WorkItem item = scheduler.item;
  const NumUnits units = num_units<true>(a);
  const int64_t number = range_number<kBlocks>(), unit = units.scheduled + number / a.shape.HV;
  __syncwarp();
  if (unit >= units.all) return false;
  const int64_t end = unit_of(a, unit).tokens.end;
  if (item.exit_interval == WorkItem::kNoInterval) {
    item = whole_chain<true>(a, unit, number % a.shape.HV);
    item.exit_interval = 0;
  } else {
    if (item.tokens.end == end ||
        (item.exit_interval > 0 && norm_check.small_after(item.exit_interval - 1)))
      return false;
    item.tokens.begin = item.tokens.end;
    ++item.exit_interval;
  }
  item.tokens.end = min(end, item.tokens.begin + kNormCheckTokens);
  if (threadIdx.x % 32 == 0) scheduler.item = item;
  __syncwarp();
  return true;
}

/// Called by all lanes of a warp: moves to the next item of the range, then to exit intervals.
/// Returns false if nothing is left. An item has chunks `first` to before `last` of its chain: a
/// range that begins inside a chain leaves out the last ones (`before`), one that ends inside (cut)
/// the first ones. The part at the end pays the fixed cost; if it pays no more, it is no item.
template <class Context>
__device__ inline bool next_item(const FusedPrefillArgs& a, SchedulerState& scheduler,
                                 NormCheck<Context::kBlocks>& norm_check) {
  constexpr bool kSegments = Context::kSegments;
  WorkRange range = scheduler.range;
  const NumUnits units = num_units<kSegments>(a);
  __syncwarp();
  while (range.left > 0 && range.unit < units.scheduled) {
    const int64_t length = chain_cost<kSegments>(a, range.unit), chunks = length - kWorkUnitCost;
    const int64_t rest = length - range.before;
    const bool cut = rest > range.left;
    const int64_t first =
        cut ? chunks - max(range.before + range.left - kWorkUnitCost, int64_t{0}) : 0;
    const int64_t last = chunks - max(range.before - kWorkUnitCost, int64_t{0});
    WorkItem item = whole_chain<kSegments>(a, range.unit, range.head);
    item.takes_state = first > 0;
    item.stores_state = last < chunks;
    item.tokens.end = min(item.tokens.end, item.tokens.begin + last * kChunk);
    item.tokens.begin += first * kChunk;
    range.left -= rest;
    range.before = 0;
    if (++range.head == a.shape.HV * Context::kColumnTiles) range.head = 0, ++range.unit;
    if (cut && first == last) continue;
    if (threadIdx.x % 32 == 0) scheduler.range = range, scheduler.item = item;
    __syncwarp();
    return true;
  }
  if constexpr (kSegments)
    if (units.scheduled < units.all) return next_interval(a, scheduler, norm_check);
  return false;
}

}  // namespace kda::cuda::sm90::fused
