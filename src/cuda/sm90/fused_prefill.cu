// SPDX-License-Identifier: Apache-2.0
// One warpgroup goes through the runs of a stream with 64 columns of V of a state; two others make
// the factors. The blocks of a cluster have the halves of V and make every second run's factors for
// both. There are as many clusters as fit on the card, or as there are streams: each goes through
// its share of all.
#include "cuda/sm90/fused_prefill.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "cuda/host/launch.cuh"
#include "cuda/ptx/order.cuh"
#include "cuda/sm90/fused/consumer.cuh"
#include "cuda/sm90/fused/producer.cuh"
#include "cuda/smxx/sequence_map.hpp"

namespace kda::cuda::sm90 {
namespace {

using namespace fused;

constexpr int kThreads = 128 + kPairs * 64;
/// Together no more than the launch gives: 65,536 / kThreads, a multiple of 8, each.
constexpr int kConsumerRegisters = 200, kProducerRegisters = 152;
static_assert(128 * kConsumerRegisters + (kThreads - 128) * kProducerRegisters <=
              65536 / kThreads / 8 * 8 * kThreads);

template <class Ring>
__device__ void init_barriers(Ring& ring) {
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(ring.full[i], 64);
    ptx::mbarrier_init(ring.done[i], 128);
    ptx::mbarrier_init(ring.peer_done[i], 4);
  }
  for (ptx::Mbarrier& there : ring.looks.there) ptx::mbarrier_init(there, Looks::kWarps);
  for (auto& each : ring.workshops) {
    ptx::mbarrier_init(each.meet, 64);
    ptx::mbarrier_init(each.half, 32);
  }
  ptx::mbarrier_init_fence();
}

template <class Operand, class E, int kGateMode, bool kSegments>
__global__ void __cluster_dims__(FusedPrefillArgs::kCluster) __launch_bounds__(kThreads, 1)
    fused_prefill_kernel(const __grid_constant__ ArgsOf<kSegments> a) {
  auto& ring = *reinterpret_cast<Ring<Operand, E>*>(ptx::dynamic_shared());
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) init_barriers(ring);
  ptx::wait_for_launches_before();
  delta_h::write_flags<DeltaUse::kForward>(a);
  if constexpr (kSegments) a.write_words();
  find_share<kSegments>(a, ring.share, ring.longest);
  ptx::cluster_sync();
  Course& course = ring.courses[warp];
  if (threadIdx.x % 32 == 0) course.share = ring.share, course.part.piece = Part::kNoPiece;
  __syncwarp();
  if (warp < 4) {
    ptx::take_registers<kConsumerRegisters>();
    Consumer<Operand, kSegments>(a).run_all(ring, course, warp);
  } else {
    ptx::give_registers<kProducerRegisters>();
    Producer<Operand, E, kGateMode, kSegments>(a, ring, ptx::cluster_rank(), (warp - 4) / 2,
                                               threadIdx.x % 64)
        .run_all(course);
  }
  ptx::cluster_sync();  // the other block may still write here
}

template <class Operand, class E, int kGateMode, bool kSegments>
Status launch(const ArgsOf<kSegments>& args, const Launch& where) {
  return launch_kernel("fused_prefill", fused_prefill_kernel<Operand, E, kGateMode, kSegments>,
                       args.shares * FusedPrefillArgs::kCluster, kThreads, sizeof(Ring<Operand, E>),
                       where, args);
}

/// Operands are fp16 where factors are bounded: not those of gates that come as logarithms. With
/// gates in fp32 there is no room for another set of rows.
template <class E, int kGateMode, bool kSegments>
Status launch_operand(const ArgsOf<kSegments>& args, const Launch& where) {
  if constexpr (kGateMode != 0 && std::is_same_v<E, __nv_bfloat16>)
    if (args.half) return launch<__half, E, kGateMode, kSegments>(args, where);
  return launch<__nv_bfloat16, E, kGateMode, kSegments>(args, where);
}

template <class E, bool kSegments>
Status launch_mode(const ArgsOf<kSegments>& args, const Launch& where) {
  if (args.gate.gate_mode == 0) return launch_operand<E, 0, kSegments>(args, where);
  if (args.gate.gate_mode == 1) return launch_operand<E, 1, kSegments>(args, where);
  return launch_operand<E, 2, kSegments>(args, where);
}

template <bool kSegments>
Status launch_type(const ArgsOf<kSegments>& args, const Launch& where) {
  return args.g.type == Element::kFloat32 ? launch_mode<float, kSegments>(args, where)
                                          : launch_mode<__nv_bfloat16, kSegments>(args, where);
}

}  // namespace

Status launch_fused_prefill(const FusedPrefillArgs& args, FusedWords words, Launch where) {
  if (!args.units) return launch_type<false>(args, where);
  UnitArgs with_units{args, static_cast<int64_t>(words.size()), {}};
  if (with_units.num_words <= UnitArgs::kMostWords) {
    std::copy(words.begin(), words.end(), with_units.words);
  } else {
    WordPieces pieces;
    pieces.add(words.data(), with_units.num_words);
    KDA_RETURN_IF_ERROR(launch_upload(with_units.target(), pieces, {where.stream}));
    where.early = true;
    with_units.num_words = 0;
  }
  return launch_type<true>(with_units, where);
}

}  // namespace kda::cuda::sm90
