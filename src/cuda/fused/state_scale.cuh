// SPDX-License-Identifier: Apache-2.0
// The state of a consumer warp as operands in fp16 need it: times a power of two.
#pragma once

#include "cuda/chain/chain.cuh"
#include "cuda/fused/shared_storage.cuh"
#include "cuda/ptx/math.cuh"

namespace kda::cuda::sm90::fused {

/// Operands in fp16 hold the state times a power of two, and what is added to it; so do
/// accumulators. Factors are at most 1. A column of the state never grows but by beta v
/// (stage/segment_scan.hpp says where), and its error is at most v and the column's norm: what fits
/// stays to fit until v has added up. A lane has 4 of the 16 tokens of a column and counts the
/// largest |v| that it has of each run: four lanes together then count a quarter of the column's
/// sum at least.
///
/// At a look the state has numbers below 2^4, so its columns norms below 2^8; with all of `room`
/// taken, and one run more, they are below 2^15, or 2^14 and a bit where beta reaches 2. Runs with
/// v from kLarge on are mended afterwards. States and v between 2^-6 and 2^4 are not scaled. No
/// scale depends on what comes later. Looks have to be rare: their code comes from far, and all
/// warps wait.
///
/// With operands in bf16 the scale is 1.
template <int kK, class T, class Operand>
struct ScaledState : chain::Chain<Operand, kK, ChainUse::kForward> {
  using Base = chain::Chain<Operand, kK, ChainUse::kForward>;
  using Base::kTiles;
  using Base::state;
  using Base::tile_column;

  const FusedPrefillArgs& fused;
  const int lane;  // out of a shuffle: else the thread's index is asked for in every run

  __device__ explicit ScaledState(const FusedPrefillArgs& args)
      : Base(args), fused(args), lane(__shfl_sync(0xffffffff, Base::lane, Base::lane)) {}

  struct Scale {
    int exponent = 0;
    float room = 0;  // for |v| of this lane, until its warp looks at its state
  };
  Scale scale;

  static constexpr float kRoom = 0x7000 / 16, kRoomOfTwo = 0x3000 / 32;  // beta up to 1, up to 2
  static constexpr float kOfZeros = -0x1.555556p100f;  // room of a state of zeros; no run leaves it
  static constexpr float kLeastTaken = 1;              // by a run: looks come in any case
  static constexpr float kTakenSoon = kRoom / 4;       // where v has become small: the state will
  static constexpr float kLarge = 0x1p7f;
  static constexpr int kLeast = -6, kMost = 4;  // exponents of what is not scaled
  static constexpr int kStep = 8;               // powers of two between scales
  static constexpr int kFarthest = 96;          // v up to 2^32 is finite when scaled

  static constexpr uint32_t kOne = 127u << 23;
  /// Times a power of two, of which these are the bits.
  __device__ float scale_back(uint32_t one = kOne) const {
    return __uint_as_float(one - (static_cast<uint32_t>(scale.exponent) << 23));
  }
  /// In two steps: there may be no such float.
  __device__ void rescale(int exponent) {
    const int half = (exponent - scale.exponent) / 2;
    const float by = __uint_as_float(static_cast<uint32_t>(127 + half) << 23);
    if (half != 0)
#pragma unroll
      for (int i = 0; i < 2 * kTiles * 4; ++i) state[i / 4 % kTiles][i % 4] *= by;
    scale.exponent = exponent;
  }

  // ---- looks -----------------------------------------------------------------------------------

  static constexpr int kNone = -1000;  // the exponent of zeros

  /// Of the largest finite number of this warp's state, scaled.
  __device__ int top_exponent() const {
    constexpr float kMostFinite = 0x1.fffffep127f;
    float top[4] = {};
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) top[i % 4] = fmaxf(top[i % 4], fabsf(state[i / 4][i % 4]));
    if (__any_sync(0xffffffff, most_of(top) > kMostFinite))
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        const float x = fabsf(state[i / 4][i % 4]);
        top[i % 4] = fmaxf(i < 4 ? 0 : top[i % 4], x <= kMostFinite ? x : 0);
      }
    const uint32_t bits = ptx::redux_max(__float_as_uint(most_of(top)));
    return bits == 0 ? kNone : static_cast<int>(bits >> 23) - 127;
  }
  __device__ static float most_of(const float (&x)[4]) {
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  }
  /// Of one of a pair, without its sign: bits of bf16, or the upper ones of a float.
  __device__ static uint32_t size_of(uint32_t pair, int which) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return pair >> which * 16 & 0x7fff;
    const float2 x = ptx::unpack<T>(pair);
    return __float_as_uint(which == 0 ? x.x : x.y) >> 16 & 0x7fff;
  }
  /// Of the largest number in this warp's columns of v of the first token of a run; where all
  /// before it is zero, of the first token that has any.
  __device__ int first_exponent(uint32_t piece, bool any_token) const {
    uint32_t v[4], key = 0;
    ptx::ldmatrix_x4_trans(v, piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto token = static_cast<uint32_t>(i / 4 * 8 + lane % 4 * 2 + i % 2);
      const uint32_t bits = size_of(v[i / 2], i % 2);
      if (bits != 0 && bits < 0x7f80 && (any_token || token == 0))
        key = max(key, (kRun - token) << 8 | bits >> 7);
    }
    key = ptx::redux_max(key);
    return key == 0 ? kNone : static_cast<int>(key & 255) - 127;
  }
  /// Before a run whose v is at `piece` after wait().
  template <class Wait>
  __device__ void look_at_scale(uint32_t piece, Wait&& wait) {
    const int of_state = scale.room == kOfZeros ? kNone : top_exponent();
    wait();
    const int of_v = first_exponent(piece, of_state == kNone) + scale.exponent;
    const int top = max(of_state, of_v + 1);
    scale.room = kLeastTaken;
    if (top <= kNone / 2) return;
    scale.room = fused.gate.beta_mode == 2 ? kRoomOfTwo : kRoom;
    if (top >= kLeast && top < kMost) return;
    const int unscaled = top - scale.exponent;
    rescale(max(-112, min(kFarthest, -(unscaled + kMost & -kStep))));  // top: -4 to 3
  }

  // ---- every run -------------------------------------------------------------------------------

  /// Of this warp's columns of v: what ldmatrix takes of this lane.
  __device__ __forceinline__ uint32_t piece_of(uint32_t values) const {
    return values + static_cast<uint32_t>(sizeof(Bits)) *
                        swizzled_in<kRun>(lane % 8 + lane / 16 * 8, tile_column / 8 + lane / 8 % 2);
  }
  __device__ __forceinline__ bool has_room() const {
    return !kHalf<Operand> || !__any_sync(0xffffffff, scale.room <= 0);
  }
  /// v of a lane, pairs of T: in bf16 they are scaled in place, in fp16 where they are used, since
  /// they might leave it.
  static constexpr bool kScaledInPlace = std::is_same_v<T, __nv_bfloat16>;
  __device__ __forceinline__ float scale_up() const {
    return __uint_as_float(static_cast<uint32_t>(127 + scale.exponent) << 23);
  }
  __device__ __forceinline__ void scale_in_place(uint32_t (&v)[4]) const {
    if constexpr (kScaledInPlace)
#pragma unroll
      for (uint32_t& pair : v)
        pair = ptx::mul_x2<T>(pair, static_cast<uint32_t>(127 + scale.exponent) * 0x800080);
  }
  __device__ __forceinline__ float2 value_of(uint32_t pair) const {
    const float2 x = ptx::unpack<T>(pair);
    if constexpr (kScaledInPlace) return x;
    return {x.x * scale_up(), x.y * scale_up()};
  }
  /// The largest of this lane's v, scaled.
  __device__ __forceinline__ float most_of(const uint32_t (&v)[4]) const {
    const uint32_t top = ptx::max_abs_x2<T>(v);
    if constexpr (kScaledInPlace) return __uint_as_float(max(top << 16, top & 0xffff0000));
    const float2 x = value_of(top);
    return x.x > x.y || x.x != x.x ? x.x : x.y;  // NaN where one is
  }
  /// Takes what a run with v up to `most`, scaled, takes. Is there room for another one?
  __device__ __forceinline__ bool take_room(float most) {
    scale.room -= most > 0 && most < 0x1p-8f ? kTakenSoon : fmaxf(most, kLeastTaken);
    return scale.room > 0 && most < kLarge;
  }
};

}  // namespace kda::cuda::sm90::fused
