// SPDX-License-Identifier: Apache-2.0
// Narrow relatives of what ptx.cuh has: an mma whose operands are single registers, and functions
// without the steps that denormals need.
#pragma once

#include <type_traits>

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

/// d += a b, m16n8k8, 16-bit operands with fp32 accumulators.
template <class T>
__device__ __forceinline__ void mma_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#define KDA_MMA_1688(type)                                  \
  asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type \
      ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])      \
      : "r"(a0), "r"(a1), "r"(b))
  if constexpr (std::is_same_v<T, __half>)
    KDA_MMA_1688("f16");
  else
    KDA_MMA_1688("bf16");
#undef KDA_MMA_1688
}

__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The largest absolute values of pairs, of the low and of the high 16 bits; NaN where one is.
template <class T>
__device__ __forceinline__ uint32_t max_abs_x2(const uint32_t (&x)[4]) {
  uint32_t y;
#define KDA_MAX_OF_PAIRS(type)                                                   \
  asm("{.reg .b32 a, b, c, d; abs." type " a, %1; abs." type " b, %2; abs." type \
      " c, %3;"                                                                  \
      "abs." type " d, %4; max.NaN." type " a, a, b; max.NaN." type              \
      " c, c, d;"                                                                \
      "max.NaN." type " %0, a, c;}"                                              \
      : "=r"(y)                                                                  \
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]))
  if constexpr (std::is_same_v<T, __half>)
    KDA_MAX_OF_PAIRS("f16x2");
  else
    KDA_MAX_OF_PAIRS("bf16x2");
#undef KDA_MAX_OF_PAIRS
  return y;
}
/// A pair of fp16, the largest finite numbers in place of larger ones.
__device__ __forceinline__ uint32_t cvt_satfinite_f16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
/// The larger of two unsigned integers of 16 bits, in both 16 bits of a word (sm_90).
__device__ __forceinline__ uint32_t max_u16x2(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
/// All bits of a half where two pairs of small integers, below 1,024, are equal in it: as fp16 they
/// are denormals.
__device__ __forceinline__ uint32_t equal_u16x2(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
/// The number of the highest bit that is set; one is.
__device__ __forceinline__ int highest_bit(uint32_t x) { return 31 - __clz(static_cast<int>(x)); }
/// Bits that any lane of a warp has, for all of them.
__device__ __forceinline__ uint32_t redux_or(uint32_t x) { return __reduce_or_sync(0xffffffff, x); }
/// The largest x of a warp, for all of its lanes.
__device__ __forceinline__ uint32_t redux_max(uint32_t x) {
  return __reduce_max_sync(0xffffffff, x);
}

}  // namespace kda::cuda::ptx
