// SPDX-License-Identifier: Apache-2.0
// A ring of stages of shared memory, through which a chain on Hopper goes: one warp copies the
// operands of the next chunks, the warps of the chain compute, others write results.
#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace kda::cuda::chain {

/// A turn is the position of a chunk in its chain; turns take the stages in order.
template <class S, int kCount>
struct Ring {
  using Stage = S;
  static constexpr int kStages = kCount;

  S stages[kStages];
  // A stage has its operands; has its results; is free.
  ptx::Mbarrier full[kStages], done[kStages], empty[kStages];

  __device__ S& stage(int turn) { return stages[turn % kStages]; }

  /// Counts of the threads that arrive. Every thread arrives for itself: racecheck does not follow
  /// __syncwarp() to one that arrives.
  __device__ void init_barriers(int copying, int computing, int storing) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full[i], copying);
      ptx::mbarrier_init(done[i], computing);
      ptx::mbarrier_init(empty[i], computing + storing);
    }
    ptx::mbarrier_init_fence();
  }

  // Stage and round of a turn come from the caller, who has them: worked out here, ptxas orders the
  // copies of some kernels otherwise.

  /// Waits until the results of the round before in stage i are written.
  __device__ __forceinline__ void wait_until_free(int i, int round) {
    if (round > 0) ptx::mbarrier_wait(empty[i], (round - 1) % 2);
  }
  __device__ void wait_for_operands(int turn) {
    ptx::mbarrier_wait(full[turn % kStages], turn / kStages % 2);
  }
  __device__ void wait_for_results(int turn) {
    ptx::mbarrier_wait(done[turn % kStages], turn / kStages % 2);
  }

  /// Copies to stage i, by one thread, what for_each(visit) calls
  /// visit(where it goes, where it lies, bytes) for.
  template <class ForEach>
  __device__ __forceinline__ void copy(const int& i, ForEach&& for_each) {
    int bytes = 0;
    for_each([&](void*, const void*, int size) { bytes += size; });
    ptx::mbarrier_arrive_expect_tx(full[i], bytes);
    for_each(
        [&](void* to, const void* from, int size) { ptx::cp_async_bulk(to, from, size, full[i]); });
  }

  /// Arrives once this thread's own copies (cp.async) to stage i are there.
  __device__ void arrive_after_copies(int i) { ptx::mbarrier_arrive_after_copies(full[i]); }

  __device__ void results_are_there(int turn) { ptx::mbarrier_arrive(done[turn % kStages]); }
  __device__ void is_read(int turn) { ptx::mbarrier_arrive(empty[turn % kStages]); }
};

}  // namespace kda::cuda::chain
