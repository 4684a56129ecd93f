// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/chunk_intra_fp16_sm90.hpp"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/intra/run.cuh"

namespace kda::cuda::sm90 {
namespace {

using T = __nv_bfloat16;
constexpr int kK = 128;
template <class Row>
using Fp16Context = intra::IntraContext<Row, kK, __half, /*kWithU=*/false>;
constexpr int kThreads = Fp16Context<T>::kThreads;

template <class Row>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_intra_fp16_kernel(const __grid_constant__ HeadGates<ChunkIntraArgs> a) {
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  using C = Fp16Context<Row>;
  C context(a, *reinterpret_cast<typename C::S*>(ptx::dynamic_shared()), chunk,
            static_cast<int>(a.shape.heads.remainder(blockIdx.x)), threadIdx.x);
  intra::run_intra<false>(context);
}

/// Its chunk is not the block's.
struct FallbackContext : intra::IntraContext<T, kK> {
  const unsigned index;
  __device__ FallbackContext(const HeadGates<ChunkIntraArgs>& args, const ChunkTokens& tokens,
                             unsigned tile)
      : IntraContext(args, *reinterpret_cast<S*>(ptx::dynamic_shared()), tokens,
                     static_cast<int>(args.shape.heads.remainder(tile)), threadIdx.x),
        index(tile) {}
  __device__ int64_t tile() const { return index; }
  __device__ T* tile_of(void* base, int64_t elements) const {
    return static_cast<T*>(base) + tile() * elements;
  }
};

struct FallbackArgs : HeadGates<ChunkIntraArgs> {
  const uint32_t* fallback;
  unsigned tiles;

  __device__ bool has(unsigned tile) const {
    if (tile >= tiles) return false;
    const ChunkTokens chunk = chunk_tokens(map, shape.heads.quotient(tile));
    if (chunk.count == 0) return false;
    const int64_t first = first_chunk(map, sequence_range(map, chunk.sequence));
    const uint32_t* words =
        fallback + (first * shape.HV + shape.heads.remainder(tile)) * kFallbackWords;
    return (words[0] | words[1]) != 0;
  }
};

/// A block looks at kThreads chunks at once.
__global__ void __launch_bounds__(kThreads, 2)
    fallback_chunk_intra_kernel(const __grid_constant__ FallbackArgs a) {
  const unsigned first = blockIdx.x * kThreads;
  if (!__syncthreads_or(a.has(first + threadIdx.x))) return;
#pragma unroll 1
  for (unsigned tile = first; tile < first + kThreads; ++tile) {
    if (!a.has(tile)) continue;
    const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(tile));
    FallbackContext context(a, chunk, tile);
    intra::run_intra<false>(context);
    __syncthreads();
  }
}

}  // namespace

namespace {

template <class Row>
Status launch_fp16(const HeadGates<ChunkIntraArgs>& args, const Launch& where) {
  constexpr auto kBytes = static_cast<int>(Fp16Context<Row>::S::bytes(true));
  static_assert(kBytes <= kSharedMemory / 2);
  return launch_kernel("chunk_intra_fp16", chunk_intra_fp16_kernel<Row>,
                       args.num_chunks * args.shape.HV, kThreads, kBytes, where, args);
}

}  // namespace

Status launch_chunk_intra_fp16(const HeadGates<ChunkIntraArgs>& args, bool fp16_rows,
                               const Launch& where) {
  return fp16_rows ? launch_fp16<__half>(args, where) : launch_fp16<T>(args, where);
}

Status launch_fallback_chunk_intra(const HeadGates<ChunkIntraArgs>& args, const uint32_t* fallback,
                                   const Launch& where) {
  const FallbackArgs mine{args, fallback, static_cast<unsigned>(args.num_chunks * args.shape.HV)};
  return launch_kernel("chunk_intra, fallback", fallback_chunk_intra_kernel,
                       (mine.tiles + kThreads - 1) / kThreads, kThreads,
                       static_cast<int>(sizeof(FallbackContext::S)), where, mine);
}

}  // namespace kda::cuda::sm90
