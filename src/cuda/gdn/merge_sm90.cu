// SPDX-License-Identifier: Apache-2.0
// The merge of Hopper (segments/segment_merge_sm90.cuh), which reads no M of a head that forgets in
// every segment: start states are then the ends of the segments before. Of a backward one launch
// has the blocks of both directions.
#include "cuda/gdn/merge_sm90.hpp"

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

  __device__ Direction(const MergeArgs& args, unsigned block)
      : a(args),
        merge(args, *reinterpret_cast<typename M::Shared*>(ptx::dynamic_shared()), block) {}

  /// The segment of a turn.
  __device__ int64_t at(int64_t turn) const {
    return kReverse ? merge.first + merge.last - turn : turn;
  }

  /// Whether M of all segments that have one to give to is 0. All threads of a block ask.
  __device__ bool is_forgotten() const {
    if (!a.forgotten || merge.last < merge.first) return false;
    int kept = 0;
    for (int64_t turn = merge.first + threadIdx.x; turn < merge.last; turn += blockDim.x)
      kept |= a.forgotten[at(turn) * a.shape.HV + merge.place.head] == 0;
    return !__syncthreads_or(kept);
  }

  __device__ void run() const {
    if (!is_forgotten()) return merge.run();
    const int row = merge.thread / 2, column = merge.thread % 2 * 4;
    if (row >= kK) return;
    const merge::Row own{a, merge.place.head, row, merge.place.column0 + column};
    own.store(at(merge.first), own.initial(merge.place.sequence));
    for (int64_t turn = merge.first; turn < merge.last; ++turn)
      own.store(at(turn + 1), own.B(at(turn)));
  }
};

template <int kK>
constexpr int kThreads = sm90::Merge<kK, 3>::kMultipliers + sm90::Merge<kK, 3>::kCopiers;

template <int kK>
__global__ void __launch_bounds__(kThreads<kK>)
    gdn_merge_kernel(const __grid_constant__ MergeArgs a) {
  ptx::griddepcontrol_wait();
  Direction<kK, false>(a, blockIdx.x).run();
}

struct BothArgs {
  MergeArgs states, gradients;
  unsigned blocks;  // of states: the first ones
};

template <int kK>
__global__ void __launch_bounds__(kThreads<kK>)
    gdn_both_merges_kernel(const __grid_constant__ BothArgs a) {
  ptx::griddepcontrol_wait();
  if (blockIdx.x < a.blocks)
    Direction<kK, false>(a.states, blockIdx.x).run();
  else
    Direction<kK, true>(a.gradients, blockIdx.x - a.blocks).run();
}

template <int kK, class Args>
Status launch(const char* name, void (*kernel)(Args), int64_t blocks, const Args& args,
              const Launch& where) {
  using D = Direction<kK, false>;
  static_assert(sizeof(typename D::M::Shared) <= sm90::kSharedMemory);
  return launch_kernel(name, kernel, blocks, kThreads<kK>, sizeof(typename D::M::Shared), where,
                       args);
}

template <int kK>
Status launch_both(const BothArgs& args, const Launch& where) {
  const int64_t blocks = args.blocks + merge::blocks_of(args.gradients);
  return launch<kK>("gdn_both_merges_sm90", gdn_both_merges_kernel<kK>, blocks, args, where);
}

}  // namespace

Status launch_merge(const MergeArgs& args, const Launch& where) {
  const int64_t blocks = merge::blocks_of(args);
  return args.shape.K == 64
             ? launch<64>("gdn_merge_sm90", gdn_merge_kernel<64>, blocks, args, where)
             : launch<128>("gdn_merge_sm90", gdn_merge_kernel<128>, blocks, args, where);
}

Status launch_both_merges(const MergeArgs* states, const MergeArgs& gradients,
                          const Launch& where) {
  BothArgs args{{}, gradients, 0};
  if (states) args.states = *states;
  if (states) args.blocks = static_cast<unsigned>(merge::blocks_of(*states));
  return gradients.shape.K == 64 ? launch_both<64>(args, where) : launch_both<128>(args, where);
}

}  // namespace kda::cuda::gdn
