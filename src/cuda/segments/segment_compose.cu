// SPDX-License-Identifier: Apache-2.0
#include "cuda/segments/segment_compose.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace kda::cuda {
namespace {

/// Columns of [M | B] that a block carries through the segments of a sequence, in groups of four.
constexpr int kColumns = 16, kGroups = kColumns / 4;
constexpr int kRows = 2;  // of a thread

/// Where a row's columns of a group are: the four lanes that read rows of different channels at
/// once read different banks.
__device__ float4& at(float4* states, int row, int group) {
  return states[row * kGroups + (group ^ row / 4 % kGroups)];
}
__device__ void add(float (&sum)[4], float m, const float4& s) {
  sum[0] = fmaf(m, s.x, sum[0]), sum[1] = fmaf(m, s.y, sum[1]);
  sum[2] = fmaf(m, s.z, sum[2]), sum[3] = fmaf(m, s.w, sum[3]);
}
/// Sums of two lanes that are `apart`: each keeps its half of the groups.
template <int kHalf>
__device__ void keep_half(float (&kept)[kHalf][4], const float (&sums)[2 * kHalf][4], int apart) {
  const bool upper = static_cast<int>(threadIdx.x) & apart;
#pragma unroll
  for (int group = 0; group < kHalf; ++group)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float low = sums[group][c], high = sums[kHalf + group][c];
      kept[group][c] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, apart);
    }
}

/// Four lanes have the same rows: every fourth four channels of their sums, then a group each.
template <int kK>
__global__ void __launch_bounds__(2 * kK, 256 / kK)
    segment_compose_kernel(const __grid_constant__ SegmentComposeArgs a) {
  __shared__ float4 states[2][kK * kGroups];
  ptx::griddepcontrol_wait();
  const int lane = static_cast<int>(threadIdx.x) % 4, pair = static_cast<int>(threadIdx.x) / 4;
  const int columns_of_M = a.M_out ? kK : 0;
  const int tiles = (columns_of_M + (a.B_out ? kK : 0)) / kColumns;
  const int head = static_cast<int>(blockIdx.x) / tiles % a.shape.HV;
  const int64_t n = static_cast<int64_t>(blockIdx.x) / tiles / a.shape.HV;
  const int column = static_cast<int>(blockIdx.x) % tiles * kColumns;
  const bool of_M = column < columns_of_M;
  const int own = (of_M ? column : column - columns_of_M) + lane * 4;
  const auto row = [&](int r) { return pair + r * kK / kRows; };
  const auto place = [&](int64_t entry, int r) {
    return ((entry * a.shape.HV + head) * kK + row(r)) * static_cast<int64_t>(kK);
  };
  const auto read = [](const float* from) { return *reinterpret_cast<const float4*>(from); };

  int64_t segment = a.offsets[n];
  float4 x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = read((of_M ? a.M : a.B) + place(segment, r) + own);
  for (int parity = 0; ++segment < a.offsets[n + 1]; parity ^= 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) at(states[parity], row(r), lane) = x[r];
    __syncthreads();  // the state is complete; that of two steps ago has been read
    float sums[kRows][kGroups][4] = {};
#pragma unroll kK / 32
    for (int j = 0; j < kK / 16; ++j) {
      const int channel = (4 * j + lane) * 4;
      float m[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        *reinterpret_cast<float4*>(m[r]) = read(a.M + place(segment, r) + channel);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const float4 s = at(states[parity], channel + i, group);
#pragma unroll
          for (int r = 0; r < kRows; ++r) add(sums[r][group], m[r][i], s);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float half[2][4], mine[1][4];
      keep_half(half, sums[r], 2);
      keep_half(mine, half, 1);
      x[r] = {mine[0][0], mine[0][1], mine[0][2], mine[0][3]};
      if (of_M) continue;
      const float4 b = read(a.B + place(segment, r) + own);
      x[r].x += b.x, x[r].y += b.y, x[r].z += b.z, x[r].w += b.w;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    *reinterpret_cast<float4*>((of_M ? a.M_out : a.B_out) + place(n, r) + own) = x[r];
}

constexpr int kPlaceThreads = 256;

__global__ void __launch_bounds__(kPlaceThreads)
    segment_place_kernel(const __grid_constant__ SegmentPlaceArgs a) {
  ptx::griddepcontrol_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x;
  if (i >= a.num_sequences * a.state_floats) return;
  const int64_t n = i / a.state_floats;
  a.states_in[a.offsets[n] * a.state_floats + i % a.state_floats] = a.starts[i];
}

}  // namespace

Status launch_segment_compose(const SegmentComposeArgs& args, const Launch& launch) {
  const int64_t K = args.shape.K;
  const int64_t tiles = ((args.M_out ? K : 0) + (args.B_out ? K : 0)) / kColumns;
  const int64_t blocks = args.num_sequences * args.shape.HV * tiles;
  if (blocks == 0) return {};
  const auto run = [&](auto kernel) {
    return launch_kernel("segment_compose", kernel, blocks, static_cast<int>(2 * K), 0, launch,
                         args);
  };
  return K == 64 ? run(segment_compose_kernel<64>) : run(segment_compose_kernel<128>);
}

Status launch_segment_place(const SegmentPlaceArgs& args, const Launch& launch) {
  const int64_t blocks =
      (args.num_sequences * args.state_floats + kPlaceThreads - 1) / kPlaceThreads;
  if (blocks == 0) return {};
  return launch_kernel("segment_place", segment_place_kernel, blocks, kPlaceThreads, 0, launch,
                       args);
}

}  // namespace kda::cuda
