// SPDX-License-Identifier: Apache-2.0
// Chunk gradients with wgmma: a block takes one chunk and value head after the other. Two
// warpgroups multiply, all channels at once; warps beside them load the next chunk and store the
// one before.
#include "cuda/staged/backward/chunk_grad_sm90.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/staged/backward/grad_sm90/copies.cuh"
#include "cuda/staged/backward/grad_sm90/left.cuh"
#include "cuda/staged/backward/grad_sm90/workers.cuh"

namespace kda::cuda::sm90 {
namespace {

using grad::Shared;

template <GateMode kMode>
__global__ void __launch_bounds__(grad::kThreads, 1)
    chunk_grad_kernel(const __grid_constant__ FinishedGradArgs a) {
  Shared& s = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  if (threadIdx.x == 0) grad::init_barriers(s);
  __syncthreads();
  if (threadIdx.x < grad::kWorkers) {
    ptx::warpgroup_reg_alloc<grad::kWorkerRegisters>();
    grad::run_workers<kMode>(a, s);
    return;
  }
  ptx::warpgroup_reg_dealloc<grad::kCopierRegisters>();
  const int thread = static_cast<int>(threadIdx.x) - grad::kWorkers;
  if (thread < grad::kCopiers)
    grad::run_loads(a, s, thread);
  else
    grad::run_stores(a, s, thread - grad::kCopiers);
}

__global__ void __launch_bounds__(cuda::grad::kThreads, 2)
    left_chunks_kernel(const __grid_constant__ FinishedGradArgs a) {
  const unsigned step = gridDim.x * cuda::grad::kThreads;
#pragma unroll 1
  for (unsigned first = blockIdx.x * cuda::grad::kThreads; first < a.tiles; first += step)
    grad::run_left(a, first);
}

template <GateMode kMode>
Status launch(const FinishedGradArgs& args, int64_t num_sms, const Launch& where) {
  static_assert(sizeof(Shared) <= kSharedMemory);
  return launch_kernel("chunk_grad", chunk_grad_kernel<kMode>,
                       std::min<int64_t>(args.tiles, num_sms), grad::kThreads, sizeof(Shared),
                       where, args);
}

}  // namespace

Status launch_chunk_grad(const FinishedGradArgs& args, int64_t num_sms, const Launch& where) {
  FinishedGradArgs mine = args;
  mine.tiles = static_cast<unsigned>(args.num_chunks * args.shape.HV);
  const auto launch_mode = [&] {
    if (args.gate.gate_mode == GateMode::kLog) return launch<GateMode::kLog>(mine, num_sms, where);
    if (args.gate.gate_mode == GateMode::kSoftplus)
      return launch<GateMode::kSoftplus>(mine, num_sms, where);
    return launch<GateMode::kBounded>(mine, num_sms, where);
  };
  KDA_RETURN_IF_ERROR(launch_mode());
  return launch_kernel("chunk_grad, what is left", left_chunks_kernel,
                       std::min<int64_t>(mine.tiles, 2 * num_sms), cuda::grad::kThreads,
                       sizeof(cuda::grad::Shared), where, mine);
}

}  // namespace kda::cuda::sm90
