// SPDX-License-Identifier: Apache-2.0
// Numbers of split boundary states (SplitDesc).
#pragma once

#include <cstdint>

namespace kda::cuda::tail {

/// A number as split_float() of core/convert.hpp has it.
struct SplitNumber {
  uint32_t bf16;
  int32_t rest;

  /// Whose lower half is `rest`. With half a unit of bf16 added its upper half is bf16.
  __device__ __forceinline__ static uint32_t bits_of(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? (bits & 0xffff0000u) | 0x400000u : bits;
  }
  __device__ __forceinline__ static SplitNumber of(float x) {
    const uint32_t bits = bits_of(x);
    return {(bits + 0x8000u) >> 16, static_cast<int16_t>(bits)};
  }
  __device__ __forceinline__ float joined() const {
    return __uint_as_float((bf16 << 16) + static_cast<uint32_t>(rest));
  }
  __device__ __forceinline__ float rounded() const { return __uint_as_float(bf16 << 16); }
};

}  // namespace kda::cuda::tail
