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

/// Four neighbouring elements of a state, as many times as a lane has them. kPacked: bf16, as they
/// lie in memory.
template <int kQuads, bool kPacked>
struct Quads {
  uint32_t words[kQuads][kPacked ? 2 : 4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
#pragma unroll
      for (uint32_t& word : words[i]) word = 0;
  }
  __device__ __forceinline__ void get(int i, float (&x)[4]) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t word = words[i][c];
        ptx::make_opaque(word);  // else numbers are made once for all uses, and take registers
        x[2 * c] = __uint_as_float(word << 16), x[2 * c + 1] = __uint_as_float(word & 0xffff0000u);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = __uint_as_float(words[i][c]);
    }
  }
  __device__ __forceinline__ void set(int i, const float (&x)[4]) {
    if constexpr (kPacked) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) words[i][c / 2] = ptx::pack<__nv_bfloat16>(x[c], x[c + 1]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) words[i][c] = __float_as_uint(x[c]);
    }
  }
  __device__ __forceinline__ void load(int i, const void* base, int64_t at) {
    if constexpr (kPacked) {
      const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(base) + at);
      words[i][0] = x.x, words[i][1] = x.y;
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(base) + at);
      words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
    }
  }
  __device__ __forceinline__ void store(int i, void* base, int64_t at) const {
    if constexpr (kPacked)
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + at) =
          make_uint2(words[i][0], words[i][1]);
    else
      *reinterpret_cast<uint4*>(static_cast<uint32_t*>(base) + at) =
          make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
  }
};

}  // namespace kda::cuda
