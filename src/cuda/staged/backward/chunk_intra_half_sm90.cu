// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/chunk_intra_half_sm90.hpp"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/staged/intra/run.cuh"

namespace kda::cuda::sm90 {
namespace {

constexpr int kK = 128;
using Context = intra::IntraContext<__nv_bfloat16, kK, __half>;

__global__ void __launch_bounds__(Context::kThreads, 2)
    chunk_intra_half_kernel(const __grid_constant__ ChunkIntraArgs a) {
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  Context context(a, *reinterpret_cast<Context::S*>(ptx::dynamic_shared()), chunk,
                  static_cast<int>(a.shape.heads.remainder(blockIdx.x)), threadIdx.x);
  intra::run_intra<false>(context);
}

}  // namespace

Status launch_chunk_intra_half(const ChunkIntraArgs& args, const Launch& where) {
  static_assert(sizeof(Context::S) <= kSharedMemory / 2);
  return launch_kernel("chunk_intra", chunk_intra_half_kernel, args.num_chunks * args.shape.HV,
                       Context::kThreads, static_cast<int>(sizeof(Context::S)), where, args);
}

}  // namespace kda::cuda::sm90
