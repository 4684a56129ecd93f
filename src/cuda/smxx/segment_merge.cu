// SPDX-License-Identifier: Apache-2.0
#include "cuda/smxx/segment_merge.hpp"

#include "cuda/tile/elements.cuh"

namespace kda::cuda {
namespace {

constexpr int kColumns = 8;  // of the state, a block: M is read from L2 by V / 8 blocks
constexpr int kPiece = 32;   // channels of M in registers at once; the next are on their way

/// Two threads a row of M, half of the channels each; a thread has all columns of the tile.
template <int kK>
__global__ void __launch_bounds__(2 * kK)
    segment_merge_kernel(const __grid_constant__ SegmentMergeArgs a) {
  constexpr int kThreads = 2 * kK;
  constexpr int kPieces = kK / 2 / kPiece;
  __shared__ __align__(16) float state[2][kK][kColumns];  // by parity of the segment
  const int K = a.shape.K, V = a.shape.V;
  const unsigned tiles = (V + kColumns - 1) / kColumns;
  const int column0 = static_cast<int>(blockIdx.x % tiles) * kColumns;
  const auto HV = static_cast<unsigned>(a.shape.HV);
  const int64_t head = blockIdx.x / tiles % HV;
  const int64_t n = blockIdx.x / tiles / HV;
  const int tid = threadIdx.x, row = tid / 2, first_channel = tid % 2 * (kK / 2);

  const int64_t slot = state_slot(a.initial, n);
  for (int i = tid; i < kK * kColumns; i += kThreads) {
    const int k = i / kColumns, v = column0 + i % kColumns;
    const bool inside = slot >= 0 && k < K && v < V;
    state[0][k][i % kColumns] =
        inside ? load_state(a.initial, state_offset(a.initial, slot, head, k, v)) : 0.0f;
  }
  float next[kPiece];
  const auto load = [&](int64_t segment, int piece) {
    const int channel = first_channel + piece * kPiece;
    const float* M = a.M + ((segment * a.shape.HV + head) * K + row) * K + channel;
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      float4 x{};
      if (row < K && channel + i + 4 <= K && K % 4 == 0) {
        x = *reinterpret_cast<const float4*>(M + i);
      } else if (row < K) {
        if (channel + i < K) x.x = M[i];
        if (channel + i + 1 < K) x.y = M[i + 1];
        if (channel + i + 2 < K) x.z = M[i + 2];
        if (channel + i + 3 < K) x.w = M[i + 3];
      }
      next[i] = x.x, next[i + 1] = x.y, next[i + 2] = x.z, next[i + 3] = x.w;
    }
  };
  const int64_t first = a.segment_offsets[n], last = a.segment_offsets[n + 1] - 1;
  if (first < last) load(first, 0);
  __syncthreads();
  int parity = 0;
  for (int64_t segment = first; segment <= last; ++segment, parity ^= 1) {
    const int64_t at = (segment * a.shape.HV + head) * K * V;
    for (int i = tid; i < K * kColumns; i += kThreads) {
      const int k = i / kColumns, v = column0 + i % kColumns;
      if (v < V) a.states_in[at + static_cast<int64_t>(k) * V + v] = state[parity][k][i % kColumns];
    }
    if (segment == last) break;
    float sum[kColumns] = {};
    if (tid % 2 == 0 && row < K)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column0 + c < V) sum[c] = a.B[at + static_cast<int64_t>(row) * V + column0 + c];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float m[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) m[i] = next[i];
      if (piece + 1 < kPieces)
        load(segment, piece + 1);
      else if (segment + 1 < last)
        load(segment + 1, 0);
      const float(*s)[kColumns] = state[parity] + first_channel + piece * kPiece;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const float4 low = *reinterpret_cast<const float4*>(&s[i][0]);
        const float4 high = *reinterpret_cast<const float4*>(&s[i][4]);
        sum[0] = fmaf(m[i], low.x, sum[0]), sum[1] = fmaf(m[i], low.y, sum[1]);
        sum[2] = fmaf(m[i], low.z, sum[2]), sum[3] = fmaf(m[i], low.w, sum[3]);
        sum[4] = fmaf(m[i], high.x, sum[4]), sum[5] = fmaf(m[i], high.y, sum[5]);
        sum[6] = fmaf(m[i], high.z, sum[6]), sum[7] = fmaf(m[i], high.w, sum[7]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] += __shfl_xor_sync(~0u, sum[c], 1);
    *reinterpret_cast<float4*>(&state[parity ^ 1][row][tid % 2 * 4]) =
        tid % 2 == 0 ? make_float4(sum[0], sum[1], sum[2], sum[3])
                     : make_float4(sum[4], sum[5], sum[6], sum[7]);
    __syncthreads();
  }
}

}  // namespace

Status launch_segment_merge(const SegmentMergeArgs& args, const Launch& launch) {
  const int64_t tiles = (args.shape.V + kColumns - 1) / kColumns;
  const int64_t blocks = args.map.num_sequences * args.shape.HV * tiles;
  const auto run = [&](auto kernel, int threads) {
    return launch_kernel("segment_merge", kernel, blocks, threads, 0, launch, args);
  };
  if (args.shape.K <= 64) return run(segment_merge_kernel<64>, 128);
  if (args.shape.K <= 128) return run(segment_merge_kernel<128>, 256);
  return run(segment_merge_kernel<256>, 512);
}

}  // namespace kda::cuda
