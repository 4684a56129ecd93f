// SPDX-License-Identifier: Apache-2.0
// The state of a consumer warp as operands in fp16 need it: times a power of two.
//
// Operands in fp16 hold the state, and what is added to it, times a power of two; so do
// accumulators. Factors are at most 1. A column of the state never grows but by beta v
// (stage/segment_scan.hpp says where), and its error is at most v and the column's norm: what fits
// goes on to fit until v has added up. A lane has 4 of the 16 tokens of a column and counts the
// largest |v| that it has of each sub-chunk: four lanes together then count at least a quarter of
// the column's sum.
//
// After a rescale the state has numbers below 2^4, so its columns have norms below 2^8. With all
// headroom consumed, and one sub-chunk more, they are below 2^15, or 2^14 and a bit where beta
// reaches 2. Where v reaches kLarge, the sub-chunk is repaired afterwards. A scale stays where the
// larger of the scaled state and twice the first v is 2^-6 to 2^4. No scale depends on what comes
// later. Rescales have to be rare: their code comes from far, and all warps wait.
//
// With operands in bf16 the scale is 1.
#pragma once

#include "cuda/fused/consumer_context.cuh"

namespace kda::cuda::sm90::fused {

/// Headroom of a lane after rescale_if_needed(): where beta is at most 1, and where at most 2.
constexpr float kHeadroom = 0x7000 / 16, kHeadroomOfTwo = 0x3000 / 32;
/// Marks a state of zeros, which any v sets the scale of. No subtraction gives just this number.
constexpr float kHeadroomOfZeros = -0x1.555556p100f;
constexpr float kLeastConsumed = 1;  // by a sub-chunk: rescales come in any case
/// Consumed where v has become small: the state will.
constexpr float kConsumedWhenSmall = kHeadroom / 4;
constexpr float kLarge = 0x1p7f;
constexpr int kLeastExponent = -6, kMostExponent = 4;  // between these a scale stays
constexpr int kExponentStep = 8;                       // powers of two between scales
constexpr int kFarthestExponent = 96;                  // v up to 2^32 is finite when scaled
constexpr int kExponentOfZeros = -1000;
constexpr uint32_t kBitsOfOne = 127u << 23;

/// Factor that takes a scaled number back, times a power of two of which these are the bits.
template <class C>
__device__ float scale_back(const C& c, uint32_t one = kBitsOfOne) {
  return __uint_as_float(one - (static_cast<uint32_t>(c.scale.exponent) << 23));
}
/// Scales the state in two steps: there may be no such float.
template <class C>
__device__ void rescale(C& c, int exponent) {
  const int half = (exponent - c.scale.exponent) / 2;
  const float by = __uint_as_float(static_cast<uint32_t>(127 + half) << 23);
  if (half != 0)
#pragma unroll
    for (int i = 0; i < 2 * C::kTiles * 4; ++i) c.state[i / 4 % C::kTiles][i % 4] *= by;
  c.scale.exponent = exponent;
}

// ---- rescales

__device__ __forceinline__ float largest_of(const float (&x)[4]) {
  return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}
/// Exponent of the largest finite number of this warp's state, scaled.
template <class C>
__device__ int top_exponent(const C& c) {
  constexpr float kMostFinite = 0x1.fffffep127f;
  float top[4] = {};
#pragma unroll
  for (int i = 0; i < C::kTiles * 4; ++i)
    top[i % 4] = fmaxf(top[i % 4], fabsf(c.state[i / 4][i % 4]));
  if (__any_sync(0xffffffff, largest_of(top) > kMostFinite))
#pragma unroll
    for (int i = 0; i < C::kTiles * 4; ++i) {
      const float x = fabsf(c.state[i / 4][i % 4]);
      top[i % 4] = fmaxf(i < 4 ? 0 : top[i % 4], x <= kMostFinite ? x : 0);
    }
  const uint32_t bits = ptx::redux_max(__float_as_uint(largest_of(top)));
  return bits == 0 ? kExponentOfZeros : static_cast<int>(bits >> 23) - 127;
}
/// One of a pair without its sign: bits of bf16, or the upper ones of a float.
template <class T>
__device__ uint32_t magnitude_bits(uint32_t pair, int which) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return pair >> which * 16 & 0x7fff;
  const float2 x = ptx::unpack<T>(pair);
  return __float_as_uint(which == 0 ? x.x : x.y) >> 16 & 0x7fff;
}
/// Exponent of the largest number in this warp's columns of v of the first token of a sub-chunk;
/// where all before it is zero (any_token), of the first token that has any.
template <class C>
__device__ int first_exponent(const C& c, uint32_t piece, bool any_token) {
  uint32_t v[4], key = 0;
  ptx::ldmatrix_x4_trans(v, piece);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto token = static_cast<uint32_t>(i / 4 * 8 + c.lane % 4 * 2 + i % 2);
    const uint32_t bits = magnitude_bits<typename C::T>(v[i / 2], i % 2);
    if (bits != 0 && bits < 0x7f80 && (any_token || token == 0))
      key = max(key, (kSubchunk - token) << 8 | bits >> 7);
  }
  key = ptx::redux_max(key);
  return key == 0 ? kExponentOfZeros : static_cast<int>(key & 255) - 127;
}
/// Scales the state, if that is needed, before a sub-chunk whose v is at `piece` after wait().
/// Renews the headroom.
template <class C, class Wait>
__device__ void rescale_if_needed(C& c, uint32_t piece, Wait&& wait) {
  const int of_state = c.scale.headroom == kHeadroomOfZeros ? kExponentOfZeros : top_exponent(c);
  wait();
  const int of_v = first_exponent(c, piece, of_state == kExponentOfZeros) + c.scale.exponent;
  const int top = max(of_state, of_v + 1);
  c.scale.headroom = kLeastConsumed;  // all zeros: look again after one sub-chunk
  if (top <= kExponentOfZeros / 2) return;
  c.scale.headroom = c.a.gate.beta_mode == BetaMode::kSigmoid2 ? kHeadroomOfTwo : kHeadroom;
  if (top >= kLeastExponent && top < kMostExponent) return;
  const int unscaled = top - c.scale.exponent;
  rescale(c, max(-112, min(kFarthestExponent, -(unscaled + kMostExponent & -kExponentStep))));
}

// ---- every sub-chunk

/// Where this lane's row of this warp's columns of v is: what ldmatrix takes.
template <class C>
__device__ __forceinline__ uint32_t piece_of(const C& c, uint32_t values) {
  return values +
         static_cast<uint32_t>(sizeof(Bits)) *
             swizzled<kSubchunk>(c.lane % 8 + c.lane / 16 * 8, c.tile_column / 8 + c.lane / 8 % 2);
}
template <class C>
__device__ __forceinline__ bool has_headroom(const C& c) {
  return !kFp16<typename C::Operand> || !__any_sync(0xffffffff, c.scale.headroom <= 0);
}
/// v of a lane, as pairs of T. In bf16 they are scaled in place; in fp16 where they are used, since
/// they might leave it.
template <class T>
constexpr bool kScaledInPlace = std::is_same_v<T, __nv_bfloat16>;
template <class C>
__device__ __forceinline__ float scale_up(const C& c) {
  return __uint_as_float(static_cast<uint32_t>(127 + c.scale.exponent) << 23);
}
template <class C>
__device__ __forceinline__ void scale_in_place(const C& c, uint32_t (&v)[4]) {
  if constexpr (kScaledInPlace<typename C::T>)
#pragma unroll
    for (uint32_t& pair : v)
      pair = ptx::mul_x2<typename C::T>(pair,
                                        static_cast<uint32_t>(127 + c.scale.exponent) * 0x800080);
}
template <class C>
__device__ __forceinline__ float2 value_of(const C& c, uint32_t pair) {
  const float2 x = ptx::unpack<typename C::T>(pair);
  if constexpr (kScaledInPlace<typename C::T>) return x;
  return {x.x * scale_up(c), x.y * scale_up(c)};
}
/// The largest of this lane's v, scaled; NaN where one is.
template <class C>
__device__ __forceinline__ float largest_v(const C& c, const uint32_t (&v)[4]) {
  const uint32_t top = ptx::max_abs_x2<typename C::T>(v);
  if constexpr (kScaledInPlace<typename C::T>)
    return __uint_as_float(max(top << 16, top & 0xffff0000));
  const float2 x = value_of(c, top);
  return x.x > x.y || x.x != x.x ? x.x : x.y;
}
/// Consumes what a sub-chunk with v up to `most`, scaled, takes. Returns whether there is headroom
/// for another one.
template <class C>
__device__ __forceinline__ bool consume_headroom(C& c, float most) {
  c.scale.headroom -= most > 0 && most < 0x1p-8f ? kConsumedWhenSmall : fmaxf(most, kLeastConsumed);
  return c.scale.headroom > 0 && most < kLarge;
}

}  // namespace kda::cuda::sm90::fused
