// SPDX-License-Identifier: Apache-2.0
// Chunk gradients with wgmma: a block takes one chunk and value head after the other, all value
// heads of a q/k head before the next one. Two warpgroups multiply, all channels at once; warps
// beside them load the next chunk and store the one before.
#include "cuda/staged/backward/chunk_grad_sm90.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/staged/backward/grad_sm90/compute.cuh"
#include "cuda/staged/backward/grad_sm90/copies.cuh"
#include "cuda/staged/backward/grad_sm90/fallback.cuh"

namespace kda::cuda::sm90 {
namespace {

using grad::Heads;

template <GateMode kMode, Heads kHeads>
__global__ void __launch_bounds__(grad::kThreads, 1)
    chunk_grad_kernel(const __grid_constant__ FinishedGradArgs a) {
  auto& s = *reinterpret_cast<grad::Shared<grad::kCountOf<kHeads>>*>(ptx::dynamic_shared());
  if (threadIdx.x == 0) grad::init_barriers(s);
  __syncthreads();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < grad::kComputeThreads) {
    ptx::warpgroup_reg_alloc<grad::kComputeRegisters>();
    grad::run_compute<kMode, kHeads>(a, s);
    return;
  }
  ptx::warpgroup_reg_dealloc<grad::kCopierRegisters>();
  const int thread = static_cast<int>(threadIdx.x) - grad::kComputeThreads;
  if (thread < grad::kCopiers)
    grad::run_loads<kHeads>(a, s, thread);
  else
    grad::run_stores<kHeads>(a, s, thread - grad::kCopiers);
}

__global__ void __launch_bounds__(cuda::grad::kThreads, 2)
    fallback_chunks_kernel(const __grid_constant__ FinishedGradArgs a) {
  ptx::griddepcontrol_wait();
  grad::run_fallback(a);
}

/// Chunks and q/k heads.
int64_t units_of(const FinishedGradArgs& args) { return args.num_chunks * args.shape.H; }

template <GateMode kMode, Heads kHeads>
Status launch(const FinishedGradArgs& args, int64_t tasks, int64_t num_sms, const Launch& where) {
  constexpr int kBytes = sizeof(grad::Shared<grad::kCountOf<kHeads>>);
  static_assert(kBytes <= kSharedMemory);
  return launch_kernel("chunk_grad_sm90", chunk_grad_kernel<kMode, kHeads>,
                       std::min(tasks, num_sms), grad::kThreads, kBytes, where, args);
}
template <GateMode kMode>
Status launch(const FinishedGradArgs& args, int64_t num_sms, const Launch& where) {
  if (args.shape.K == 64) return launch<kMode, Heads::kPair>(args, args.pair_tasks, num_sms, where);
  if (args.shape.HV > args.shape.H)
    return launch<kMode, Heads::kGrouped>(args, units_of(args), num_sms, where);
  return launch<kMode, Heads::kOne>(args, units_of(args), num_sms, where);
}

}  // namespace

Status launch_chunk_grad(const FinishedGradArgs& args, int64_t num_sms, const Launch& where) {
  FinishedGradArgs mine = args;
  mine.tiles = static_cast<unsigned>(args.num_chunks * args.shape.HV);
  mine.pairs = Divisor((args.shape.HV + 1) / 2);
  mine.pair_tasks = static_cast<unsigned>(args.num_chunks) * mine.pairs.value;
  KDA_RETURN_IF_ERROR(for_gate_mode("chunk_grad", args.gate.gate_mode, [&](auto mode) {
    return launch<mode()>(mine, num_sms, where);
  }));
  return launch_kernel("chunk_grad_sm90, fallback", fallback_chunks_kernel,
                       std::min(units_of(mine), 2 * num_sms), cuda::grad::kThreads,
                       sizeof(cuda::grad::Shared), where, mine);
}

}  // namespace kda::cuda::sm90
