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

}  // namespace kda::cuda::sm90
