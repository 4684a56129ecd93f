// SPDX-License-Identifier: Apache-2.0
#include "cuda/segments/fold_states.hpp"

#include "cuda/launch/launch.cuh"

namespace kda::cuda {
namespace {

/// Columns of the state that a block carries through its chain; a thread has half of them.
constexpr int kColumns = 8;
constexpr int kOwn = kColumns / 2;
constexpr int kMostThreads = 512;  // two a row of 256

__device__ void add(float (&sum)[kOwn], float m, const float* row) {
  const float4 s = *reinterpret_cast<const float4*>(row);
  sum[0] = fmaf(m, s.x, sum[0]), sum[1] = fmaf(m, s.y, sum[1]);
  sum[2] = fmaf(m, s.z, sum[2]), sum[3] = fmaf(m, s.w, sum[3]);
}

/// sum += row `row` of M (transposed: column), times columns of the state. Channels in order, one
/// multiply-add each: the bits of the CPU's kernels that have one.
template <bool kTransposed, bool kVectors>
__device__ void multiply(float (&sum)[kOwn], const float* M, int row, int K, const float* state) {
  if constexpr (kTransposed) {
#pragma unroll 16
    for (int j = 0; j < K; ++j) add(sum, M[j * K + row], state + j * kColumns);
  } else if constexpr (kVectors) {
#pragma unroll 8
    for (int j = 0; j < K; j += 4) {
      const float4 m = *reinterpret_cast<const float4*>(M + row * K + j);
      add(sum, m.x, state + j * kColumns), add(sum, m.y, state + (j + 1) * kColumns);
      add(sum, m.z, state + (j + 2) * kColumns), add(sum, m.w, state + (j + 3) * kColumns);
    }
  } else {
#pragma unroll 8
    for (int j = 0; j < K; ++j) add(sum, M[row * K + j], state + j * kColumns);
  }
}

/// The step that begins chain `chain`.
__device__ int64_t first_step(const FoldArgs& a, int64_t chain) {
  int64_t step = 0;
  for (int64_t before = 0; step < a.num_steps; ++step)
    if (a.steps[step].start != kFoldNone && before++ == chain) break;
  return step;
}

/// Entries were checked in the host's table. One outside its buffer, in a table that is another,
/// reads and writes nothing: the state becomes NaN.
template <bool kTransposed, bool kVectors>
__global__ void __launch_bounds__(kMostThreads)
    fold_states_kernel(const __grid_constant__ FoldArgs a) {
  __shared__ __align__(16) float states[2][kMostThreads / 2 * kColumns];
  const int row = static_cast<int>(threadIdx.x) / 2;
  const int own = static_cast<int>(threadIdx.x) % 2 * kOwn;
  const int tiles = (a.V + kColumns - 1) / kColumns;
  const int head = static_cast<int>(blockIdx.x) / tiles % a.HV;
  const int64_t chain = static_cast<int64_t>(blockIdx.x) / tiles / a.HV;
  const int column = static_cast<int>(blockIdx.x) % tiles * kColumns + own;
  const bool active = row < a.K;
  const auto at = [&](int64_t entry) { return ((entry * a.HV + head) * a.K + row) * a.V + column; };
  const auto load = [&](float(&x)[kOwn], const float* from) {
#pragma unroll
    for (int c = 0; c < kOwn; ++c) x[c] = active && column + c < a.V ? from[c] : 0;
  };
  const auto fill = [](float(&x)[kOwn], float value) {
#pragma unroll
    for (float& element : x) element = value;
  };

  float x[kOwn] = {};
  int parity = 0;
  const int64_t first = first_step(a, chain);
  for (int64_t i = first; i < a.num_steps; ++i) {
    const FoldEntry step = a.steps[i];
    if (i > first && step.start != kFoldNone) break;
    if (step.start >= 0 && step.start < a.num_starts)
      load(x, a.starts + at(step.start));
    else if (step.start != kFoldNone)
      fill(x, step.start == kFoldZero ? 0.0F : NAN);
    if (step.map >= 0 && step.map < a.num_maps) {
      float* state = states[parity];
      if (active)
        *reinterpret_cast<float4*>(state + row * kColumns + own) = {x[0], x[1], x[2], x[3]};
      __syncthreads();  // the state is complete; that of two maps ago has been read
      const int64_t offset =
          step.map / a.maps_per_row * a.row_stride + step.map % a.maps_per_row * a.map_stride;
      load(x, a.A + offset + at(0));
      if (active)
        multiply<kTransposed, kVectors>(x, a.M + offset + static_cast<int64_t>(head) * a.K * a.K,
                                        row, a.K, state + own);
      parity ^= 1;
    } else if (step.map != kFoldNone) {
      fill(x, NAN);
    }
    if (active && step.store >= 0 && step.store < a.num_states)
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        if (column + c < a.V) a.states[at(step.store) + c] = x[c];
  }
}

}  // namespace

Status launch_fold_states(const FoldArgs& args, bool transposed, bool vectors,
                          const Launch& launch) {
  const int64_t tiles = (args.V + kColumns - 1) / kColumns;
  const int threads = (2 * args.K + 31) / 32 * 32;
  const auto run = [&](auto kernel) {
    return launch_kernel("fold_states", kernel, args.num_chains * args.HV * tiles, threads, 0,
                         launch, args);
  };
  if (transposed) return run(fold_states_kernel<true, false>);
  return vectors ? run(fold_states_kernel<false, true>) : run(fold_states_kernel<false, false>);
}

}  // namespace kda::cuda
