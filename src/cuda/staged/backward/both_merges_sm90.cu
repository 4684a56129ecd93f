// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/both_merges_sm90.hpp"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/segments/segment_merge_sm90.cuh"

namespace kda::cuda::sm90 {
namespace {

struct KernelArgs {
  BegunMergeArgs forward, reverse;
  unsigned blocks;  // of each direction
};

template <int kK, bool kReverse>
using Direction = Merge<kK, /*kStages=*/3, kReverse>;

template <int kK>
constexpr int kThreads = Direction<kK, false>::kMultipliers + Direction<kK, false>::kCopiers;

template <int kK>
__global__ void __launch_bounds__(kThreads<kK>)
    both_merges_kernel(const __grid_constant__ KernelArgs a) {
  ptx::griddepcontrol_wait();
  void* const shared = ptx::dynamic_shared();
  using Forward = Direction<kK, false>;
  using Reverse = Direction<kK, true>;
  if (blockIdx.x < a.blocks)
    Forward(a.forward, *reinterpret_cast<typename Forward::Shared*>(shared), blockIdx.x).run();
  else
    Reverse(a.reverse, *reinterpret_cast<typename Reverse::Shared*>(shared), blockIdx.x - a.blocks)
        .run();
}

template <int kK>
Status launch(const KernelArgs& args, const Launch& where) {
  return launch_kernel("both_merges", both_merges_kernel<kK>, 2 * int64_t{args.blocks},
                       kThreads<kK>, sizeof(typename Direction<kK, false>::Shared), where, args);
}

}  // namespace

Status launch_both_merges(const SegmentMergeArgs& forward, const SegmentMergeArgs& reverse,
                          const Launch& where) {
  const KernelArgs args{{forward}, {reverse}, static_cast<unsigned>(merge::blocks_of(forward))};
  return forward.shape.K == 64 ? launch<64>(args, where) : launch<128>(args, where);
}

}  // namespace kda::cuda::sm90
