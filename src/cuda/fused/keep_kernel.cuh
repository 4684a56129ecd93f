// SPDX-License-Identifier: Apache-2.0
// The fused forward that keeps states and errors for its backward (kept.cuh): kernels of their own,
// so that the others have the code that they are measured with.
#pragma once

#include "cuda/fused/kernel.cuh"

namespace kda::cuda::sm90::fused {

/// The kernel of fused_prefill_kernel() with another consumer. (One body for both gave other code
/// to one of those kernels.)
template <int kK, class Operand, class E, GateMode kGateMode>
__global__ void __cluster_dims__(kBlocks<kK>) __launch_bounds__(kThreads, 1)
    fused_prefill_keep_kernel(const __grid_constant__ KeepArgs a) {
  auto& storage = *reinterpret_cast<SharedStorage<kK, Operand, E>*>(ptx::dynamic_shared());
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_barriers<kK>(storage);
  ptx::griddepcontrol_wait();
  write_flags(a);
  find_range<kBlocks<kK>, false>(a, storage.range, storage.longest);
  ptx::cluster_sync();
  SchedulerState& scheduler = storage.schedulers[warp];
  if (threadIdx.x % 32 == 0)
    scheduler.range = storage.range, scheduler.item.exit_interval = WorkItem::kNoInterval;
  __syncwarp();
  if (warp < 4) {  // consumer
    set_registers<kConsumerRegisters<kK>>();
    ChunkKeepingContext<kK, __nv_bfloat16, Operand> context(a);
    run_consumer(context, storage, scheduler, warp);
  } else {  // producer
    set_registers<kProducerRegisters<kK>>();
    constexpr int kWarps = kGroupWarps<kK>;
    ProducerContext<SharedStorage<kK, Operand, E>, kGateMode, false> context(
        a, storage, ptx::cluster_rank(), (warp - 4) / kWarps, threadIdx.x % (kWarps * 32));
    run_producer(context, scheduler);
  }
  ptx::cluster_sync();  // the other block may still write here
}

template <int kK, class Operand, class E, GateMode kGateMode>
Status launch_keep_kernel(const KeepArgs& args, const Launch& where) {
  return launch_kernel(
      std::is_same_v<Operand, __half> ? "fused_prefill_keep_fp16" : "fused_prefill_keep",
      fused_prefill_keep_kernel<kK, Operand, E, kGateMode>, args.clusters * kBlocks<kK>, kThreads,
      sizeof(SharedStorage<kK, Operand, E>), where, args);
}

/// Launches the kernel of kK channels for the gates of the call.
template <int kK>
Status launch_keep(const KeepArgs& args, const Launch& where) {
  return dispatch(args, [&]<class Operand, class E, GateMode kGateMode>() {
    return launch_keep_kernel<kK, Operand, E, kGateMode>(args, where);
  });
}

}  // namespace kda::cuda::sm90::fused
