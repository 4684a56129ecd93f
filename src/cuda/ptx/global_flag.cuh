// SPDX-License-Identifier: Apache-2.0
// Words in device memory by which one block tells another that something is there.
#pragma once

#include <cstdint>

#include "cuda/ptx/bounded_wait.cuh"

namespace kda::cuda::ptx {

/// Stores the key. What this thread wrote before, or what it knows to be written, comes before it.
__device__ __forceinline__ void st_release(uint64_t* flag, uint64_t key) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(key) : "memory");
}
/// Waits until the word has the key.
__device__ __forceinline__ void wait_ld_acquire(const uint64_t* flag, uint64_t key) {
  const BoundedWait wait;
  uint64_t raised = ~key;
  while (raised != key) {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(raised) : "l"(flag) : "memory");
    wait.turn();
  }
}

}  // namespace kda::cuda::ptx
