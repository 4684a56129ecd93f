// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

/// As m16n8k16 whose second half is 0.
template <class T>
void mma_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const uint32_t a[4] = {a0, a1, 0, 0};
  mma_16816<T>(d, a, b, 0);
}

inline float rsqrt_approx(float x) { return 1 / std::sqrt(x); }

/// In these bits NaN is more than any number, too.
template <class T>
uint32_t max_abs_x2(const uint32_t (&x)[4]) {
  uint32_t low = 0, high = 0;
  for (const uint32_t pair : x) {
    low = std::max(low, pair & 0x7fff);
    high = std::max(high, pair >> 16 & 0x7fff);
  }
  return low | high << 16;
}
inline uint32_t cvt_satfinite_f16x2(float low, float high) {
  const auto finite = [](float x) {
    return std::isnan(x) ? x : std::clamp(x, -65504.0f, 65504.0f);
  };
  return pack<__half>(finite(low), finite(high));
}
inline uint32_t equal_u16x2(uint32_t x, uint32_t y) {
  return ((x ^ y) & 0xffff ? 0 : 0xffffu) | ((x ^ y) >> 16 ? 0 : 0xffff0000u);
}
inline uint32_t max_u16x2(uint32_t x, uint32_t y) {
  return std::max(x & 0xffff, y & 0xffff) | std::max(x >> 16, y >> 16) << 16;
}
inline int highest_bit(uint32_t x) { return 31 - __builtin_clz(x); }
inline uint32_t redux_or(uint32_t x) {
  for (int step = 16; step > 0; step /= 2) x |= __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
inline uint32_t redux_max(uint32_t x) {
  for (int step = 16; step > 0; step /= 2) x = std::max(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

}  // namespace kda::cuda::ptx
