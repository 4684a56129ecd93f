// SPDX-License-Identifier: Apache-2.0
// One warpgroup goes through the runs of a stream with 64 columns of V of a state; two others make
// the factors. Where V is 128 the blocks of a cluster have its halves and make every second run's
// factors for both. There are as many clusters as fit on the card, or as there are streams: each
// goes through its share of all.
#pragma once

#include "cuda/fused/consumer.cuh"
#include "cuda/fused/producer.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace kda::cuda::sm90::fused {

constexpr int kThreads = 128 + kProducerWarps * 32;
/// Together no more than the launch gives. A state of 64 channels takes half of the registers of
/// one of 128; a maker of one warp does the work of two.
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

template <int kK, class Ring>
__device__ void init_barriers(Ring& ring) {
  constexpr int kMakerThreads = kMakerWarps<kK> * 32;
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(ring.full[i], kMakerThreads);
    ptx::mbarrier_init(ring.done[i], 128);
    ptx::mbarrier_init(ring.peer_done[i], 4);
  }
  for (ptx::Mbarrier& there : ring.looks.there) ptx::mbarrier_init(there, ring.looks.kWarps);
  for (auto& each : ring.workshops) {
    ptx::mbarrier_init(each.meet, kMakerThreads);
    ptx::mbarrier_init(each.half, 32);
  }
  ptx::mbarrier_init_fence();
}

template <int kK, class Operand, class E, int kGateMode, bool kSegments>
__global__ void __cluster_dims__(kBlocks<kK>) __launch_bounds__(kThreads, 1)
    fused_prefill_kernel(const __grid_constant__ ArgsOf<kSegments> a) {
  auto& ring = *reinterpret_cast<Ring<kK, Operand, E>*>(ptx::dynamic_shared());
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_barriers<kK>(ring);
  ptx::griddepcontrol_wait();
  chain::write_flags<ChainUse::kForward>(a);
  if constexpr (kSegments) a.write_words();
  find_share<kBlocks<kK>, kSegments>(a, ring.share, ring.longest);
  ptx::cluster_sync();
  Course& course = ring.courses[warp];
  if (threadIdx.x % 32 == 0) course.share = ring.share, course.part.piece = Part::kNoPiece;
  __syncwarp();
  if (warp < 4) {
    set_registers<kConsumerRegisters<kK>>();
    Consumer<kK, InputOf<E>, Operand, kSegments>(a).run_all(ring, course, warp);
  } else {
    set_registers<kProducerRegisters<kK>>();
    constexpr int kWarps = kMakerWarps<kK>;
    Producer<kK, Operand, E, kGateMode, kSegments>(a, ring, ptx::cluster_rank(),
                                                   (warp - 4) / kWarps, threadIdx.x % (kWarps * 32))
        .run_all(course);
  }
  ptx::cluster_sync();  // the other block may still write here
}

template <int kK, class Operand, class E, int kGateMode, bool kSegments>
Status launch(const ArgsOf<kSegments>& args, const Launch& where) {
  return launch_kernel("fused_prefill", fused_prefill_kernel<kK, Operand, E, kGateMode, kSegments>,
                       args.clusters * kBlocks<kK>, kThreads, sizeof(Ring<kK, Operand, E>), where,
                       args);
}

/// Operands are fp16 where factors are bounded: not those of gates that come as logarithms. With
/// gates in fp32 there is no room for another set of rows.
template <int kK, class E, int kGateMode, bool kSegments>
Status launch_operand(const ArgsOf<kSegments>& args, const Launch& where) {
  if constexpr (kGateMode != 0 && std::is_same_v<E, __nv_bfloat16>)
    if (args.fp16_operands) return launch<kK, __half, E, kGateMode, kSegments>(args, where);
  return launch<kK, __nv_bfloat16, E, kGateMode, kSegments>(args, where);
}

template <int kK, class E, bool kSegments>
Status launch_mode(const ArgsOf<kSegments>& args, const Launch& where) {
  if (args.gate.gate_mode == 0) return launch_operand<kK, E, 0, kSegments>(args, where);
  if (args.gate.gate_mode == 1) return launch_operand<kK, E, 1, kSegments>(args, where);
  return launch_operand<kK, E, 2, kSegments>(args, where);
}

/// Of so many channels.
template <int kK, bool kSegments>
Status launch_prefill(const ArgsOf<kSegments>& args, const Launch& where) {
  if (args.q.type == Element::kFloat16)
    return args.gate.gate_mode == 1 ? launch<kK, __half, __half, 1, kSegments>(args, where)
                                    : launch<kK, __half, __half, 2, kSegments>(args, where);
  return args.g.type == Element::kFloat32 ? launch_mode<kK, float, kSegments>(args, where)
                                          : launch_mode<kK, __nv_bfloat16, kSegments>(args, where);
}

}  // namespace kda::cuda::sm90::fused
