// SPDX-License-Identifier: Apache-2.0
// One block cuts a table of lengths (segments/sequence_cut.cuh), then makes maps: a thread a
// segment, then a thread a sequence. Compiled without contraction of products and sums.
#include "cuda/staged/backward/device_cut.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/segments/sequence_cut.cuh"
#include "cuda/tile/chunk_map.cuh"

namespace kda::cuda::staged {

// Functions that sequence_cut::Cutter asks for.
__device__ inline const CostSizes& sizes_of(const BackwardCutArgs& a) { return a.model.sizes; }
__device__ inline double minimum_step_of(const BackwardCutArgs& a) {
  return a.model.backward.minimum_step;
}
__device__ inline double time_us(const BackwardCutArgs& a, const CostSizes& sizes, int64_t tokens,
                                 const Cut& cut) {
  return candidate_us(a.model, sizes, {tokens, cut});
}
__device__ inline int64_t* segment_offsets_of(const BackwardCutArgs& a) {
  return a.out.segment_offsets;
}

namespace {

using sequence_cut::kThreads;

struct Maps : sequence_cut::Cutter<BackwardCutArgs> {
  using Cutter::Cutter;

  __device__ void make_segments() const {
    const int64_t count = a.out.segment_offsets[N];
    const int64_t last_token = s.is_cut ? a.map.cu_seqlens[N] : 0;
    const int64_t last_chunk = s.is_cut ? a.map.chunk_offsets[N] : 0;
#pragma unroll 1
    for (int64_t i = t; i <= a.out.units; i += kThreads) {
      TokenRange tokens{N - 1, last_token, last_token};  // an empty place
      int64_t chunk = last_chunk;
      bool first = false;
      if (i < count) {
        const Made made = segment(i);
        tokens = made.tokens, chunk = made.chunk, first = made.first;
      }
      a.out.cu_seqlens[i] = tokens.begin;
      a.out.chunk_offsets[i] = chunk;
      if (i == a.out.units) break;
      a.out.segments[i] = tokens;
      a.out.own_slots[i] = i < count ? static_cast<int32_t>(i) : -1;
      a.out.initial_slots[i] =
          first ? static_cast<int32_t>(state_slot(a.initial, tokens.sequence)) : -1;
      a.out.sequence_slots[i] = first ? static_cast<int32_t>(tokens.sequence) : -1;
    }
  }
  __device__ void make_sequences() const {
    const bool cut = s.is_cut;
#pragma unroll 1
    for (int n = t; n <= N; n += kThreads) {
      const int64_t token = a.map.cu_seqlens[n], chunk = a.map.chunk_offsets[n];
      a.out.cut_chunk_offsets[n] = cut ? chunk : 0;
      a.out.whole_cu_seqlens[n] = cut ? 0 : token;
      a.out.whole_chunk_offsets[n] = cut ? 0 : chunk;
      if (n < N) a.out.whole_slots[n] = cut ? -1 : n;
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    backward_cut_kernel(const __grid_constant__ BackwardCutArgs a) {
  __shared__ sequence_cut::Shared shared;
  Maps cutter(a, shared);
  cutter.sum();
  cutter.choose();
  cutter.make_offsets();
  cutter.make_segments();
  cutter.make_sequences();
}

}  // namespace

Status launch_backward_cut(const BackwardCutArgs& args, const Launch& launch) {
  return launch_kernel("backward_cut", backward_cut_kernel, 1, kThreads, 0, launch, args);
}

}  // namespace kda::cuda::staged
