// SPDX-License-Identifier: Apache-2.0
#include "cuda/smxx/segment_merge.hpp"

#include "cuda/tile/elements.cuh"

namespace kda::cuda {
namespace {

constexpr int kColumns = 8;  // of the state, a block; every block of a head reads all of M

/// Blocks walk the segments of a sequence in order; per step S' = M S + B. A warp has 16 rows of M, a
/// lane 2 of them and every fourth quad of channels, loaded one step ahead: 8 rows x 64 bytes a load.
template <int kK>
struct Merge {
  static constexpr int kThreads = 2 * kK;
  static constexpr int kPieces = kK / 16;  // 16 channels each, 4 a lane
  static constexpr int kRing = kK <= 128 ? kPieces : 4;  // of them on their way: a step if they fit
  /// S of one step; the quads of a piece lie so that the 4 lanes of a row meet no bank conflict.
  struct State {
    float x[kPieces][4][4][kColumns];  // [piece][channel of the quad][quad][column]
  };

  const SegmentMergeArgs& a;
  State* states;  // [2], by parity of the segment
  const int64_t head;
  const int column0;  // of the tile
  const int lane_row, quad;
  const int row, column;  // of the 4 outputs that this lane ends with
  float4 ring[2][kRing];

  __device__ Merge(const SegmentMergeArgs& args, State* shared, int64_t of_head, int first_column)
      : a(args),
        states(shared),
        head(of_head),
        column0(first_column),
        lane_row(static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        quad(static_cast<int>(threadIdx.x) % 4),
        row(lane_row + quad / 2 * 8),
        column(quad % 2 * 4) {}

  __device__ int64_t base(int64_t segment) const { return segment * a.shape.HV + head; }

  __device__ static float4 load4(const float* source, int count, bool vector) {
    if (count >= 4 && vector) return *reinterpret_cast<const float4*>(source);
    return {count > 0 ? source[0] : 0.0f, count > 1 ? source[1] : 0.0f,
            count > 2 ? source[2] : 0.0f, count > 3 ? source[3] : 0.0f};
  }
  __device__ static void store4(float* target, int count, bool vector, float4 x) {
    if (count >= 4 && vector) {
      *reinterpret_cast<float4*>(target) = x;
      return;
    }
    if (count > 0) target[0] = x.x;
    if (count > 1) target[1] = x.y;
    if (count > 2) target[2] = x.z;
    if (count > 3) target[3] = x.w;
  }

  __device__ float4 load_M(int64_t segment, int half, int piece) const {
    const int K = a.shape.K, r = lane_row + half * 8, c = piece * 16 + quad * 4;
    const float* source = a.M + (base(segment) * K + r) * K + c;
    return load4(source, r < K ? K - c : 0, K % 4 == 0);
  }
  /// This lane's 4 elements of B or of a start state.
  __device__ int64_t own_offset(int64_t segment) const {
    return (base(segment) * a.shape.K + row) * a.shape.V + column0 + column;
  }
  __device__ int own_count() const { return row < a.shape.K ? a.shape.V - column0 - column : 0; }
  __device__ bool vectors() const { return a.shape.V % 4 == 0; }

  __device__ float4 initial(int64_t n) const {
    const int64_t slot = state_slot(a.initial, n);
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (slot >= 0 && i < own_count())
        x[i] = load_state(a.initial,
                          state_offset(a.initial, slot, head, row, column0 + column + i));
    return {x[0], x[1], x[2], x[3]};
  }

  /// The start state of a segment: to device memory and to the next step.
  __device__ void put(int64_t segment, int parity, float4 x) const {
    store4(a.states_in + own_offset(segment), own_count(), vectors(), x);
    *reinterpret_cast<float4*>(&states[parity].x[row / 16][row % 4][row % 16 / 4][column]) = x;
  }

  __device__ static void add(float (&sum)[kColumns], float m, const float* s) {
    const float4 low = *reinterpret_cast<const float4*>(s);
    const float4 high = *reinterpret_cast<const float4*>(s + 4);
    sum[0] = fmaf(m, low.x, sum[0]), sum[1] = fmaf(m, low.y, sum[1]);
    sum[2] = fmaf(m, low.z, sum[2]), sum[3] = fmaf(m, low.w, sum[3]);
    sum[4] = fmaf(m, high.x, sum[4]), sum[5] = fmaf(m, high.y, sum[5]);
    sum[6] = fmaf(m, high.z, sum[6]), sum[7] = fmaf(m, high.w, sum[7]);
  }

  /// Partial sums of 2 rows x 8 columns over the 4 lanes of a row: each ends with its own 4.
  __device__ float4 reduce(const float (&low)[kColumns], const float (&high)[kColumns]) const {
    float mine[kColumns], out[4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float given = quad / 2 ? low[c] : high[c], kept = quad / 2 ? high[c] : low[c];
      mine[c] = kept + __shfl_xor_sync(~0u, given, 2);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float given = quad % 2 ? mine[c] : mine[c + 4], kept = quad % 2 ? mine[c + 4] : mine[c];
      out[c] = kept + __shfl_xor_sync(~0u, given, 1);
    }
    return {out[0], out[1], out[2], out[3]};
  }

  __device__ void run(int64_t n) {
    const int64_t first = a.segment_offsets[n], last = a.segment_offsets[n + 1] - 1;
    if (last < first) return;
    const int64_t pieces = (last - first) * kPieces;  // of all steps, one after the other
    const auto fetch = [&](int64_t at, int slot) {
      if (at < pieces)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ring[half][slot] = load_M(first + at / kPieces, half, static_cast<int>(at % kPieces));
    };
#pragma unroll
    for (int i = 0; i < kRing; ++i) fetch(i, i);
    put(first, 0, initial(n));
    int parity = 0;
    for (int64_t segment = first; segment < last; ++segment, parity ^= 1) {
      const float4 B = load4(a.B + own_offset(segment), own_count(), vectors());
      __syncthreads();  // S of this step is complete
      float low[kColumns] = {}, high[kColumns] = {};
      for (int begin = 0; begin < kPieces; begin += kRing) {
#pragma unroll
        for (int i = 0; i < kRing; ++i) {
          const float4 x = ring[0][i], y = ring[1][i];
          fetch((segment - first) * kPieces + begin + i + kRing, i);
          const float(*s)[4][kColumns] = states[parity].x[begin + i];
          add(low, x.x, s[0][quad]), add(high, y.x, s[0][quad]);
          add(low, x.y, s[1][quad]), add(high, y.y, s[1][quad]);
          add(low, x.z, s[2][quad]), add(high, y.z, s[2][quad]);
          add(low, x.w, s[3][quad]), add(high, y.w, s[3][quad]);
        }
      }
      float4 x = reduce(low, high);
      x.x += B.x, x.y += B.y, x.z += B.z, x.w += B.w;
      put(segment + 1, parity ^ 1, x);
    }
  }
};

template <int kK>
__global__ void __launch_bounds__(Merge<kK>::kThreads)
    segment_merge_kernel(const __grid_constant__ SegmentMergeArgs a) {
  __shared__ __align__(16) typename Merge<kK>::State states[2];
  const unsigned tiles = (a.shape.V + kColumns - 1) / kColumns;
  const auto HV = static_cast<unsigned>(a.shape.HV);
  Merge<kK> merge(a, states, blockIdx.x / tiles % HV,
                  static_cast<int>(blockIdx.x % tiles) * kColumns);
  merge.run(blockIdx.x / tiles / HV);
}

}  // namespace

Status launch_segment_merge(const SegmentMergeArgs& args, const Launch& launch) {
  const int64_t tiles = (args.shape.V + kColumns - 1) / kColumns;
  const int64_t blocks = args.map.num_sequences * args.shape.HV * tiles;
  const auto run = [&](auto kernel, int threads) {
    return launch_kernel("segment_merge", kernel, blocks, threads, 0, launch, args);
  };
  if (args.shape.K <= 64) return run(segment_merge_kernel<64>, Merge<64>::kThreads);
  if (args.shape.K <= 128) return run(segment_merge_kernel<128>, Merge<128>::kThreads);
  return run(segment_merge_kernel<256>, Merge<256>::kThreads);
}

}  // namespace kda::cuda
