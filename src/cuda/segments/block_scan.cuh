// SPDX-License-Identifier: Apache-2.0
// A scan over the threads of a block, for kernels of one block that make maps of sequences.
#pragma once

#include <cstdint>

namespace kda::cuda {

/// Sums or maxima of the values of all threads before this one, and of all.
struct Scan {
  uint64_t before, all;
};
/// By all threads of kWarps warps; `sums`: shared memory, a word a warp.
template <int kWarps>
__device__ __noinline__ Scan block_scan(uint64_t value, bool largest, uint64_t* sums) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto both = [&](uint64_t a, uint64_t b) { return largest ? max(a, b) : a + b; };
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_sync(0xffffffff, value, (lane - step) & 31);
    if (lane >= step) value = both(value, other);
  }
  const uint64_t left = __shfl_sync(0xffffffff, value, (lane - 1) & 31);
  Scan result{lane > 0 ? left : 0, 0};
  if (lane == 31) sums[warp] = value;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kWarps; ++i) {
    const uint64_t sum = sums[i];
    if (i < warp) result.before = both(result.before, sum);
    result.all = both(result.all, sum);
  }
  __syncthreads();
  return result;
}

}  // namespace kda::cuda
