// SPDX-License-Identifier: Apache-2.0
// Where raw gates come from and dg goes to, of a lane's channels and tokens: tiles in shared
// memory, rows in device memory, or a number a token (GradGates).
#pragma once

#include "cuda/staged/backward/grad_sm90/outputs.cuh"

namespace kda::cuda::sm90::grad {

/// Gates that are on their way to registers, as they lie in memory: all of a lane's, of rows.
template <GradGates kGates>
struct RawGates {};
template <>
struct RawGates<GradGates::kRows> {
  uint32_t bits[kTokenTiles][4];
};

/// The lane's first channel, of its value head.
template <class C>
__device__ __forceinline__ int channel_of_head(const C& c) {
  return c.channel() - c.head() * (kK / C::kHeads);
}

/// kWhole: all tokens of the chunk are there, with a gate a channel.
template <class Bits, bool kWhole, class C>
__device__ __forceinline__ void load_rows(const C& c, RawGates<GradGates::kRows>& raw) {
  const RowView& view = c.a.g;
  const int tokens = c.numbers().rows[c.head()] - 2 * c.t();  // from the lane's first on
  const int step = kWhole ? 1 : c.a.gate_step;
  const auto* even = static_cast<const Bits*>(view.base) + c.numbers().g_first[c.head()] +
                     channel_of_head(c) * step + 2 * c.t() * view.stride_t;
  const auto* odd = even + view.stride_t;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = kWhole || 8 * n + i % 2 < tokens;
      raw.bits[n][i] = there ? (i % 2 ? odd : even)[i / 2 * 8 * step] : 0;
    }
    even += 8 * view.stride_t, odd += 8 * view.stride_t;
  }
}

/// Begins to read what find_decays() or store_gates() need.
template <class C>
__device__ __forceinline__ void begin_gates(const C& c, RawGates<C::kGates>& raw) {
  if constexpr (C::kGates == GradGates::kRows) {
    const bool whole = c.numbers().rows[c.head()] == kChunk && c.a.gate_step == 1;
    if (c.a.g.type == Element::kFloat32)
      whole ? load_rows<uint32_t, true>(c, raw) : load_rows<uint32_t, false>(c, raw);
    else
      whole ? load_rows<uint16_t, true>(c, raw) : load_rows<uint16_t, false>(c, raw);
  }
}

/// From what they are in memory to fp32, in their place.
template <class C>
__device__ __forceinline__ void convert_gates(const C& c, RawGates<C::kGates>& raw) {
  if constexpr (C::kGates == GradGates::kRows) {
    const auto convert = [&](Element type) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          raw.bits[n][i] = __float_as_uint(float_of(raw.bits[n][i], type));
    };
    if (c.a.g.type == Element::kBFloat16) convert(Element::kBFloat16);
    if (c.a.g.type == Element::kFloat16) convert(Element::kFloat16);
  }
}

/// The gates of a sub-chunk, by n and i as Part has them.
template <class C>
__device__ __forceinline__ auto gates_of(const C& c, const RawGates<C::kGates>& raw, int r) {
  if constexpr (C::kGates == GradGates::kTiles) {
    struct Gates {
      Operand x;
      __device__ float operator()(int n, int i) const { return element(x, n, i); }
    } gates;
    C::load(c.channels_of(c.s.gates.of_turn[c.turn & 1]), r, gates.x);
    return gates;
  } else if constexpr (C::kGates == GradGates::kRows) {
    return [&raw, r](int n, int i) { return __uint_as_float(raw.bits[2 * r + n][i]); };
  } else {
    struct Gates {
      float2 tile[2];
      __device__ float operator()(int n, int i) const { return i % 2 ? tile[n].y : tile[n].x; }
    };
    const auto& tokens = c.numbers().gate[c.head()];
    return Gates{{c.of_tokens(tokens, 2 * r), c.of_tokens(tokens, 2 * r + 1)}};
  }
}

/// dg of a sub-chunk, a gradient a channel, to device memory.
template <Element kType, class C>
__device__ __forceinline__ void store_rows_as(const C& c, int r, const float (&y)[2][4]) {
  const RowView& view = c.a.dg;
  const int token0 = 16 * r + 2 * c.t(), tokens = c.numbers().rows[c.head()] - token0;
  const int64_t first =
      c.numbers().dg_first[c.head()] + channel_of_head(c) + token0 * view.stride_t;
  for_each([&](int n, int i) {
    if (8 * n + i % 2 < tokens)
      store_element(view.base, kType, first + (8 * n + i % 2) * view.stride_t + i / 2 * 8, y[n][i]);
  });
}
template <class C>
__device__ __forceinline__ void store_rows(const C& c, int r, const float (&y)[2][4]) {
  if (!c.a.dg.base) return;
  if (c.a.dg.type == Element::kFloat32)
    store_rows_as<Element::kFloat32>(c, r, y);
  else if (c.a.dg.type == Element::kBFloat16)
    store_rows_as<Element::kBFloat16>(c, r, y);
  else
    store_rows_as<Element::kFloat16>(c, r, y);
}

/// A lane's sums of dg over its two channels, of its tokens in order.
using ChannelSums = float[2 * kTokenTiles];

/// dg of a sub-chunk, to where the warps that store take it from, or to where it is wanted.
template <class C>
__device__ __forceinline__ void put_gradients(const C& c, int r, const float (&y)[2][4],
                                              ChannelSums& sums) {
  if constexpr (C::kGates == GradGates::kTiles) {
    Operand out;
    to_operand(out, [&](int n, int i) { return y[n][i]; });
    ptx::stmatrix_x4_trans(c.channels_of(c.s.gates.of_turn[c.turn & 1]) + r * kSubchunkBytes, out);
  } else if constexpr (C::kGates == GradGates::kRows) {
    store_rows(c, r, y);
  } else {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[2 * (2 * r + n) + i] = y[n][i] + y[n][i + 2];
  }
}

/// After all sub-chunks: the warp's sums over channels.
template <class C>
__device__ __forceinline__ void finish_gradients(const C& c, ChannelSums& sums) {
  if constexpr (C::kGates == GradGates::kHead) store_token_sums(c, sums, c.s.gates.dg);
}

}  // namespace kda::cuda::sm90::grad
