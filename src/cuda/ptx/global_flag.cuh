// SPDX-License-Identifier: Apache-2.0
// Words in device memory by which one block tells another that something is there.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

/// What this thread wrote before, or what it knows to be written, comes before the word's key.
__device__ __forceinline__ void st_release(uint64_t* flag, uint64_t key) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(key) : "memory");
}
__device__ __forceinline__ void wait_ld_acquire(const uint64_t* flag, uint64_t key) {
  uint64_t raised = ~key;
  while (raised != key)
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(raised) : "l"(flag) : "memory");
}

}  // namespace kda::cuda::ptx
