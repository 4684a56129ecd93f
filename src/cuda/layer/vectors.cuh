// SPDX-License-Identifier: Apache-2.0
// Neighbouring elements of one type, 16 bytes at a time where there are so many, as fp32.
#pragma once

#include "cuda/layer/arguments.hpp"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::layer {

/// kCount elements as they lie in memory: one a word if kCount is 1, else side by side.
template <int kCount>
struct Raw {
  uint32_t words[kCount] = {};

  __device__ __forceinline__ void load(const View& view, int64_t at) {
    const bool wide = view.type == Element::kFloat32;
    if constexpr (kCount == 1) {
      words[0] = load_bits(view.base, view.type, at);
    } else if (wide) {
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const float*>(view.base) + at);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) set(4 * i, from[i]);
    } else {
      const auto* from = static_cast<const uint16_t*>(view.base) + at;
      if constexpr (kCount == 8) {
        set(0, *reinterpret_cast<const uint4*>(from));
      } else {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        words[0] = x.x, words[1] = x.y;
      }
    }
  }
  /// The first `count` of them, one by one; behind these 0.
  __device__ __forceinline__ void load(const View& view, int64_t at, int count) {
    const bool wide = view.type == Element::kFloat32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bits = i < count ? load_bits(view.base, view.type, at + i) : 0;
      if (wide)
        words[i] = bits;
      else
        words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
    }
  }
  /// The type is looked at once for all elements.
  __device__ __forceinline__ void convert(Element type, float (&x)[kCount]) const {
    if (type == Element::kFloat32) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = __uint_as_float(words[i]);
    } else if constexpr (kCount == 1) {
      x[0] = float_of(words[0], type);
    } else if (type == Element::kBFloat16) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        x[i] = float_of(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff, Element::kFloat16);
    }
  }

 private:
  __device__ __forceinline__ void set(int i, const uint4& x) {
    words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
  }
};

template <int kCount>
__device__ __forceinline__ void load_vector(const View& view, int64_t at, float (&x)[kCount]) {
  Raw<kCount> raw;
  raw.load(view, at);
  raw.convert(view.type, x);
}

template <bool kBf16>
__device__ __forceinline__ uint32_t pair_bits(float low, float high) {
  if constexpr (kBf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <int kCount>
__device__ __forceinline__ void store_vector(const View& view, int64_t at,
                                             const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    store_element(view.base, view.type, at, x[0]);
  } else if (view.type == Element::kFloat32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(view.base) + at);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      to[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  } else {
    uint32_t words[kCount / 2];
    if (view.type == Element::kBFloat16) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) words[i] = pair_bits<true>(x[2 * i], x[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) words[i] = pair_bits<false>(x[2 * i], x[2 * i + 1]);
    }
    auto* to = static_cast<uint16_t*>(view.base) + at;
    if constexpr (kCount == 8)
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    else
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}

/// kCount elements `stride` apart: a vector where they may be read as one.
template <int kCount>
__device__ __forceinline__ void load_apart(const View& view, int64_t at, int64_t stride, bool wide,
                                           float (&x)[kCount]) {
  if (kCount > 1 && wide) return load_vector(view, at, x);
  uint32_t bits[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits[i] = load_bits(view.base, view.type, at + i * stride);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = float_of(bits[i], view.type);
}
template <int kCount>
__device__ __forceinline__ void store_apart(const View& view, int64_t at, int64_t stride, bool wide,
                                            const float (&x)[kCount]) {
  if (kCount > 1 && wide) return store_vector(view, at, x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) store_element(view.base, view.type, at + i * stride, x[i]);
}

/// 1 / (1 + exp(-x)) by the fast units: within 2^-21 of it. It is 0 below -126 ln 2; a NaN stays.
__device__ __forceinline__ float sigmoid(float x) { return ptx::rcp(1.0f + ptx::ex2(-x * kLog2e)); }

struct Activated {
  float value, slope;
};
__device__ __forceinline__ float activate(Activation activation, float x) {
  if (activation == Activation::kNone) return x;
  return activation == Activation::kSilu ? x * sigmoid(x) : sigmoid(x);
}
/// silu' = s (1 + x (1 - s)), sigmoid' = s (1 - s); 1 - s as s exp(-x), which keeps its digits.
__device__ __forceinline__ Activated activate_with_slope(Activation activation, float x) {
  if (activation == Activation::kNone) return {x, 1.0f};
  const float power = -x * kLog2e;
  const float e = ptx::ex2(power > 126.0f ? 126.0f : power);  // finite; a NaN stays
  const float s = ptx::rcp(1.0f + e), rest = e * s;
  if (activation == Activation::kSigmoid) return {s, s * rest};
  return {x * s, s * fmaf(x, rest, 1.0f)};
}

}  // namespace kda::cuda::layer
