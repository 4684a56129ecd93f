// SPDX-License-Identifier: Apache-2.0
// Warpgroup products with tiles of fewer than 64 rows (wgmma.cuh).
#pragma once

#include "cuda/ptx/wgmma.cuh"

namespace kda::cuda::ptx {

/// The compiler moves nothing back over this. Else it would put what follows between products, each
/// of which waits for it, or loads where many are on their way. `never` is false, which it must not
/// know.
__device__ __forceinline__ void compiler_fence(bool never) {
  if (never) asm volatile("trap;" ::: "memory");
}

/// Makes accumulators something new to the compiler, at the start of a loop. Else it keeps what
/// comes into the loop and what the loop makes in different registers, and moves all of them in
/// every turn. `zero` is a 0 that the compiler does not know.
template <int kTiles>
__device__ __forceinline__ void rename_registers(float (&d)[kTiles][4], unsigned zero) {
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i)
    asm volatile("xor.b32 %0, %0, %1;" : "+f"(d[i / 4][i % 4]) : "r"(zero));
}

/// d [64, 32] += a [64, 16] b, where b^T is 32 rows and 16 columns of a tile; without kAccumulate
/// d = a b.
template <class T, bool kAccumulate>
__device__ __forceinline__ void wgmma_n32_k_major(float (&d)[4][4], const uint32_t (&a)[4],
                                                  uint64_t b) {
#define KDA_WGMMA_32(type)                                                                        \
  asm volatile(                                                                                   \
      "{.reg .pred p; setp.ne.b32 p, %21, 0; "                                                    \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                 \
      " "                                                                                         \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, "         \
      "p, 1, 1, 0;}"                                                                              \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), \
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate))
  if constexpr (std::is_same_v<T, __half>)
    KDA_WGMMA_32("f16");
  else
    KDA_WGMMA_32("bf16");
#undef KDA_WGMMA_32
}

/// d [64, 64 or 128] += a [64, 16] b, where b is the 16 rows and all columns of a tile of 16 rows.
template <class T, int kTiles>
__device__ __forceinline__ void wgmma_16_mn_major(float (&d)[kTiles][4], const uint32_t (&a)[4],
                                                  uint64_t b) {
  wgmma_mn_major<T>(d, a, b);  // how far the next columns are is in the descriptor
}

}  // namespace kda::cuda::ptx
