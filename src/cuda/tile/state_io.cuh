// SPDX-License-Identifier: Apache-2.0
// States four elements at a time.
#pragma once

#include "cuda/tile/elements.cuh"

namespace kda::cuda {

/// How states are read and written: 4 elements at a time along rows of a kv buffer, along rows of a
/// vk buffer, or one by one.
enum class Access { kVectorsKV, kVectorsVK, kScalar };

template <bool kBf16>
__device__ __forceinline__ float4 load4(const void* base, int64_t at) {
  if constexpr (!kBf16) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(base) + at);
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                       __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
  }
}

template <bool kBf16>
__device__ __forceinline__ void store4(void* base, int64_t at, float4 x) {
  if constexpr (!kBf16) {
    *reinterpret_cast<float4*>(static_cast<float*>(base) + at) = x;
  } else {
    __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(base) + at) =
        *reinterpret_cast<uint2*>(pair);
  }
}

__device__ __forceinline__ void store4(const StateView& view, int64_t at, float4 x) {
  view.bf16 ? store4<true>(view.base, at, x) : store4<false>(view.base, at, x);
}

}  // namespace kda::cuda
