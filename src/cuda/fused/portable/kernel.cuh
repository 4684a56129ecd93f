// SPDX-License-Identifier: Apache-2.0
// The fused forward for every card from sm_80 on: the kernel of fused/kernel.cuh, which has the
// words, with these differences. A chain is 64 columns of V of a head, so that no blocks exchange
// factors: at K = V = 128 two blocks make those of a head. The consumer multiplies with mma.sync.
// A block has as many producer groups, and a group as many stages (one), as fit into its memory.
//
// Order of accesses to shared memory, every pair of two threads. An arrival at an mbarrier
// releases, a wait that ends acquires, __syncwarp() and __syncthreads() order all that their
// threads did; these orders add up over threads. A wait for copies (cp.async.wait_group) makes a
// thread's own copies visible to it, and so to all that it releases to. No copy arrives at an
// mbarrier by itself and no bulk copy is there, so there is one proxy. "Next" is the next turn of
// the same group. At K = 64 a group is one warp: __syncwarp() stands for rows_ready, that of
// finish_scores() for scores_done.
//   memory
//     first access, then second access: what is between
//   barriers, block_groups, work range
//     thread 0 writes, then all read: __syncthreads() of find_range()
//   schedulers, consumers
//     lanes of a warp read, then its lane 0 writes; lanes read: __syncwarp() before and
//       after
//   raw q, k, g
//     each thread's copies, then both warps read: its cp_async_wait<0>(), then rows_ready (K
//       = 64: __syncwarp())
//   raw q, k, g
//     both warps read; powers and levels are in their place, then next copies: rows_ready
//       behind the last read: of make_rows, make_rows_again, fine_levels, make_dyadic
//   g, with levels of rows out of range
//     both read raw g again, then levels reach into it: the first rows_ready of fine_levels
//   num_anchored, needs_rescale
//     atomics and stores of both warps, then both read: rows_ready
//   the same
//     the first warp reads, then the last warp's first lane resets them, next: scores_done,
//       which the last warp waits for in deliver()
//   dyadic_only
//     its warp writes, at an item's begin, then both read; it writes again, next item:
//       rows_ready of each sub-chunk, twice
//   rows, columns of scores
//     both write, then both read, by ldmatrix: rows_ready
//   the same
//     both read, then both write, next: rows_ready of the next begin_subchunk()
//   L
//     lanes of the last warp read rows that it takes the place of, then they write L:
//       __syncwarp() in anchored_scores(); of levels rows_ready
//   L
//     one warp writes, of levels both, then the last warp reads: __syncwarp() in
//       finish_scores(); of levels rows_ready
//   L, while it is inverted
//     lanes read, then lanes 0 to 15 write; all read: __syncwarp() before and after
//   norms
//     lanes write, then the last warp reads, for L: rows_ready
//   tiles, factors
//     threads of the group write, then consumer warps read: each thread's own arrival at
//       full
//   tiles, factors
//     consumer warps read, repair_overflow() too, then the group writes, next: __syncwarp(),
//       each lane's own arrival at done; each producer thread waits
//   v
//     copies of the first warp, then consumer warps read, by ldmatrix: cp_async_wait<1>()
//       (of the warp's copies only raw rows are younger), full
//   v, then o
//     lanes of a consumer warp read v, then its lanes write o there: __syncwarp() in
//       consume_stage(); other warps have other columns
//   o
//     lanes of a consumer warp write, then the first warp of the group reads: __syncwarp(),
//       done
//   o, then v
//     a lane of the first warp reads 16 bytes, then the same lane copies v to them, next:
//       program order: a lane moves the same pieces of both
//   states in device memory, their flags
//     a warp stores, then the warp of the same columns in another block reads: __syncwarp(),
//       a release on the whole card; each lane acquires, __syncwarp(), lane 0 clears
// No thread passes a barrier twice in a phase: both warps arrive at rows_ready thread by thread,
// each behind its own wait for the phase before; a group waits for `done` before it arrives at
// `full` again, a consumer for `full` before it arrives at `done`.
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
