// SPDX-License-Identifier: Apache-2.0
// The card's size and its clock, for kernels that choose when to begin. Results never depend on
// them.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

__device__ __forceinline__ unsigned nsmid() {
  unsigned count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return count;
}
__device__ __forceinline__ void wait_cycles(int64_t count) {
  const int64_t until = clock64() + count;
  while (clock64() < until) {
  }
}

}  // namespace kda::cuda::ptx
