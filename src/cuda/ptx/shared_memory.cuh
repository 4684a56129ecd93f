// SPDX-License-Identifier: Apache-2.0
// Shared memory by address. Other loads and stores may pass these: what they write is there for
// others after a barrier.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x));
}
__device__ __forceinline__ float4 ld_shared_v4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}

}  // namespace kda::cuda::ptx
