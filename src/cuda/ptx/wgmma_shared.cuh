// SPDX-License-Identifier: Apache-2.0
// Warpgroup products with both operands in shared memory, of which the second one has its columns
// side by side (wgmma.cuh).
#pragma once

#include "cuda/ptx/wgmma.cuh"

namespace kda::cuda::ptx {

/// d [64, 64] += a b, where b is 16 rows and 64 columns of a tile. a^T is the same with
/// kTransposed; else a is 64 rows and 16 columns of a tile.
template <class T, bool kTransposed>
__device__ __forceinline__ void wgmma_n64_shared_mn_major(float (&d)[8][4], uint64_t a,
                                                          uint64_t b) {
#define KDA_WGMMA_SHARED(type)                                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                        \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
               "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, %34, 1;"             \
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]),       \
                 "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]),       \
                 "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]),       \
                 "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),       \
                 "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]),       \
                 "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),       \
                 "+f"(d[7][2]), "+f"(d[7][3])                                                     \
               : "l"(a), "l"(b), "n"(kTransposed))
  if constexpr (std::is_same_v<T, __half>)
    KDA_WGMMA_SHARED("f16");
  else
    KDA_WGMMA_SHARED("bf16");
#undef KDA_WGMMA_SHARED
}

}  // namespace kda::cuda::ptx
