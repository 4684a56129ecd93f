// SPDX-License-Identifier: Apache-2.0
// The fused forward, from its contract to its launch. Start here.
//
// Words. A *sub-chunk* is 16 tokens. A *chain* is a value head of a *work unit*, which is a
// sequence or a segment of one. A *cluster* is K / 64 blocks, each with 64 columns of V; it has a
// *work range* of the schedule of all chains. A *work item* is the part of a chain that it runs at
// once. A *handoff* carries a state between two clusters whose ranges meet inside a chain
// (scheduler.cuh has an example). The *consumer* is one warpgroup a block, with the state S^T in
// registers. A *producer group* is one warp (K = 64) or two (K = 128) that make the factors of a
// sub-chunk. A *pipeline stage* holds one sub-chunk's *tiles* (rows, kg) and *factors* (inverse,
// Aqk, gamma, norms), and v, then o. Scores are *anchored* at the start of the sub-chunk, or made
// by *dyadic* levels where decays are too strong for that. *Operand* is bf16 or fp16: what the
// tensor cores multiply. In fp16 the state is scaled, and has *headroom* for v. A *residual* is
// what bf16 outputs lack until they are corrected. A *norm check* ends a transition early, after an
// *exit interval*.
//
// One step: sub-chunk n, in stage n % 8.
//   producer group, K = 128: the one of n's number in one block makes the factors for both blocks
//     begin_subchunk  beta; waits for raw q, k, g in shared memory (copied one turn ago)
//     make_rows       decays, squares, norms; waits for done and peer_done; rows, kg, columns,
//     gamma make_scores     first warp: stores o of stage n's last turn, loads v, starts copies of
//     the next raw
//                     rows, Aqk; last warp: L, then T'
//     deliver         full of this block; the last warp sends tiles and factors to the other block
//   consumer, 4 warps with 16 columns of V each
//     wait full       then v, T', norms from the stage
//     pq = S rows^T   wgmma: P for errors, Q for outputs
//     E = T'(v - P), vn = beta E, o = Q + (Aqk + diag) vn    mma and fp32; S decays by gamma
//     meanwhile S += kg^T vn    wgmma; o takes the place of v release         done of this block,
//     peer_done of the block whose producers made the factors
//
// Barriers                 who arrives (count)            who waits         what it protects
//   full[8]                threads of the group that      consumer          factors and v of a
//   stage are
//                          moves v (32 or 64), and the                      there; from the other
//                          block bytes it expects                                 they come as
//                          expected bytes
//   done[8]                consumer threads (128)         producer group    o is in the stage, its
//   factors
//                                                                           are read: both may be
//                                                                           reused
//   peer_done[8]           one lane of each consumer      producer group    the other block has
//   read the
//                          warp of the other block (4)                      factors: they may be
//                          sent again
//   rows_ready (a group)   both warps (64); K = 128       both warps        raw rows, columns and L
//   between
//                                                                           the two warps of a
//                                                                           group
//   scores_done (a group)  first warp (32)                last warp         Aqk and v's copies are
//   begun:
//                                                                           the factors can be sent
//   norms_arrived[2]       consumer warps of all blocks   all warps         squares of M after an
//   interval kConsumerGroup         consumer threads (128)         the same          warps go
//   through stops together cluster_sync           all threads, at both ends      the same barriers
//   exist; shared memory
//                                                                           of a block outlives its
//                                                                           readers
//   handoff_flags          lane 0 of each consumer warp   the same warp of  a state in device
//   memory (device memory)        of the cluster that has the    the cluster that
//                          chain's earlier tokens         has its later ones
//
// Shared memory of a block (SharedStorage), K = 128, operands fp16, g in bf16:
//   tiles      8 x 12 KB   rows [32, K] and kg [16, K]; wgmma's 128-byte swizzle
//   factors    8 x 1.8 KB  T', Aqk, gamma, norms
//   v          8 x 2 KB    v, then o, [16, 64]
//   producers  4 x 24 KB   raw q, k, g (or rows of levels), rows and columns of scores, L
//   barriers, work range, norm check, a SchedulerState a warp, a ConsumerState a consumer warp
#pragma once

#include "cuda/fused/consumer.cuh"
#include "cuda/fused/producer.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace kda::cuda::sm90::fused {

constexpr int kThreads = 128 + kProducerWarps * 32;
/// Registers of a thread, together no more than the launch gives. A state of 64 channels takes half
/// of the registers of one of 128; a producer group of one warp does the work of two.
template <int kK>
constexpr int kConsumerRegisters = kK == 64 ? 152 : 200;
template <int kK>
constexpr int kProducerRegisters = kK == 64 ? 176 : 152;
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
template <int kK>
constexpr bool kEnoughRegisters = 128 * kConsumerRegisters<kK> +
                                      (kThreads - 128) * kProducerRegisters<kK> <=
                                  kLaunchRegisters* kThreads;
static_assert(kEnoughRegisters<64> && kEnoughRegisters<128>);
template <int kCount>
__device__ void set_registers() {
  if constexpr (kCount > kLaunchRegisters)
    ptx::warpgroup_reg_alloc<kCount>();
  else
    ptx::warpgroup_reg_dealloc<kCount>();
}

template <int kK, class Storage>
__device__ void init_barriers(Storage& storage) {
  constexpr int kGroupThreads = kGroupWarps<kK> * 32;
  for (int i = 0; i < kPipeStages; ++i) {
    ptx::mbarrier_init(storage.full[i], kGroupThreads);
    ptx::mbarrier_init(storage.done[i], 128);
    ptx::mbarrier_init(storage.peer_done[i], 4);
  }
  for (ptx::Mbarrier& arrived : storage.norm_check.norms_arrived)
    ptx::mbarrier_init(arrived, storage.norm_check.kWarps);
  for (auto& producer : storage.producers) {
    ptx::mbarrier_init(producer.rows_ready, kGroupThreads);
    ptx::mbarrier_init(producer.scores_done, 32);
  }
  ptx::mbarrier_init_fence();
}

template <int kK, class Operand, class E, GateMode kGateMode, bool kSegments>
__global__ void __cluster_dims__(kBlocks<kK>) __launch_bounds__(kThreads, 1)
    fused_prefill_kernel(const __grid_constant__ ArgsOf<kSegments> a) {
  auto& storage = *reinterpret_cast<SharedStorage<kK, Operand, E>*>(ptx::dynamic_shared());
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_barriers<kK>(storage);
  ptx::griddepcontrol_wait();
  chain::write_flags<ChainUse::kForward>(a);
  if constexpr (kSegments) a.write_words();
  find_range<kBlocks<kK>, kSegments>(a, storage.range, storage.longest);
  ptx::cluster_sync();
  SchedulerState& scheduler = storage.schedulers[warp];
  if (threadIdx.x % 32 == 0)
    scheduler.range = storage.range, scheduler.item.exit_interval = WorkItem::kNoInterval;
  __syncwarp();
  if (warp < 4) {  // consumer
    set_registers<kConsumerRegisters<kK>>();
    ConsumerContext<kK, InputOf<E>, Operand, kSegments> context(a);
    run_consumer(context, storage, scheduler, warp);
  } else {  // producer
    set_registers<kProducerRegisters<kK>>();
    constexpr int kWarps = kGroupWarps<kK>;
    ProducerContext<kK, Operand, E, kGateMode, kSegments> context(
        a, storage, ptx::cluster_rank(), (warp - 4) / kWarps, threadIdx.x % (kWarps * 32));
    run_producer(context, scheduler);
  }
  ptx::cluster_sync();  // the other block may still write here
}

template <int kK, class Operand, class E, GateMode kGateMode, bool kSegments>
Status launch(const ArgsOf<kSegments>& args, const Launch& where) {
  return launch_kernel("fused_prefill", fused_prefill_kernel<kK, Operand, E, kGateMode, kSegments>,
                       args.clusters * kBlocks<kK>, kThreads, sizeof(SharedStorage<kK, Operand, E>),
                       where, args);
}

/// Operands are fp16 where factors are bounded: not those of gates that come as logarithms. With
/// gates in fp32 there is no room for another set of rows.
template <int kK, class E, GateMode kGateMode, bool kSegments>
Status launch_operand(const ArgsOf<kSegments>& args, const Launch& where) {
  if constexpr (kGateMode != GateMode::kLog && std::is_same_v<E, __nv_bfloat16>)
    if (args.fp16_operands) return launch<kK, __half, E, kGateMode, kSegments>(args, where);
  return launch<kK, __nv_bfloat16, E, kGateMode, kSegments>(args, where);
}

template <int kK, class E, bool kSegments>
Status launch_mode(const ArgsOf<kSegments>& args, const Launch& where) {
  switch (args.gate.gate_mode) {
    case GateMode::kLog: return launch_operand<kK, E, GateMode::kLog, kSegments>(args, where);
    case GateMode::kSoftplus:
      return launch_operand<kK, E, GateMode::kSoftplus, kSegments>(args, where);
    case GateMode::kBounded: break;
  }
  return launch_operand<kK, E, GateMode::kBounded, kSegments>(args, where);
}

/// Launches the kernel of kK channels for the types and gates of the call.
template <int kK, bool kSegments>
Status launch_prefill(const ArgsOf<kSegments>& args, const Launch& where) {
  if (args.q.type == Element::kFloat16)
    return args.gate.gate_mode == GateMode::kSoftplus
               ? launch<kK, __half, __half, GateMode::kSoftplus, kSegments>(args, where)
               : launch<kK, __half, __half, GateMode::kBounded, kSegments>(args, where);
  return args.g.type == Element::kFloat32 ? launch_mode<kK, float, kSegments>(args, where)
                                          : launch_mode<kK, __nv_bfloat16, kSegments>(args, where);
}

}  // namespace kda::cuda::sm90::fused
