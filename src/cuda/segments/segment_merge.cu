// SPDX-License-Identifier: Apache-2.0
#include "cuda/segments/segment_merge.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/segments/merge.cuh"

namespace kda::cuda {
namespace {

using merge::kColumns;

/// Blocks walk the segments of a sequence in order; per step S' = M S + B. A warp has 32 rows of M,
/// a lane 4 of them and every fourth quad of channels, loaded ahead: 8 rows x 64 bytes a
/// load. Shared memory is what bounds a step: a quad of S is read once for 4 rows.
template <int kK>
struct Merge {
  static constexpr int kThreads = kK;
  static constexpr int kLaneRows = 4;                    // 8 apart
  static constexpr int kPieces = kK / 16;                // 16 channels each, 4 a lane
  static constexpr int kRing = kK <= 128 ? kPieces : 4;  // of them on their way
  /// S of one step; the quads of a piece lie so that the 4 lanes of a row meet no bank conflict.
  struct State {
    float x[kPieces][4][4][kColumns];  // [piece][channel of the quad][quad][column]
  };

  const SegmentMergeArgs& a;
  State* states;  // [2], by parity of the segment
  const merge::Place place;
  const int lane_row, quad;
  const int row;  // of the outputs that this lane ends with
  float4 ring[kLaneRows][kRing];

  __device__ Merge(const SegmentMergeArgs& args, State* shared)
      : a(args),
        states(shared),
        place(merge::place_of(args, blockIdx.x)),
        lane_row(static_cast<int>(threadIdx.x) / 32 * 32 + static_cast<int>(threadIdx.x) % 32 / 4),
        quad(static_cast<int>(threadIdx.x) % 4),
        row(lane_row + quad * 8) {}

  __device__ float4 load_M(int64_t segment, int which, int piece) const {
    const int K = a.shape.K, r = lane_row + which * 8, c = piece * 16 + quad * 4;
    const float* source = a.M + ((segment * a.shape.HV + place.head) * K + r) * K + c;
    return merge::load4(source, r < K ? K - c : 0, K % 4 == 0);
  }
  /// Columns `half` * 4 .. of this lane's row.
  __device__ merge::Row own(int half) const {
    return {a, place.head, row, place.column0 + half * 4};
  }

  /// The start state of a segment: to device memory and to the next step.
  __device__ void put(int64_t segment, int parity, const float4 (&x)[2]) const {
    float* target = states[parity].x[row / 16][row % 4][row % 16 / 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own(half).store(segment, x[half]);
      *reinterpret_cast<float4*>(target + half * 4) = x[half];
    }
  }

  __device__ static void add(float (&sum)[kColumns], float m, const float4 (&s)[2]) {
    sum[0] = fmaf(m, s[0].x, sum[0]), sum[1] = fmaf(m, s[0].y, sum[1]);
    sum[2] = fmaf(m, s[0].z, sum[2]), sum[3] = fmaf(m, s[0].w, sum[3]);
    sum[4] = fmaf(m, s[1].x, sum[4]), sum[5] = fmaf(m, s[1].y, sum[5]);
    sum[6] = fmaf(m, s[1].z, sum[6]), sum[7] = fmaf(m, s[1].w, sum[7]);
  }
  __device__ void add_channel(float (&sum)[kLaneRows][kColumns], const float (&m)[kLaneRows],
                              const float* state) const {
    const float4 s[2] = {*reinterpret_cast<const float4*>(state),
                         *reinterpret_cast<const float4*>(state + 4)};
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) add(sum[r], m[r], s);
  }

  /// Partial sums of 4 rows over the 4 lanes that share them, plus B: each lane ends with its own
  /// row.
  __device__ void reduce(const float (&sum)[kLaneRows][kColumns], float4 (&x)[2]) const {
    float pair[2][kColumns], own[kColumns];
    const bool high = quad / 2, odd = quad % 2;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        pair[r][c] = (high ? sum[r + 2][c] : sum[r][c]) +
                     __shfl_xor_sync(~0u, high ? sum[r][c] : sum[r + 2][c], 2);
      own[c] =
          (odd ? pair[1][c] : pair[0][c]) + __shfl_xor_sync(~0u, odd ? pair[0][c] : pair[1][c], 1);
    }
    x[0].x += own[0], x[0].y += own[1], x[0].z += own[2], x[0].w += own[3];
    x[1].x += own[4], x[1].y += own[5], x[1].z += own[6], x[1].w += own[7];
  }

  __device__ void run() {
    const int64_t* offsets = a.segment_offsets + place.sequence;
    const int64_t first = offsets[0], last = offsets[1] - 1;
    if (last < first) return;
    const int64_t pieces = (last - first) * kPieces;  // of all steps, one after the other
    const auto fetch = [&](int64_t at, int slot) {
      if (at < pieces)
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r)
          ring[r][slot] = load_M(first + at / kPieces, r, static_cast<int>(at % kPieces));
    };
#pragma unroll
    for (int i = 0; i < kRing; ++i) fetch(i, i);
    float4 x[2] = {own(0).initial(place.sequence), own(1).initial(place.sequence)};
    put(first, 0, x);
    int parity = 0;
    for (int64_t segment = first; segment < last; ++segment, parity ^= 1) {
      x[0] = own(0).B(segment), x[1] = own(1).B(segment);
      __syncthreads();  // S of this step is complete
      float sum[kLaneRows][kColumns] = {};
      for (int begin = 0; begin < kPieces; begin += kRing) {
#pragma unroll
        for (int i = 0; i < kRing; ++i) {
          const float(*s)[4][kColumns] = states[parity].x[begin + i];
          const auto m = [&](int r) -> const float4& { return ring[r][i]; };
          add_channel(sum, {m(0).x, m(1).x, m(2).x, m(3).x}, s[0][quad]);
          add_channel(sum, {m(0).y, m(1).y, m(2).y, m(3).y}, s[1][quad]);
          add_channel(sum, {m(0).z, m(1).z, m(2).z, m(3).z}, s[2][quad]);
          add_channel(sum, {m(0).w, m(1).w, m(2).w, m(3).w}, s[3][quad]);
          fetch((segment - first) * kPieces + begin + i + kRing, i);
        }
      }
      reduce(sum, x);
      put(segment + 1, parity ^ 1, x);
    }
  }
};

template <int kK>
__global__ void __launch_bounds__(Merge<kK>::kThreads)
    segment_merge_kernel(const __grid_constant__ SegmentMergeArgs a) {
  __shared__ __align__(16) typename Merge<kK>::State states[2];
  Merge<kK>(a, states).run();
}

}  // namespace

Status launch_segment_merge(const SegmentMergeArgs& args, const Launch& launch) {
  const auto run = [&](auto kernel, int threads) {
    return launch_kernel("segment_merge", kernel, merge::blocks_of(args), threads, 0, launch, args);
  };
  if (args.shape.K <= 64) return run(segment_merge_kernel<64>, Merge<64>::kThreads);
  if (args.shape.K <= 128) return run(segment_merge_kernel<128>, Merge<128>::kThreads);
  return run(segment_merge_kernel<256>, Merge<256>::kThreads);
}

}  // namespace kda::cuda
