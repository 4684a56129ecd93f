// SPDX-License-Identifier: Apache-2.0
// The kernels of chunk_grad on Hopper, and their launches. Each place of gates has a source of its
// own, which compiles beside the others.
#pragma once

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/staged/backward/grad_sm90/compute.cuh"
#include "cuda/staged/backward/grad_sm90/copies.cuh"
#include "cuda/staged/backward/grad_sm90/fallback.cuh"

namespace kda::cuda::sm90 {

/// Both launches, of arguments that are complete.
Status launch_grad_tiles(const grad::Args& args, int64_t num_sms, const Launch& where);
Status launch_grad_rows(const grad::Args& args, int64_t num_sms, const Launch& where);
Status launch_grad_head(const grad::Args& args, int64_t num_sms, const Launch& where);
/// The first launch for fp16 rows and operands, with gates by rows; there is no second one.
Status launch_grad_fp16(const grad::Args& args, int64_t num_sms, const Launch& where);

namespace {

using grad::Heads;

template <GateMode kMode, Heads kHeads, GradGates kGates, class T>
__global__ void __launch_bounds__(grad::kThreads, 1)
    chunk_grad_kernel(const __grid_constant__ grad::Args a) {
  auto& s = *reinterpret_cast<grad::SharedOf<kHeads, kGates, T>*>(ptx::dynamic_shared());
  if (threadIdx.x == 0) grad::init_barriers(s);
  __syncthreads();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < grad::kComputeThreads) {
    ptx::warpgroup_reg_alloc<grad::kComputeRegisters>();
    grad::run_compute<kMode, kHeads, kGates, T>(a, s);
    return;
  }
  ptx::warpgroup_reg_dealloc<grad::kCopierRegisters>();
  const int thread = static_cast<int>(threadIdx.x) - grad::kComputeThreads;
  if (thread < grad::kCopiers)
    grad::run_loads<kHeads, kGates, T>(a, s, thread);
  else
    grad::run_stores<kHeads, kGates, T>(a, s, thread - grad::kCopiers);
}

template <GradGates kGates>
__global__ void __launch_bounds__(cuda::grad::kThreads, 2)
    fallback_chunks_kernel(const __grid_constant__ grad::Args a) {
  ptx::griddepcontrol_wait();
  grad::run_fallback<kGates>(a);
}

/// Chunks and q/k heads.
int64_t units_of(const grad::Args& args) { return args.num_chunks * args.shape.H; }

template <GateMode kMode, Heads kHeads, GradGates kGates, class T = grad::Element16>
Status launch(const grad::Args& args, int64_t tasks, int64_t num_sms, const Launch& where) {
  constexpr int kBytes = sizeof(grad::SharedOf<kHeads, kGates, T>);
  static_assert(kBytes <= kSharedMemory);
  return launch_kernel(grad_kernel(kGates, std::is_same_v<T, __half>),
                       chunk_grad_kernel<kMode, kHeads, kGates, T>, min(tasks, num_sms),
                       grad::kThreads, kBytes, where, args);
}
template <GateMode kMode, GradGates kGates>
Status launch(const grad::Args& args, int64_t num_sms, const Launch& where) {
  if (args.shape.K == 64)
    return launch<kMode, Heads::kPair, kGates>(args, args.pair_tasks, num_sms, where);
  if (args.shape.HV > args.shape.H)
    return launch<kMode, Heads::kGrouped, kGates>(args, units_of(args), num_sms, where);
  return launch<kMode, Heads::kOne, kGates>(args, units_of(args), num_sms, where);
}
template <GradGates kGates>
Status launch(const grad::Args& args, int64_t num_sms, const Launch& where) {
  KDA_RETURN_IF_ERROR(for_gate_mode("chunk_grad", args.gate.gate_mode, [&](auto mode) {
    return launch<mode(), kGates>(args, num_sms, where);
  }));
  return launch_kernel("chunk_grad_sm90, fallback", fallback_chunks_kernel<kGates>,
                       min(units_of(args), 2 * num_sms), cuda::grad::kThreads,
                       sizeof(cuda::grad::Shared), where, args);
}

}  // namespace
}  // namespace kda::cuda::sm90
