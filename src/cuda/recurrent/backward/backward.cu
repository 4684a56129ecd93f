// SPDX-License-Identifier: Apache-2.0
#include "cuda/ptx/pdl.cuh"
#include "cuda/recurrent/backward/head_gates.hpp"
#include "cuda/recurrent/backward/launch.cuh"

namespace kda::cuda {
namespace backward {

/// Blocks of a value head: some columns of its sums each.
inline constexpr int kPhases = 8, kSumColumns = kThreads / kPhases;
inline int64_t parameter_blocks(const BackwardArgs& a) {
  return a.shape.HV * ((a.shape.K + kSumColumns) / kSumColumns);
}

/// Sums over all pieces: 8 of them, each of every eighth piece in order, then these in order.
__global__ void __launch_bounds__(kThreads)
    backward_parameters_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ double totals[kPhases][kSumColumns];
  ptx::griddepcontrol_wait();
  const int K = a.shape.K, blocks = (K + kSumColumns) / kSumColumns;
  const int64_t head = blockIdx.x / blocks, stride = a.shape.HV * (K + 1);
  const int column = threadIdx.x % kSumColumns, phase = threadIdx.x / kSumColumns;
  const int d = static_cast<int>(blockIdx.x % blocks) * kSumColumns + column;
  double total = 0;
  if (d <= K) {
    const double* sums = a.sums + head * (K + 1) + d;
#pragma unroll 8
    for (int64_t piece = phase; piece < a.sizes.pieces; piece += kPhases)
      total += sums[piece * stride];
  }
  totals[phase][column] = total;
  __syncthreads();
  if (phase > 0 || d > K) return;
  total = 0;
#pragma unroll
  for (int i = 0; i < kPhases; ++i) total += totals[i][column];
  if (d == K && a.dA_log)
    a.dA_log[head * a.stride_dA] = static_cast<float>(total);
  else if (d < K && a.ddt_bias)
    a.ddt_bias[head * a.stride_ddt + d] = static_cast<float>(total);
}

}  // namespace backward

/// K from 65 to 128 has kernels of its own. Others take those of head_gates.cu: the same code,
/// which also reads the step of a gate and how heads are shared.
Status launch_backward(const BackwardArgs& args, const Launch& where) {
  if (args.shape.K <= 64 || args.shape.K > 128) return head_gates::launch_backward({args}, where);
  return backward::launch<128, 64>(args, where);
}

Status launch_parameters(const BackwardArgs& args, const Launch& where) {
  using namespace backward;
  return launch_kernel("backward_parameters", backward_parameters_kernel, parameter_blocks(args),
                       kThreads, 0, where, args);
}

}  // namespace kda::cuda
