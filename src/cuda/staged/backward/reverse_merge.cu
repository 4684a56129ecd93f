// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/reverse_merge.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/segments/merge.cuh"
#include "cuda/tile/chunk_map.cuh"

namespace kda::cuda {
namespace {

using merge::kColumns;

/// Blocks walk the segments of a sequence from the last to the first. A thread has one row of M^T
/// and a part of its channels: neighbours read a row of M together, one step ahead.
template <int kK>
struct ReverseMerge {
  static constexpr int kParts = 4;
  static constexpr int kThreads = kParts * kK;
  static constexpr int kChannels = kK / kParts;  // of a part
  struct Shared {
    float state[kK][kColumns];
    float parts[kParts][kK][kColumns];
  };

  const SegmentMergeArgs& a;
  Shared& s;
  const merge::Place place;
  const int row, part;
  const merge::Row own;  // of the results: the first two parts have half of the columns each
  float m[kChannels];

  __device__ ReverseMerge(const SegmentMergeArgs& args, Shared& shared)
      : a(args),
        s(shared),
        place(merge::place_of(args, blockIdx.x)),
        row(static_cast<int>(threadIdx.x) % kK),
        part(static_cast<int>(threadIdx.x) / kK),
        own{args, place.head, row, place.column0 + part * 4} {}

  __device__ bool stores() const { return part < 2; }

  /// This thread's part of a row of M^T; `channels`: so many of it exist.
  __device__ const float* part_of(int64_t segment) const {
    const int64_t K = a.shape.K;
    return a.M + ((segment * a.shape.HV + place.head) * K + part * kChannels) * K + row;
  }
  __device__ float load_M(const float* M, int i, int channels) const {
    return i < channels ? M[i * a.shape.K] : 0.0f;
  }
  __device__ void put(int64_t segment, float4 x) const {
    own.store(segment, x);
    *reinterpret_cast<float4*>(&s.state[row][part * 4]) = x;
  }

  __device__ void run() {
    const int64_t* offsets = a.segment_offsets + place.sequence;
    const int64_t first = offsets[0], last = offsets[1] - 1;
    if (last < first) return;
    const int channels = row < a.shape.K ? a.shape.K - part * kChannels : 0;
    const float* M = part_of(last);
    if (first < last)
#pragma unroll
      for (int i = 0; i < kChannels; ++i) m[i] = load_M(M, i, channels);
    if (stores()) put(last, own.initial(place.sequence));
    for (int64_t segment = last; segment > first; --segment) {
      float4 x{};
      if (stores()) x = own.B(segment);
      __syncthreads();  // dS of this step is complete
      float sum[kColumns] = {};
      M = part_of(segment - 1);
      const int next = segment - 1 > first ? channels : 0;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          sum[c] = fmaf(m[i], s.state[part * kChannels + i][c], sum[c]);
        m[i] = load_M(M, i, next);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) s.parts[part][row][c] = sum[c];
      __syncthreads();  // all have read dS, and the sums are complete
      if (!stores()) continue;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float* y = s.parts[p][row] + part * 4;
        x.x += y[0], x.y += y[1], x.z += y[2], x.w += y[3];
      }
      put(segment - 1, x);
    }
  }
};

template <int kK>
__global__ void __launch_bounds__(ReverseMerge<kK>::kThreads)
    reverse_merge_kernel(const __grid_constant__ SegmentMergeArgs a) {
  __shared__ __align__(16) typename ReverseMerge<kK>::Shared shared;
  ReverseMerge<kK>(a, shared).run();
}

template <int kK>
Status launch(const SegmentMergeArgs& args, const Launch& where) {
  return launch_kernel("reverse_merge", reverse_merge_kernel<kK>, merge::blocks_of(args),
                       ReverseMerge<kK>::kThreads, 0, where, args);
}

constexpr int kSequenceThreads = 128;

__global__ void __launch_bounds__(kSequenceThreads)
    segment_sequences_kernel(const __grid_constant__ SegmentSequencesArgs a) {
  const int64_t s = static_cast<int64_t>(blockIdx.x) * kSequenceThreads + threadIdx.x;
  if (s >= a.map.num_segments) return;
  const TokenRange tokens = a.map.segments[s];
  const int64_t before = first_chunk(a.map, tokens);
  const bool first = tokens.begin == sequence_range(a.map, tokens.sequence).begin;
  // A sequence without tokens has one segment; such segments begin where the next one does.
  a.cu_seqlens[s] = tokens.begin;
  a.chunk_offsets[s] = before;
  a.initial_slots[s] = first ? static_cast<int32_t>(state_slot(a.initial, tokens.sequence)) : -1;
  a.sequence_slots[s] = first ? static_cast<int32_t>(tokens.sequence) : -1;
  if (s < a.map.num_segments - 1) return;
  a.cu_seqlens[s + 1] = tokens.end;
  a.chunk_offsets[s + 1] = before + chunks_of(tokens.end - tokens.begin);
}

}  // namespace

Status launch_reverse_merge(const SegmentMergeArgs& args, const Launch& where) {
  return args.shape.K <= 64 ? launch<64>(args, where) : launch<128>(args, where);
}

Status launch_segment_sequences(const SegmentSequencesArgs& args, const Launch& where) {
  const int64_t blocks = (args.map.num_segments + kSequenceThreads - 1) / kSequenceThreads;
  return launch_kernel("segment_sequences", segment_sequences_kernel, blocks, kSequenceThreads, 0,
                       where, args);
}

}  // namespace kda::cuda
