// SPDX-License-Identifier: Apache-2.0
// The merge of Hopper (segments/segment_merge_sm90.cuh), which reads no M of a head that forgets in
// every segment: start states are then the ends of the segments before.
#include "cuda/gdn/merge_sm90.hpp"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/segments/segment_merge_sm90.cuh"

namespace kda::cuda::gdn {
namespace {

/// Whether M of all segments that have one behind them is 0. All threads of a block ask.
template <class M>
__device__ bool is_forgotten(const MergeArgs& a, const M& merge) {
  if (!a.forgotten || merge.last < merge.first) return false;
  int kept = 0;
  for (int64_t segment = merge.first + threadIdx.x; segment < merge.last; segment += blockDim.x)
    kept |= a.forgotten[segment * a.shape.HV + merge.place.head] == 0;
  return !__syncthreads_or(kept);
}

template <int kK>
__global__ void __launch_bounds__(sm90::Merge<kK, 3>::kMultipliers + sm90::Merge<kK, 3>::kCopiers)
    gdn_merge_kernel(const __grid_constant__ MergeArgs a) {
  using M = sm90::Merge<kK, 3>;
  ptx::griddepcontrol_wait();
  const M merge(a, *reinterpret_cast<typename M::Shared*>(ptx::dynamic_shared()), blockIdx.x);
  if (!is_forgotten(a, merge)) return merge.run();
  const int row = merge.thread / 2, column = merge.thread % 2 * 4;
  if (row >= kK) return;
  const merge::Row own{a, merge.place.head, row, merge.place.column0 + column};
  own.store(merge.first, own.initial(merge.place.sequence));
  for (int64_t segment = merge.first; segment < merge.last; ++segment)
    own.store(segment + 1, own.B(segment));
}

template <int kK>
Status launch(const MergeArgs& args, const Launch& where) {
  using M = sm90::Merge<kK, 3>;
  static_assert(sizeof(typename M::Shared) <= sm90::kSharedMemory);
  return launch_kernel("gdn_merge_sm90", gdn_merge_kernel<kK>, merge::blocks_of(args),
                       M::kMultipliers + M::kCopiers, sizeof(typename M::Shared), where, args);
}

}  // namespace

Status launch_merge(const MergeArgs& args, const Launch& where) {
  return args.shape.K == 64 ? launch<64>(args, where) : launch<128>(args, where);
}

}  // namespace kda::cuda::gdn
