// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup products (sm_90a): a warpgroup multiplies 64 rows, of which each warp has 16.
// Fragments of a and d lie in registers as those of mma.sync m16n8k16 do; b lies in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kda::cuda::ptx {

/// Descriptor of a tile of kRows rows of 128 bytes, pieces swizzled (tile/swizzle.hpp), aligned to
/// 1024 bytes; the next 64 columns of the tile follow it.
template <int kRows = 64>
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t shared_address) {
  constexpr uint64_t kNextColumns = kRows * 128 >> 4, kNextRows = 1024 >> 4, kSwizzle128 = 1;
  return (shared_address & 0x3ffff) >> 4 | kNextColumns << 16 | kNextRows << 32 | kSwizzle128 << 62;
}
/// Advances a descriptor by columns of a K-major operand, or by rows of an MN-major one.
template <int kRows = 64>
__device__ __forceinline__ uint64_t next_columns(uint64_t tile, int columns) {
  return tile + static_cast<uint64_t>((columns / 64 * kRows * 128 + columns % 64 * 2) >> 4);
}
__device__ __forceinline__ uint64_t next_rows(uint64_t tile, int rows) {
  return tile + static_cast<uint64_t>(rows * 128 >> 4);
}

/// Sets the registers of each thread from here on; called by all threads of a warpgroup. It may
/// take more than the launch gave it where other warpgroups give some of theirs.
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

/// Products that follow see registers that were written before.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// The compiler keeps what it does with these accumulators on its side of the call: it does not
/// know that products still write to them.
template <int kTiles>
__device__ __forceinline__ void fence_operands(float (&d)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// Operands of the instructions below: accumulators, then the fragment of a, the tile of b, whether
// to add to the accumulators, whether the tile has b's columns as rows or as columns.
#define KDA_TILE(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KDA_TILES_4(n) KDA_TILE(n), KDA_TILE(n + 1), KDA_TILE(n + 2), KDA_TILE(n + 3)
#define KDA_TILES_8(n) KDA_TILES_4(n), KDA_TILES_4(n + 4)
#define KDA_WGMMA(columns, type, accumulators, a0, a1, a2, a3, tile, add, transposed, ...)  \
  asm volatile(                                                                             \
      "{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" columns \
      "k16.f32." type "." type " " accumulators ", {" a0 "," a1 "," a2 "," a3 "}, " tile    \
      ", p, 1, 1, " transposed ";}"                                                         \
      : __VA_ARGS__                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate), "n"(kTransposed))
#define KDA_WGMMA_64(type)                                                        \
  KDA_WGMMA("64", type,                                                           \
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18," \
            "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}",               \
            "%32", "%33", "%34", "%35", "%36", "%37", "%38", KDA_TILES_8(0))
#define KDA_WGMMA_128(type)                                                        \
  KDA_WGMMA("128", type,                                                           \
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,"  \
            "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35," \
            "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
            "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}",                        \
            "%64", "%65", "%66", "%67", "%68", "%69", "%70", KDA_TILES_8(0), KDA_TILES_8(8))

/// d [64, 64] += a [64, 16] b, where b^T is 64 rows and 16 columns of a tile; without kAccumulate
/// d = a b.
template <class T, bool kAccumulate>
__device__ __forceinline__ void wgmma_n64_k_major(float (&d)[8][4], const uint32_t (&a)[4],
                                                  uint64_t b) {
  constexpr int kTransposed = 0;
  if constexpr (std::is_same_v<T, __half>)
    KDA_WGMMA_64("f16");
  else
    KDA_WGMMA_64("bf16");
}

/// d [64, 64 or 128] += a [64, 16] b, where b is 16 rows and all columns of a tile.
template <class T, int kTiles>
__device__ __forceinline__ void wgmma_mn_major(float (&d)[kTiles][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  static_assert(kTiles == 8 || kTiles == 16);
  constexpr int kTransposed = 1, kAccumulate = 1;
  if constexpr (kTiles == 8 && std::is_same_v<T, __half>)
    KDA_WGMMA_64("f16");
  else if constexpr (kTiles == 8)
    KDA_WGMMA_64("bf16");
  else if constexpr (std::is_same_v<T, __half>)
    KDA_WGMMA_128("f16");
  else
    KDA_WGMMA_128("bf16");
}

/// d [64, 64] += a b, both in shared memory; without kAccumulate d = a b. b^T is 64 rows and 16
/// columns of a tile. a is the same, or with kTransposed 16 rows and all columns of a tile.
template <class T, bool kTransposed, bool kAccumulate>
__device__ __forceinline__ void wgmma_n64_shared(float (&d)[8][4], uint64_t a, uint64_t b) {
#define KDA_WGMMA_SHARED(type)                                                           \
  asm volatile(                                                                          \
      "{.reg .pred p; setp.ne.b32 p, %34, 0; "                                           \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                        \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, %35, 0;}"            \
      : KDA_TILES_8(0)                                                                   \
      : "l"(a), "l"(b), "n"(kAccumulate), "n"(kTransposed))
  if constexpr (std::is_same_v<T, __half>)
    KDA_WGMMA_SHARED("f16");
  else
    KDA_WGMMA_SHARED("bf16");
#undef KDA_WGMMA_SHARED
}

#undef KDA_WGMMA_128
#undef KDA_WGMMA_64
#undef KDA_WGMMA
#undef KDA_TILES_8
#undef KDA_TILES_4
#undef KDA_TILE

}  // namespace kda::cuda::ptx
