// SPDX-License-Identifier: Apache-2.0
// Hints for what the L2 keeps. Results never depend on it.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

/// Asks for `bytes`, a multiple of 16, from an address down to the next such (sm_90; before it,
/// nothing).
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(uintptr_t from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from & ~uintptr_t{15}), "r"(bytes)
               : "memory");
#endif
}

/// A policy of st_cache_hint(): lines that the L2 gives up last, or as it likes.
__device__ __forceinline__ uint64_t createpolicy_evict_last(bool keep) {
  uint64_t policy;
  if (keep)
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  else
    asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void st_cache_hint(uint64_t policy, uint32_t* to, uint32_t x) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(x), "l"(policy)
               : "memory");
}

}  // namespace kda::cuda::ptx
