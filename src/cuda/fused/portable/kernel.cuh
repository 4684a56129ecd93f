// SPDX-License-Identifier: Apache-2.0
// The fused forward for every card from sm_80 on: the kernel of fused/kernel.cuh, which has the
// words, with these differences. A chain is 64 columns of V of a head, so that no blocks exchange
// factors: at K = V = 128 two blocks make those of a head. The consumer multiplies with mma.sync.
// A block has as many producer groups, and a group as many stages (one), as fit into its memory.
#pragma once

#include "cuda/fused/portable/consumer.cuh"
#include "cuda/fused/portable/portable_prefill.hpp"
#include "cuda/fused/producer.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace kda::cuda::sm90::fused {

template <class Storage>
__device__ void init_portable_storage(Storage& storage) {
  constexpr int kGroupThreads = kGroupWarps<Storage::kK> * 32;
  storage.block_groups = (static_cast<int>(blockDim.x) - 128) / kGroupThreads;
  storage.turn_tokens = storage.block_groups * kSubchunk;
  for (int i = 0; i < storage.block_groups; ++i) {
    auto& group = storage.groups[i];
    ptx::mbarrier_init(group.full, kGroupThreads);
    ptx::mbarrier_init(group.done, 128);
    ptx::mbarrier_init(group.producer.rows_ready, kGroupThreads);
    ptx::mbarrier_init(group.producer.scores_done, 32);
  }
}

template <int kK, class Operand, class E, GateMode kGateMode>
__global__ void __launch_bounds__(kPortableThreads, 1)
    portable_prefill_kernel(const __grid_constant__ PortableArgs a) {
  using Storage = PortableStorage<kK, Operand, E>;
  auto& storage = *reinterpret_cast<Storage*>(ptx::dynamic_shared());
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_portable_storage(storage);
  ptx::griddepcontrol_wait();
  chain::write_flags<ChainUse::kForward>(a);
  find_range<1, false, Storage::Form::kColumnTiles>(a, storage.range, storage.longest);
  SchedulerState& scheduler = storage.schedulers[warp];
  if (threadIdx.x % 32 == 0)
    scheduler.range = storage.range, scheduler.item.exit_interval = WorkItem::kNoInterval;
  __syncwarp();
  if (warp < 4) {  // consumer
    PortableConsumer<kK, InputOf<E>, Operand> context(a);
    run_portable_consumer(context, storage, scheduler, warp);
  } else {  // producer
    constexpr int kWarps = kGroupWarps<kK>;
    ProducerContext<Storage, kGateMode, false> context(a, storage, 0, (warp - 4) / kWarps,
                                                       threadIdx.x % (kWarps * 32));
    run_producer(context, scheduler);
  }
}

template <int kK, class Operand, class E, GateMode kGateMode>
Status launch_portable_kernel(const PortableArgs& args, const Launch& where) {
  using Storage = PortableStorage<kK, Operand, E>;
  const int groups = Storage::groups_in(args.shared_bytes);
  return launch_kernel(kFp16<Operand> ? "portable_prefill_fp16" : "portable_prefill",
                       portable_prefill_kernel<kK, Operand, E, kGateMode>, args.clusters,
                       128 + groups * kGroupWarps<kK> * 32, Storage::bytes(groups), where, args);
}

/// Launches the kernel of kK channels for the types and gates of the call.
template <int kK>
Status launch_portable(const PortableArgs& args, const Launch& where) {
  return for_gate_mode("cuda.sm80.fused", args.gate.gate_mode, [&](auto mode) {
    if constexpr (mode() != GateMode::kLog) {
      if (args.q.type == Element::kFloat16)
        return launch_portable_kernel<kK, __half, __half, mode()>(args, where);
      if (args.fp16_operands)
        return launch_portable_kernel<kK, __half, __nv_bfloat16, mode()>(args, where);
    }
    return launch_portable_kernel<kK, __nv_bfloat16, AnyGate, mode()>(args, where);
  });
}

}  // namespace kda::cuda::sm90::fused
