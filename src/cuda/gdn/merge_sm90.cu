// SPDX-License-Identifier: Apache-2.0
// The merge of Hopper (segments/segment_merge_sm90.cuh), which reads no M of a head that forgets in
// every segment: start states are then the ends of the segments before. Of a backward one launch
// has the places of both directions. Blocks, as many as fit at once, walk over columns of heads of
// sequences: where a kernel has cut nothing, a block for each would take 0.6 us a round to end at
// once.
#include "cuda/gdn/merge_sm90.hpp"

#include <algorithm>

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/segments/segment_merge_sm90.cuh"

namespace kda::cuda::gdn {
namespace {

template <int kK, bool kReverse>
struct Direction {
  using M = sm90::Merge<kK, 3, kReverse>;

  const MergeArgs& a;
  const M merge;

  /// `steps` that this block has made at places before.
  __device__ Direction(const MergeArgs& args, int64_t place, int64_t steps)
      : a(args),
        merge(args, *reinterpret_cast<typename M::Shared*>(ptx::dynamic_shared()),
              merge::place_of(args, static_cast<unsigned>(place)), steps) {}

  /// The segment of a turn.
  __device__ int64_t at(int64_t turn) const {
    return kReverse ? merge.first + merge.last - turn : turn;
  }

  /// Whether M of all segments that have one to give to is 0. All threads of a block ask.
  __device__ bool is_forgotten() const {
    if (!a.forgotten) return false;
    int kept = 0;
    for (int64_t turn = merge.first + threadIdx.x; turn < merge.last; turn += blockDim.x)
      kept |= a.forgotten[at(turn) * a.shape.HV + merge.place.head] == 0;
    return !__syncthreads_or(kept);
  }

  /// Returns the steps that it has made.
  __device__ int64_t run() const {
    if (merge.last < merge.first) return 0;
    if (!is_forgotten()) {
      merge.walk();
      return merge.last - merge.first;
    }
    const int row = merge.thread / 2, column = merge.thread % 2 * 4;
    if (row >= kK) return 0;
    const merge::Row own{a, merge.place.head, row, merge.place.column0 + column};
    own.store(at(merge.first), own.initial(merge.place.sequence));
    for (int64_t turn = merge.first; turn < merge.last; ++turn)
      own.store(at(turn + 1), own.B(at(turn)));
    return 0;
  }
};

template <int kK>
constexpr int kThreads = sm90::Merge<kK, 3>::kMultipliers + sm90::Merge<kK, 3>::kCopiers;

/// Both directions; the places of states, if there are any, are the first ones.
struct BothArgs {
  MergeArgs states, gradients;
  int64_t num_states = 0;
};

KDA_HOST_DEVICE inline int64_t places_of(const MergeArgs& a) {
  return a.map.num_sequences * merge::places_of_sequence(a);
}

template <int kK, class RunPlace>
__device__ void walk_places(const MergeArgs& a, int64_t num_places, RunPlace&& run_place) {
  ptx::griddepcontrol_wait();
  if (a.segment_offsets[a.map.num_sequences] == 0) return;  // a kernel has cut nothing
  using M = typename Direction<kK, false>::M;
  M::init(*reinterpret_cast<typename M::Shared*>(ptx::dynamic_shared()));
  int64_t steps = 0;
  for (int64_t i = blockIdx.x; i < num_places; i += gridDim.x) steps += run_place(i, steps);
}

template <int kK>
__global__ void __launch_bounds__(kThreads<kK>)
    gdn_merge_kernel(const __grid_constant__ MergeArgs a) {
  walk_places<kK>(a, places_of(a), [&](int64_t place, int64_t steps) {
    return Direction<kK, false>(a, place, steps).run();
  });
}

template <int kK>
__global__ void __launch_bounds__(kThreads<kK>)
    gdn_both_merges_kernel(const __grid_constant__ BothArgs a) {
  const int64_t all = a.num_states + places_of(a.gradients);
  walk_places<kK>(a.gradients, all, [&](int64_t place, int64_t steps) {
    return place < a.num_states
               ? Direction<kK, false>(a.states, place, steps).run()
               : Direction<kK, true>(a.gradients, place - a.num_states, steps).run();
  });
}

template <int kK, class Args>
Status launch(const char* name, void (*kernel)(Args), int64_t places, int64_t num_sms,
              const Args& args, const Launch& where) {
  constexpr std::size_t kBytes = sizeof(typename Direction<kK, false>::M::Shared);
  static_assert(kBytes <= sm90::kSharedMemory);
  static_assert(kBytes == sizeof(typename Direction<kK, true>::M::Shared));
  constexpr auto kBlocksPerSm = static_cast<int64_t>(sm90::kSharedMemory / kBytes);
  return launch_kernel(name, kernel, std::min(places, num_sms * kBlocksPerSm), kThreads<kK>, kBytes,
                       where, args);
}

}  // namespace

Status launch_merge(const MergeArgs& args, int64_t num_sms, const Launch& where) {
  constexpr const char* kName = "gdn_merge_sm90";
  const int64_t places = places_of(args);
  return args.shape.K == 64
             ? launch<64>(kName, gdn_merge_kernel<64>, places, num_sms, args, where)
             : launch<128>(kName, gdn_merge_kernel<128>, places, num_sms, args, where);
}

Status launch_both_merges(const MergeArgs* states, const MergeArgs& gradients, int64_t num_sms,
                          const Launch& where) {
  BothArgs args{{}, gradients};
  if (states) args.states = *states, args.num_states = places_of(*states);
  constexpr const char* kName = "gdn_both_merges_sm90";
  const int64_t places = args.num_states + places_of(gradients);
  return gradients.shape.K == 64
             ? launch<64>(kName, gdn_both_merges_kernel<64>, places, num_sms, args, where)
             : launch<128>(kName, gdn_both_merges_kernel<128>, places, num_sms, args, where);
}

}  // namespace kda::cuda::gdn
