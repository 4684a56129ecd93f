// SPDX-License-Identifier: Apache-2.0
// A sum scan over the threads of a block, for kernels of one block that make maps of sequences. The
// caller has a __syncthreads() between its two parts, which it may need anyway.
#pragma once

#include <cstdint>

namespace kda::cuda {

/// Sums of the values of all threads before this one, and of all.
struct Scan {
  uint64_t before, all;
};

/// The first half, by all lanes of a warp: the sum over lanes before this one. The warp's sum goes
/// to its word of `sums`, in shared memory.
__device__ __noinline__ inline uint64_t scan_warp(uint64_t value, uint64_t* sums) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint64_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[threadIdx.x / 32] = sum;
  return sum - value;
}

/// The second half, behind the barrier: `before` is what the first half returned.
template <int kWarps>
__device__ __noinline__ Scan scan_block(uint64_t before, const uint64_t* sums) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t own = lane < kWarps ? sums[lane] : 0;
  uint64_t sum = own;
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += other;
  }
  return {before + __shfl_sync(0xffffffff, sum - own, static_cast<int>(threadIdx.x / 32)),
          __shfl_sync(0xffffffff, sum, kWarps - 1)};
}

}  // namespace kda::cuda
