// SPDX-License-Identifier: Apache-2.0
// Chains of a backward with operands in fp16. Factors are at most 1 in size, or 2; the state and
// the rows that a chunk adds to it, v or d_o, are as large as the caller wants them. So a warp
// holds its columns times a power of two, by which the largest number of the rounded state and of
// the rows is at least 2^-7 and below 2.
//
// Nothing overflows then. A column of the state has a norm below 2 sqrt(128), and no step lets it
// grow but by beta |v_t|, or by |scale| |d_o_t|: errors of a chunk stay below 2^9, X below
// 2^10 (1 + |scale|). What is 2^18 times below the largest number has fewer bits than bf16 would
// have; it is as far below what it is added to.
#pragma once

#include "cuda/chain/chain.cuh"
#include "cuda/ptx/math.cuh"

namespace kda::cuda::sm90::fp16_chain {

constexpr int kTargetExponent = -3;  // of the largest number after a rescale
constexpr int kFarthest = 120;       // powers of two: a scale and its inverse are normal floats
constexpr int kExponentOfZeros = -1000;
constexpr float kMostFinite = 0x1.fffffep127f;
/// Bits of exponents of a pair: at least 2 where the first occur, else below 2^-7 without these.
constexpr uint32_t kTooLarge = 0x40004000, kLarge = 0x60006000;

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}
/// Exponent of the largest of the warp's `top`, which are finite and not negative.
__device__ __forceinline__ int warp_exponent(float top) {
  const uint32_t bits = ptx::redux_max(__float_as_uint(top));
  return bits == 0 ? kExponentOfZeros : static_cast<int>(bits >> 23) - 127;
}
/// The larger one, of what is finite.
__device__ __forceinline__ float larger(float top, float x) {
  return fabsf(x) <= kMostFinite ? fmaxf(top, fabsf(x)) : top;
}
template <int kCount>
__device__ __forceinline__ uint32_t bits_of(const uint32_t (&x)[kCount][4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < kCount; ++n) bits |= x[n][0] | x[n][1] | x[n][2] | x[n][3];
  return bits;
}

/// A warp holds its state, and what is added to it, times `by`.
struct Scale {
  float by = 1, back = 1;
  int exponent = 0;
  int least = -kExponentOfZeros;  // exponent of a chunk in which anything was not zero

  template <class C>
  __device__ __forceinline__ void move(C& c, int to) {
    to = max(-kFarthest, min(kFarthest, to));
    const int half = (to - exponent) / 2;  // there may be no such float
    const float first = power_of_two(half), second = power_of_two(to - exponent - half);
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c.state[n][i] = c.state[n][i] * first * second;
    exponent = to, by = power_of_two(to), back = power_of_two(-to);
  }
  template <class C>
  __device__ __forceinline__ void take_back(C& c) {
    move(c, 0);
  }
};

/// This warp's columns of a tile [64 tokens, 64], transposed: visit(step, register, pair).
template <class C, class Row, class Visit>
__device__ __forceinline__ void for_each_pair(const C& c, const Row* tile, Visit&& visit) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t raw[4];
    ptx::ldmatrix_x4_trans(raw, ptx::shared_address(c.u_piece(tile, step)));
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(step, i, ptx::unpack<Row>(raw[i]));
  }
}

/// kSign times these columns, scaled: as A operands, and in fp32 where wanted. Returns bits_of().
template <int kSign, class C, class Row, class... Exact>
__device__ __forceinline__ uint32_t load_rows(const C& c, const Scale& scale, const Row* tile,
                                              uint32_t (&rows)[4][4], Exact&... exact) {
  for_each_pair(c, tile, [&](int step, int i, float2 pair) {
    pair.x *= kSign * scale.by, pair.y *= kSign * scale.by;
    rows[step][i] = ptx::pack<__half>(pair.x, pair.y);
    ((exact[2 * step + i / 2][i % 2 * 2] = pair.x, exact[2 * step + i / 2][i % 2 * 2 + 1] = pair.y),
     ...);
  });
  return bits_of(rows);
}

/// Takes the scale that state and rows want. False: all are zero, or nothing is finite.
template <class C, class Row>
__device__ __forceinline__ bool rescale(C& c, Scale& scale, const Row* tile) {
  float of_state = 0, of_rows = 0;
#pragma unroll
  for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) of_state = larger(of_state, c.state[n][i]);
  for_each_pair(c, tile,
                [&](int, int, float2 pair) { of_rows = larger(larger(of_rows, pair.x), pair.y); });
  const int top = max(warp_exponent(of_state), warp_exponent(of_rows) + scale.exponent);
  if (top <= kExponentOfZeros / 2) return false;
  const int to = scale.exponent + kTargetExponent - top;
  // In fp16 the powers are handed on: those of other warps should be the same.
  scale.move(c, std::is_same_v<Row, __half> ? ((to + 2) & ~3) - 2 : to);
  return true;
}

/// Rounds the state, and loads rows by load(), until both fit: at most twice. Infinities stay.
template <class C, class Row, class Load>
__device__ __forceinline__ void round_scaled(C& c, Scale& scale, const Row* tile,
                                             uint32_t (&rounded)[C::kSteps][4], Load&& load) {
  const auto round = [&] {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step)
      chain::round_pairs<__half>(c.state[2 * step], c.state[2 * step + 1], rounded[step]);
    return load() | bits_of(rounded);
  };
  const uint32_t bits = round();
  if (__any_sync(~0u, bits & kTooLarge) || !__any_sync(~0u, bits & kLarge)) {
    if (!rescale(c, scale, tile)) return;
    round();
  }
  scale.least = min(scale.least, scale.exponent);
}

/// Whether the warp's state has lost what bf16 would have kept of it, or is not finite. Factors in
/// fp16 lack up to 2^-25, and what they are multiplied by may have been as large as 2^-least.
template <class C>
__device__ __forceinline__ bool has_lost(const C& c, const Scale& scale) {
  constexpr int kBits = 12;
  float top = 0;
  bool finite = true;
#pragma unroll
  for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top = larger(top, c.state[n][i]);
      finite = finite && fabsf(c.state[n][i]) <= kMostFinite;
    }
  return __any_sync(~0u, !finite) || warp_exponent(top) - scale.exponent < -kBits - scale.least;
}

/// A power of two for numbers that are far below what the warp's scale is for: of the largest one,
/// by 2^8 n, which often is the same for other warps; and what takes numbers times both back.
struct OwnScale {
  float by, back;
  __device__ __forceinline__ OwnScale(const Scale& scale, int top) {
    const int to = min(kFarthest, scale.exponent + ((-4 - top) & ~7));
    by = power_of_two(to - scale.exponent), back = power_of_two(-to);
  }
};
/// The exponent of the largest number of the warp, or kExponentOfZeros.
template <int kTiles>
__device__ __forceinline__ int exponent_of(const float (&x)[kTiles][4]) {
  float top = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) top = larger(top, x[n][i]);
  return warp_exponent(top);
}

/// `factor` x^T of 64 tokens as A operands of T.
template <class T, int kTokenTiles>
__device__ __forceinline__ void round_tokens(const float (&x)[kTokenTiles][4], float factor,
                                             uint32_t (&out)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = x[2 * step + i / 2] + i % 2 * 2;
      out[step][i] = ptx::pack<T>(factor * pair[0], factor * pair[1]);
    }
}

}  // namespace kda::cuda::sm90::fp16_chain
