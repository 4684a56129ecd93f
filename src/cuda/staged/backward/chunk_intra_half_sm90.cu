// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/chunk_intra_half_sm90.hpp"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/intra/run.cuh"

namespace kda::cuda::sm90 {
namespace {

using T = __nv_bfloat16;
constexpr int kK = 128;
using HalfContext = intra::IntraContext<T, kK, __half>;
constexpr int kThreads = HalfContext::kThreads;

__global__ void __launch_bounds__(kThreads, 2)
    chunk_intra_half_kernel(const __grid_constant__ HeadGates<ChunkIntraArgs> a) {
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  HalfContext context(a, *reinterpret_cast<HalfContext::S*>(ptx::dynamic_shared()), chunk,
                      static_cast<int>(a.shape.heads.remainder(blockIdx.x)), threadIdx.x);
  intra::run_intra<false>(context);
}

/// Its chunk is not the block's.
struct LeftContext : intra::IntraContext<T, kK> {
  const unsigned index;
  __device__ LeftContext(const HeadGates<ChunkIntraArgs>& args, const ChunkTokens& tokens,
                         unsigned tile)
      : IntraContext(args, *reinterpret_cast<S*>(ptx::dynamic_shared()), tokens,
                     static_cast<int>(args.shape.heads.remainder(tile)), threadIdx.x),
        index(tile) {}
  __device__ int64_t tile() const { return index; }
  __device__ T* tile_of(void* base, int64_t elements) const {
    return static_cast<T*>(base) + tile() * elements;
  }
};

struct LeftArgs : HeadGates<ChunkIntraArgs> {
  const uint32_t* left;
  unsigned tiles;

  __device__ bool has(unsigned tile) const {
    if (tile >= tiles) return false;
    const ChunkTokens chunk = chunk_tokens(map, shape.heads.quotient(tile));
    if (chunk.count == 0) return false;
    const int64_t first = first_chunk(map, sequence_span(map, chunk.sequence));
    const uint32_t* words = left + (first * shape.HV + shape.heads.remainder(tile)) * kLeftWords;
    return (words[0] | words[1]) != 0;
  }
};

/// A block looks at kThreads chunks at once.
__global__ void __launch_bounds__(kThreads, 2)
    left_chunk_intra_kernel(const __grid_constant__ LeftArgs a) {
  const unsigned first = blockIdx.x * kThreads;
  if (!__syncthreads_or(a.has(first + threadIdx.x))) return;
#pragma unroll 1
  for (unsigned tile = first; tile < first + kThreads; ++tile) {
    if (!a.has(tile)) continue;
    const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(tile));
    LeftContext context(a, chunk, tile);
    intra::run_intra<false>(context);
    __syncthreads();
  }
}

}  // namespace

Status launch_chunk_intra_half(const HeadGates<ChunkIntraArgs>& args, const Launch& where) {
  static_assert(sizeof(HalfContext::S) <= kSharedMemory / 2);
  return launch_kernel("chunk_intra_fp16", chunk_intra_half_kernel, args.num_chunks * args.shape.HV,
                       kThreads, static_cast<int>(sizeof(HalfContext::S)), where, args);
}

Status launch_left_chunk_intra(const HeadGates<ChunkIntraArgs>& args, const uint32_t* left,
                               const Launch& where) {
  const LeftArgs mine{args, left, static_cast<unsigned>(args.num_chunks * args.shape.HV)};
  return launch_kernel("chunk_intra, fallback", left_chunk_intra_kernel,
                       (mine.tiles + kThreads - 1) / kThreads, kThreads,
                       static_cast<int>(sizeof(LeftContext::S)), where, mine);
}

}  // namespace kda::cuda::sm90
