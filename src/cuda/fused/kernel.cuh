// SPDX-License-Identifier: Apache-2.0
// clang-format off
// The fused forward of Hopper, from its contract to its launch. Start here; docs/design/fused.md
// says why. portable/kernel.cuh has the form for other cards, with the same words.
//
// Words
//   sub-chunk         16 tokens; one step of the consumer
//   chunk             64 tokens; costs are in chunks, and ranges cut chains between two
//   M, B              of a segment: from the start state S it ends with M S + B, from zero with B
//   work unit         a sequence, a segment of one, or a segment's transition
//   transition        a unit with v = 0 that starts at the identity: it ends with M of its segment
//   chain             one value head of a work unit: work that is serial
//   cluster           K / 64 blocks; each block has 64 columns of V
//   schedule          all chains, one after the other
//   work range        what one cluster computes: an equal part of the schedule
//   work item         what a cluster runs at once: a chain, its part in the range, an exit interval
//   exit interval     1024 tokens of a transition that may end early (not in the schedule)
//   handoff           a state that goes from one cluster to another, where two ranges share a chain
//                     (scheduler.cuh has an example)
//   consumer          one warpgroup of a block, with the state S^T in registers
//   producer group    one warp (K = 64) or two (K = 128): makes the factors of a sub-chunk
//   pipeline stage    place of one sub-chunk in shared memory: tiles, factors, and v, then o
//   tiles             rows: k, then q, decayed since the sub-chunk's start; kg: k decayed to its
//                     end
//   scores            of tokens i > j, k_j decayed to i: N, k_i . k_j by both norms; Aqk, q_i . k_j
//   factors           T' = (I + L)^-1, L = N diag(beta); Aqk; gamma, the decay of a sub-chunk;
//                     norms (1 / |k|, 1 / |q|), beta and q . k; "factors of a sub-chunk": tiles too
//   factor of a row   another thing: its decay since the start, times the anchor (decay.cuh)
//   anchored scores   from rows that are decayed from the start of the sub-chunk
//   dyadic scores     level by level, where decays are too strong for anchored ones
//   operands          what the consumer multiplies: bf16, or fp16 with a state that is scaled
//   headroom          how much v the scaled fp16 state can still take
//   residual          what rounded outputs lack until they are corrected
//   norm check        after every exit interval: where M is small, the interval after is the last
//
// One step: sub-chunk n of all that the cluster runs is in stage n % 8; eight are a turn.
//   producer group    K = 128: group i of block r makes factors of stage 2 i + r for both blocks,
//                     and moves v and o of stages 2 i and 2 i + 1 for its own; K = 64: stage i
//     begin_subchunk  beta; waits for raw q, k and g, which were asked for one turn ago
//     make_rows       decays, squares, norms; waits for done and peer_done; writes norms, rows, kg,
//                     columns and gamma
//     make_scores     first warp: stores o of the turn before, loads v, makes Aqk; last warp: makes
//                     L, then T'; both start the copies of the next turn's raw rows
//     deliver         arrives at full; the last warp sends tiles and factors to the other block
//   consumer          4 warps, 16 columns of V each
//     wait            full; reads v, T' and 1 / |k|; other factors while products run
//     multiply        P, Q = S^T rows^T (wgmma)
//     errors          E = T' (v - P), v_new = beta E (vn in consumer.cuh, which has the norms too),
//                     o = Q + (Aqk + diag) v_new; S decays by gamma
//     update          S += kg^T v_new (wgmma); meanwhile o is stored where v was in the stage
//     release         done of this block, peer_done of the block whose producers made the factors
// Beside the usual step:
//   make_rows_again   fp16: a norm does not fit, or softplus gates are too large for products
//   fine_levels       rows out of range: their scores again, and all of kg, from dyadic levels
//   make_dyadic       in place of make_rows and make_scores: heads or kernels of levels alone
//   rescale_if_needed fp16: no headroom before a sub-chunk; looks at the state, may rescale it
//   repair_overflow   fp16: v was large; adds what clamped errors lack, then releases the stage
//   stop              items and checkpoints: where states come and go
//
// Barriers (mbarrier unless said)
//   name             who arrives (count)              who waits         what it protects
//   full[8]          threads of the group that moves  consumer          factors and v of a stage
//                    v (32 or 64), and the bytes that                   are there
//                    the other block sends
//   done[8]          consumer threads (128)           producer group    o is in the stage; v and
//                                                                       its factors were read
//   peer_done[8]     one lane of each consumer warp   producer group    the other block has read
//                    of the other block (4), K = 128                    factors sent to it: they
//                                                                       may be overwritten here
//   rows_ready       both warps of a group (64);      both warps        what they share: raw rows,
//                    K = 64: __syncwarp                                 norms, rows, columns, L of
//                                                                       levels, num_anchored
//   scores_done      first warp of a group (32),      last warp         Aqk is in the stage and can
//                    K = 128                                            be sent; num_anchored was
//                                                                       read
//   norms_arrived[2] one lane of each consumer warp   all warps, at     sums of squares of M after
//                    of the cluster (4 or 8)          their block's     an exit interval
//   kConsumerGroup   consumer threads (128); a named  the same          no memory: warps leave a
//                    barrier                                            stop together (item's
//                                                                       begin or end, checkpoint)
//   cluster_sync     all threads, at both ends        the same          barriers exist; a block
//                                                                       ends after remote arrivals
//   handoff_flags    lane 0 of each consumer warp of  the same warp of  a state in device memory is
//                    the cluster with the earlier     the cluster with  complete before it is read
//                    tokens; words in device memory   the later ones
//
// Shared memory of a block (SharedStorage), K = 128, operands fp16, g in bf16
//   tiles            8 x 12 KB    rows [32, K] and kg [16, K], in wgmma's 128-byte swizzle
//   factors          8 x 1.8 KB   T', Aqk, gamma, norms
//   v                8 x 2 KB     v, then o, [16, 64]
//   producers        4 x 24.4 KB  raw q, k, g (or rows of levels), rows and columns of scores, L
//   the rest         1.5 KB       barriers, work range, norm check, a SchedulerState per warp, a
//                                 ConsumerState per consumer warp
//
// clang-format on
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
  write_flags(a);
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
    ProducerContext<SharedStorage<kK, Operand, E>, kGateMode, kSegments> context(
        a, storage, ptx::cluster_rank(), (warp - 4) / kWarps, threadIdx.x % (kWarps * 32));
    run_producer(context, scheduler);
  }
  ptx::cluster_sync();  // the other block may still write here
}

template <class Operand, class E>
constexpr const char* kName = std::is_same_v<Operand, __half> ? "fused_prefill_fp16"
                              : GateOf<E>::kOneAHead          ? "fused_prefill_head_gate"
                                                              : "fused_prefill";

template <int kK, class Operand, class E, GateMode kGateMode, bool kSegments>
Status launch(const ArgsOf<kSegments>& args, const Launch& where) {
  return launch_kernel(
      kName<Operand, E>, fused_prefill_kernel<kK, Operand, E, kGateMode, kSegments>,
      args.clusters * kBlocks<kK>, kThreads, sizeof(SharedStorage<kK, Operand, E>), where, args);
}

/// Calls launcher<Operand, E, kGateMode>() as gates that are E ask for. Operands are fp16 where
/// factors are bounded: not those of gates that come as logarithms. With gates in fp32 there is no
/// room for another set of rows.
template <class E, class Args, class Launcher>
Status dispatch_gates(const Args& args, const Launcher& launcher) {
  return for_gate_mode("cuda.sm90.fused", args.gate.gate_mode, [&](auto mode) {
    if constexpr (mode() != GateMode::kLog && std::is_same_v<E, __nv_bfloat16>)
      if (args.fp16_operands) return launcher.template operator()<__half, E, mode()>();
    return launcher.template operator()<__nv_bfloat16, E, mode()>();
  });
}

/// Does so for the gates of a call with q in bf16.
template <class Args, class Launcher>
Status dispatch(const Args& args, const Launcher& launcher) {
  return args.g.type == Element::kFloat32 ? dispatch_gates<float>(args, launcher)
                                          : dispatch_gates<__nv_bfloat16>(args, launcher);
}

/// For q in fp16, which the backend declines with gates as logarithms.
template <int kK, bool kSegments>
Status launch_mode_of_fp16(const ArgsOf<kSegments>& args, const Launch& where) {
  return for_gate_mode("cuda.sm90.fused", args.gate.gate_mode, [&](auto mode) {
    if constexpr (mode() == GateMode::kLog)
      return unknown_gate_mode("cuda.sm90.fused of fp16");
    else
      return launch<kK, __half, __half, mode(), kSegments>(args, where);
  });
}

/// Launches the kernel of kK channels for the types and gates of the call.
template <int kK, bool kSegments>
Status launch_prefill(const ArgsOf<kSegments>& args, const Launch& where) {
  if (args.q.type == Element::kFloat16) return launch_mode_of_fp16<kK, kSegments>(args, where);
  return dispatch(args, [&]<class Operand, class E, GateMode kGateMode>() {
    return launch<kK, Operand, E, kGateMode, kSegments>(args, where);
  });
}

/// Launches the kernel of one gate a head, in fp32 and as a logarithm, and of K = V = 128
/// (fused/head_gates.cu).
template <bool kSegments>
Status launch_head_gates(const ArgsOf<kSegments>& args, const Launch& where);

}  // namespace kda::cuda::sm90::fused
