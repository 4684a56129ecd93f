// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/chunk_grad.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/staged/backward/grad/chunk.cuh"

namespace kda::cuda {
namespace {

using namespace grad;

/// A block has a chunk and a value head, and takes 64 channels at a time.
__global__ void __launch_bounds__(kThreads, 2)
    chunk_grad_kernel(const __grid_constant__ HeadGates<ChunkGradArgs> a) {
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  GradContext c(a, *reinterpret_cast<Shared*>(ptx::dynamic_shared()), chunk, blockIdx.x,
                threadIdx.x, a.gate_step, a.tiled);
  run_chunk(c);
}

}  // namespace

Status launch_chunk_grad(const HeadGates<ChunkGradArgs>& args, const Launch& launch) {
  constexpr int kBytes = sizeof(Shared);
  static_assert(kBytes <= kMostShared);
  static_assert(2 * (kBytes + 1024) <= 164 * 1024, "two blocks on an SM of sm_80");
  return launch_kernel("chunk_grad", chunk_grad_kernel, args.num_chunks * args.shape.HV, kThreads,
                       kBytes, launch, args);
}

}  // namespace kda::cuda
