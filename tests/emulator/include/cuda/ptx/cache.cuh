// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/cache.cuh on a CPU: there is no L2 to ask.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

inline void cp_async_bulk_prefetch_l2(uintptr_t, uint32_t) {}
inline uint64_t createpolicy_evict_last(bool) { return 0; }
inline void st_cache_hint(uint64_t, uint32_t* to, uint32_t x) { *to = x; }

}  // namespace kda::cuda::ptx
