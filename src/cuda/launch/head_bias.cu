// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/head_bias.hpp"

#include "cuda/launch/launch.cuh"

namespace kda::cuda {
namespace {

constexpr int kThreads = 32;  // of a head

__global__ void __launch_bounds__(kThreads)
    expand_bias_kernel(const __grid_constant__ HeadBiasArgs a) {
  const int64_t head = blockIdx.x;
  const float bias = a.bias[head * a.stride];
  for (int64_t d = threadIdx.x; d < a.channels; d += kThreads) a.rows[head * a.channels + d] = bias;
}

/// Channels of a lane in order, then the lanes.
__global__ void __launch_bounds__(kThreads)
    sum_bias_kernel(const __grid_constant__ HeadBiasArgs a) {
  const int64_t head = blockIdx.x;
  double sum = 0;
  for (int64_t d = threadIdx.x; d < a.channels; d += kThreads) sum += a.rows[head * a.channels + d];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x == 0) a.bias[head * a.stride] = static_cast<float>(sum);
}

}  // namespace

Status launch_expand_bias(const HeadBiasArgs& args, const Launch& where) {
  return launch_kernel("expand_bias", expand_bias_kernel, args.heads, kThreads, 0, where, args);
}

Status launch_sum_bias(const HeadBiasArgs& args, const Launch& where) {
  return launch_kernel("sum_bias", sum_bias_kernel, args.heads, kThreads, 0, where, args);
}

}  // namespace kda::cuda
