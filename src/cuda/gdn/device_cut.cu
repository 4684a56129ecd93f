// SPDX-License-Identifier: Apache-2.0
// One block cuts a table of lengths (segments/sequence_cut.cuh), then a thread makes a segment.
// Compiled without contraction of products and sums.
#include "cuda/gdn/device_cut.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/segments/sequence_cut.cuh"

namespace kda::cuda::gdn {

// Functions that sequence_cut::Cutter asks for.
template <class Model>
__device__ const CostSizes& sizes_of(const CutArgs<Model>& a) {
  return a.model.sizes;
}
template <class Model>
__device__ double minimum_step_of(const CutArgs<Model>& a) {
  return a.model.costs.minimum_step;
}
template <class Model>
__device__ double time_us(const CutArgs<Model>& a, const CostSizes& sizes, int64_t tokens,
                          const Cut& cut) {
  const int64_t chunks = a.map.chunk_offsets[a.map.num_sequences];
  return candidate_us(a.model, {sizes, static_cast<double>(chunks * plan::kAutoChunk)},
                      {tokens, cut});
}
template <class Model>
__device__ int64_t* segment_offsets_of(const CutArgs<Model>& a) {
  return a.out.segment_offsets;
}

namespace {

template <class Model>
__global__ void __launch_bounds__(sequence_cut::kThreads)
    gdn_cut_kernel(const __grid_constant__ CutArgs<Model> a) {
  __shared__ sequence_cut::Shared shared;
  ptx::griddepcontrol_launch_dependents();
  sequence_cut::Cutter cutter(a, shared);
  cutter.sum();
  cutter.choose();
  cutter.make_offsets();
  const int64_t N = cutter.N, count = a.out.segment_offsets[N], end = a.map.cu_seqlens[N];
  const int64_t spans = count > 0 ? count : N;
#pragma unroll 1
  for (int64_t i = cutter.t; i < a.out.places; i += sequence_cut::kThreads) {
    TokenRange& made = a.out.segments[i];
    if (i >= spans) {
      made = {N - 1, end, end};
    } else if (count == 0) {
      made = {i, a.map.cu_seqlens[i], a.map.cu_seqlens[i + 1]};
    } else {
      made = cutter.segment(i).tokens;
      const int64_t n = made.sequence;
      if (i + 1 < a.out.segment_offsets[n + 1]) a.out.followed[i - n] = i;
    }
  }
  ptx::griddepcontrol_wait();
}

template <class Model>
Status launch(const CutArgs<Model>& args, const Launch& where) {
  return launch_kernel("gdn_cut", gdn_cut_kernel<Model>, 1, sequence_cut::kThreads, 0, where, args);
}

}  // namespace

Status launch_cut(const CutArgs<CutModel>& args, const Launch& where) {
  return launch(args, where);
}
Status launch_cut(const CutArgs<BackwardModel>& args, const Launch& where) {
  return launch(args, where);
}

}  // namespace kda::cuda::gdn
