// SPDX-License-Identifier: Apache-2.0
// Words in device memory by which one block tells another that something is there.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

/// What this thread wrote before, or what it knows to be written, comes before the word's 1.
__device__ __forceinline__ void raise_flag(uint32_t* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_for_flag(const uint32_t* flag) {
  uint32_t raised = 0;
  while (!raised)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
}

}  // namespace kda::cuda::ptx
