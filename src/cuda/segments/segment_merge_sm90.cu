// SPDX-License-Identifier: Apache-2.0
#include "cuda/segments/segment_merge_sm90.cuh"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"

namespace kda::cuda::sm90 {
namespace {

template <int kK, int kStages>
__global__ void __launch_bounds__(Merge<kK, kStages>::kMultipliers + Merge<kK, kStages>::kCopiers)
    segment_merge_kernel(const __grid_constant__ BegunMergeArgs a) {
  using M = Merge<kK, kStages>;
  ptx::griddepcontrol_wait();
  M(a, *reinterpret_cast<typename M::Shared*>(ptx::dynamic_shared()), blockIdx.x).run();
}

/// Blocks walk over columns of heads of the sequences that are cut, each over neighbours. Columns
/// of the same head find its M in the ring, where all of them fit.
template <int kK>
__global__ void __launch_bounds__(Merge<kK, 3>::kMultipliers + Merge<kK, 3>::kCopiers)
    walking_merge_kernel(const __grid_constant__ BegunMergeArgs a) {
  using M = Merge<kK, 3>;
  auto& shared = *reinterpret_cast<typename M::Shared*>(ptx::dynamic_shared());
  ptx::griddepcontrol_wait();
  if (a.cut->most_behind < 2) return;
  M::init(shared);
  const auto all = static_cast<unsigned>(a.cut->num_cut * merge::places_of_sequence(a));
  const unsigned share = (all + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
  int64_t steps = 0;
  for (unsigned i = begin; i < min(all, begin + share); ++i) {
    merge::Place place = merge::place_of(a, i);
    place.sequence = cut_sequences(a.cut)[place.sequence];
    M merge(a, shared, place, steps);
    const int64_t count = merge.last - merge.first;
    const bool fetched = i > begin && place.column0 > 0 && count <= M::kRing;
    if (fetched)
      merge.steps_before -= count;
    else
      steps += count;
    merge.walk(fetched);
  }
}

template <int kK>
Status launch_walking(const BegunMergeArgs& args, int64_t num_sms, const Launch& where) {
  using M = Merge<kK, 3>;
  return launch_kernel("segment_merge_walking", walking_merge_kernel<kK>, num_sms,
                       M::kMultipliers + M::kCopiers, sizeof(typename M::Shared), where, args);
}

template <int kK, int kStages>
Status launch(const BegunMergeArgs& args, const Launch& where) {
  using M = Merge<kK, kStages>;
  static_assert(sizeof(typename M::Shared) <= kSharedMemory);
  return launch_kernel("segment_merge_sm90", segment_merge_kernel<kK, kStages>,
                       merge::blocks_of(args), M::kMultipliers + M::kCopiers,
                       sizeof(typename M::Shared), where, args);
}

template <int kK>
Status launch_ring(const BegunMergeArgs& args, const Launch& where) {
  return args.most_segments == 2 ? launch<kK, 1>(args, where) : launch<kK, 3>(args, where);
}

}  // namespace

Status launch_segment_merge(const BegunMergeArgs& args, const Launch& where) {
  return args.shape.K == 64 ? launch_ring<64>(args, where) : launch_ring<128>(args, where);
}

Status launch_walking_merge(const BegunMergeArgs& args, int64_t num_sms, const Launch& where) {
  return args.shape.K == 64 ? launch_walking<64>(args, num_sms, where)
                            : launch_walking<128>(args, num_sms, where);
}

}  // namespace kda::cuda::sm90
