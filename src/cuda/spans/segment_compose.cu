// SPDX-License-Identifier: Apache-2.0
#include "cuda/spans/segment_compose.hpp"

#include "cuda/launch/launch.cuh"

namespace kda::cuda {
namespace {

/// Columns of [M | B] that a block carries through the segments of a sequence.
constexpr int kColumns = 8;
/// Floats from one row of a state to the next: the two lanes of a row read without bank conflicts.
constexpr int kRowFloats = 12;

__device__ void add(float (&sum)[kColumns], float m, const float* row) {
  const float4 low = *reinterpret_cast<const float4*>(row);
  const float4 high = *reinterpret_cast<const float4*>(row + 4);
  sum[0] = fmaf(m, low.x, sum[0]), sum[1] = fmaf(m, low.y, sum[1]);
  sum[2] = fmaf(m, low.z, sum[2]), sum[3] = fmaf(m, low.w, sum[3]);
  sum[4] = fmaf(m, high.x, sum[4]), sum[5] = fmaf(m, high.y, sum[5]);
  sum[6] = fmaf(m, high.z, sum[6]), sum[7] = fmaf(m, high.w, sum[7]);
}

/// Two lanes have a row: every other four channels of its sums, then four columns each.
template <int kK>
__global__ void __launch_bounds__(2 * kK)
    segment_compose_kernel(const __grid_constant__ SegmentComposeArgs a) {
  __shared__ __align__(16) float states[2][kK * kRowFloats];
  const int row = static_cast<int>(threadIdx.x) / 2, half = static_cast<int>(threadIdx.x) % 2;
  const int columns_of_M = a.M_out ? kK : 0;
  const int tiles = (columns_of_M + (a.B_out ? kK : 0)) / kColumns;
  const int head = static_cast<int>(blockIdx.x) / tiles % a.shape.HV;
  const int64_t n = static_cast<int64_t>(blockIdx.x) / tiles / a.shape.HV;
  const int column = static_cast<int>(blockIdx.x) % tiles * kColumns;
  const bool of_M = column < columns_of_M;
  const int own = (of_M ? column : column - columns_of_M) + half * 4;  // of the four columns
  const auto at = [&](int64_t entry) {
    return ((entry * a.shape.HV + head) * kK + row) * static_cast<int64_t>(kK);
  };

  float4 x{};  // from the identity, or from zero
  if (of_M)
    x = {float(row == own), float(row == own + 1), float(row == own + 2), float(row == own + 3)};
  int parity = 0;
  const auto put = [&] {
    *reinterpret_cast<float4*>(&states[parity][row * kRowFloats + half * 4]) = x;
    __syncthreads();  // the state is complete; that of two steps ago has been read
  };
  put();
  for (int64_t segment = a.offsets[n]; segment < a.offsets[n + 1]; ++segment) {
    float sum[kColumns] = {};
#pragma unroll
    for (int j = 0; j < kK / 8; ++j) {
      const int channel = (2 * j + half) * 4;
      const float4 m = *reinterpret_cast<const float4*>(a.M + at(segment) + channel);
      const float* state = &states[parity][channel * kRowFloats];
      add(sum, m.x, state), add(sum, m.y, state + kRowFloats);
      add(sum, m.z, state + 2 * kRowFloats), add(sum, m.w, state + 3 * kRowFloats);
    }
#pragma unroll
    for (float& value : sum) value += __shfl_xor_sync(~0u, value, 1);
    x = half ? float4{sum[4], sum[5], sum[6], sum[7]} : float4{sum[0], sum[1], sum[2], sum[3]};
    if (!of_M) {
      const float4 b = *reinterpret_cast<const float4*>(a.B + at(segment) + own);
      x.x += b.x, x.y += b.y, x.z += b.z, x.w += b.w;
    }
    parity ^= 1;
    put();
  }
  *reinterpret_cast<float4*>((of_M ? a.M_out : a.B_out) + at(n) + own) = x;
}

constexpr int kPlaceThreads = 256;

__global__ void __launch_bounds__(kPlaceThreads)
    segment_place_kernel(const __grid_constant__ SegmentPlaceArgs a) {
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
