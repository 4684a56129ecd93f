// SPDX-License-Identifier: Apache-2.0
// Gates to decays, and gradients by log decays back through the gates.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/staged/backward/grad_sm90/raw_gates.cuh"

namespace kda::cuda::sm90::grad {

/// With several anchors (anchors.cuh) the last bits of a decay are the number of its anchor.
struct Decays {
  Tokens row;  // kAnchor times the decay since the row's anchor
  // Decays of channels g and g + 8 to the end of a sub-chunk, since the anchor of its last row.
  float total[kSubchunks][2];
  unsigned anchors[kSubchunks];  // those of the warp's rows, a bit each
  __device__ bool has_one(int r) const { return anchors[r] == 1; }
};
constexpr float kLogAnchor = 24;
static_assert(kAnchor == 0x1p24f && cuda::grad::kLeast == 0x1p-96f && cuda::grad::kMost == 0x1p88f);
__device__ __forceinline__ bool log_in_range(float log) { return log >= -96 && log <= 88; }
/// Decays of one token below it are 0 and without a gradient.
constexpr float kDead = -126;
/// Returns what counts as their log, which may be infinite, in sums over tokens: what has decayed
/// that far is 0.
constexpr float kLeastLog = -220;

/// Between two anchors of a sub-chunk.
constexpr float kAnchorStep = 120;
constexpr float kAnchorDecay = 0x1p-120f;  // the same
constexpr unsigned kAnchorBits = 31;       // of a decay
static_assert(-kLeastLog * kSubchunk < 32 * kAnchorStep);
__device__ __forceinline__ unsigned anchor_of(float decay) {
  return __float_as_uint(decay) & kAnchorBits;
}
__device__ __forceinline__ float with_anchor(float decay, unsigned anchor) {
  return __uint_as_float((__float_as_uint(decay) & ~kAnchorBits) | anchor);
}

/// The gate of this lane's two channels.
template <GateMode kMode>
struct Gate {
  float rate, bias[2], bound;  // bound: in units of log2

  template <class C>
  __device__ explicit Gate(const C& c)
      : rate(c.numbers().rate[c.head()]),
        bias{c.numbers().bias[c.channel()], c.numbers().bias[c.channel() + 8]},
        bound(c.a.gate.lower_bound * kLog2e) {}

  /// -rate (raw + bias) in units of log2; bounded gates are made of its sigmoid.
  __device__ __forceinline__ float exponent(float raw, int half) const {
    const float slope = -rate * kLog2e;
    return fmaf(raw, slope, bias[half] * slope);
  }
  __device__ __forceinline__ float sigmoid(float raw, int half) const {
    return ptx::rcp(1.0f + ptx::ex2(exponent(raw, half)));
  }
  /// s(x) s(-x), which loses nothing where s is near 1.
  __device__ __forceinline__ float sigmoid_slope(float raw, int half) const {
    const float e = ptx::ex2(-fabsf(exponent(raw, half))), larger = ptx::rcp(1.0f + e);
    return e * larger * larger;
  }
  /// Softplus of the raw gate in units of log2, and its slope, from one exponential.
  struct Softplus {
    float log2, slope;
  };
  /// kSmall: to the last bits where it is small, too. Else to 2^-22, which is enough for decays.
  template <bool kSmall>
  __device__ __forceinline__ Softplus softplus(float raw, int half) const {
    const float x = raw + bias[half];
    const float e = ptx::ex2(-fabsf(x) * kLog2e), sum = 1.0f + e;
    float log2 = ptx::lg2(sum);
    if (kSmall && e < 0x1p-6f) log2 = e * (kLog2e - e * (kLog2e / 2 - e * (kLog2e / 3)));
    return {fmaf(fmaxf(x, 0.0f), kLog2e, log2), ptx::rcp(sum) * (x < 0 ? e : 1.0f)};
  }
  __device__ __forceinline__ float log2_decay(float raw, int half) const {
    if constexpr (kMode == GateMode::kBounded)
      return bound * sigmoid(raw, half);
    else if constexpr (kMode == GateMode::kSoftplus)
      return -rate * softplus<false>(raw, half).log2;
    else
      return raw * kLog2e;
  }
};

/// Whether gates of this kind get several anchors. Others rarely fall so far; a chunk in which they
/// do is left. (The kernel takes longer with the code for it.)
template <GateMode kMode>
inline constexpr bool kSeveralAnchors = kMode != GateMode::kBounded;

/// Log2 decays of a sub-chunk summed up by a product with a triangle of ones, times kAnchor. Where
/// several anchors can serve them, decays of 0 count as kLeastLog. Tells whether no log gate is
/// above 0, or NaN.
template <GateMode kMode, class C>
__device__ __forceinline__ bool add_up(const C& c, const Gate<kMode>& gate,
                                       const RawGates<C::kGates>& all, int r, float (*sums)[4]) {
  const float first = 2 * c.t() <= c.g() ? 1 : 0, second = 2 * c.t() + 1 <= c.g() ? 1 : 0;
  const int count = c.numbers().count;
  const auto raw = gates_of(c, all, r);
  float x[2][4];
  for_each([&](int n, int i) {
    x[n][i] = gate.log2_decay(raw(n, i), i / 2);
    sums[n][i] = kLogAnchor;
  });
  if ((r + 1) * kSubchunk > count)  // past the end of the sequence: after the gate, which is not 0
    for_each([&](int n, int i) {
      if (16 * r + 8 * n + 2 * c.t() + i % 2 >= count) x[n][i] = 0;
    });
  bool falls = true;
  if constexpr (kSeveralAnchors<kMode>)
    for_each([&](int n, int i) {
      if (kMode == GateMode::kLog) falls = falls && x[n][i] <= 0;
      if (x[n][i] < kLeastLog) x[n][i] = kLeastLog;
    });
  const TwoParts tile0(x[0]), tile1(x[1]);
  tile0.add(sums[0], first, second);
  tile1.add(sums[1], first, second);
  tile0.add(sums[1], 1, 1);
  return falls;
}

/// From logs to decays since anchors. `falls` is of its log gates. Tells whether all is in range.
template <GateMode kMode, class C>
__device__ __forceinline__ bool find_anchors(const C& c, int r, bool falls, Decays& d) {
  float(*const row)[4] = d.row + 2 * r;
  bool near = true, good = true;
  if (kMode == GateMode::kLog)
    for_each([&](int n, int i) { near = near && log_in_range(row[n][i]); });
  else  // the last one is the least
    near = log_in_range(row[1][1]) && log_in_range(row[1][3]);
  d.anchors[r] = 1;
  if (__any_sync(~0u, !near)) {
    good = falls && row[1][1] <= kLogAnchor && row[1][3] <= kLogAnchor;  // and not NaN
    unsigned anchors = 0;
    for_each([&](int n, int i) {
      float& x = row[n][i];
      const unsigned anchor =
          static_cast<unsigned>((kLogAnchor - x) * (1 / kAnchorStep)) & kAnchorBits;
      anchors |= 1u << anchor;
      x = with_anchor(ptx::ex2(fmaf(kAnchorStep, static_cast<float>(anchor), x)), anchor);
    });
    d.anchors[r] = ptx::redux_or(anchors);
  } else {
    for_each([&](int n, int i) { row[n][i] = with_anchor(ptx::ex2(row[n][i]), 0); });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
    d.total[r][half] = __shfl_sync(~0u, row[1][2 * half + 1], c.lane | 3) / kAnchor;
  return good;
}

/// Decays since the starts of their sub-chunks. Tells which warps have decays beyond the range of
/// anchors.
template <GateMode kMode, class C>
__device__ __forceinline__ void find_decays(const C& c, RawGates<C::kGates>& raw, Decays& d) {
  const Gate<kMode> gate(c);
  convert_gates(c, raw);
  bool falls[kSubchunks], good = true;
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) falls[r] = add_up(c, gate, raw, r, d.row + 2 * r);
  if constexpr (kSeveralAnchors<kMode>) {
#pragma unroll
    for (int r = 0; r < kSubchunks; ++r) good = find_anchors<kMode>(c, r, falls[r], d) && good;
  } else {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) d.row[n][i] = ptx::ex2(d.row[n][i]);
#pragma unroll
    for (int r = 0; r < kSubchunks; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float last = __shfl_sync(~0u, d.row[2 * r + 1][2 * half + 1], c.lane | 3);
        good = good && in_range(last);  // which other decays fall to
        d.total[r][half] = last / kAnchor;
      }
  }
  const bool out = __any_sync(~0u, !good);
  if (c.lane == 0) c.s.out_of_range[c.turn & 1][c.warp] = out;
}

/// From dG, and what all tokens of the chunk share, to dg and sums for parameters.
template <GateMode kMode, class C>
__device__ __forceinline__ void store_gates(const C& c, RawGates<C::kGates>& all, const Tokens& dG,
                                            float2 boundary) {
  const Gate<kMode> gate(c);
  convert_gates(c, all);
  const float first = 2 * c.t() >= c.g() ? 1 : 0, second = 2 * c.t() + 1 >= c.g() ? 1 : 0;
  const int count = c.numbers().count;
  ChannelSums sums;
  float carry[2] = {boundary.x, boundary.y}, ddt_bias[2] = {}, dA_log = 0;
#pragma unroll
  for (int r = kSubchunks - 1; r >= 0; --r) {
    const auto raw = gates_of(c, all, r);
    c.template fence_in<Fence::kGates>(r);
    float y[2][4] = {};
    const TwoParts tile0(dG[2 * r]), tile1(dG[2 * r + 1]);
    tile1.add(y[1], first, second);
    tile0.add(y[0], first, second);
    tile1.add(y[0], 1, 1);
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum[half] = __shfl_sync(~0u, y[0][2 * half], c.lane & ~3);  // all 16 tokens: before carry
    for_each([&](int n, int i) { y[n][i] += carry[i / 2]; });
    if ((r + 1) * kSubchunk > count)
      for_each([&](int n, int i) {
        if (16 * r + 8 * n + 2 * c.t() + i % 2 >= count) y[n][i] = 0;
      });
    for_each([&](int n, int i) {
      const float x = raw(n, i), dg = y[n][i];
      if constexpr (kMode == GateMode::kBounded) {
        const float d = dg * (gate.rate * c.a.gate.lower_bound) * gate.sigmoid_slope(x, i / 2);
        dA_log = fmaf(d, d == 0 ? 0 : x, dA_log);  // gates may be infinite there
        y[n][i] = d;
      } else if constexpr (kMode == GateMode::kSoftplus) {
        const auto softplus = gate.template softplus<true>(x, i / 2);
        const float log2_decay = -gate.rate * softplus.log2;
        const bool dead = log2_decay < kDead;
        if (!dead) dA_log = fmaf(dg, log2_decay, dA_log);
        y[n][i] = dead ? 0 : -gate.rate * softplus.slope * dg;
      } else if (gate.log2_decay(x, i / 2) < kDead) {
        y[n][i] = 0;
      }
      ddt_bias[i / 2] += y[n][i];
    });
    put_gradients(c, r, y, sums);
    carry[0] += sum[0], carry[1] += sum[1];
  }
  finish_gradients(c, sums);
  if constexpr (kMode != GateMode::kLog) {
    if (kMode == GateMode::kBounded)
      dA_log += gate.bias[0] * ddt_bias[0] + gate.bias[1] * ddt_bias[1];
    if (kMode == GateMode::kSoftplus) dA_log *= static_cast<float>(1 / double{kLog2e});
    dA_log = sum_over(dA_log, 1, 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ddt_bias[half] = sum_over(ddt_bias[half], 1, 4);
      if (c.t() == 0) c.s.sums.ddt_bias[c.channel() + 8 * half] = ddt_bias[half];
    }
    if (c.lane == 0) c.s.sums.dA_log[c.warp] = dA_log;
  }
  // A column of 2^96 and what it is multiplied by, which is large where E and dS are: their product
  // may have left fp32 here, and not in the second launch. All sums of dG would tell.
  constexpr float kMost = 0x1.fffffep127f;
  const bool overflown = !(fabsf(carry[0]) <= kMost && fabsf(carry[1]) <= kMost);
  if (__any_sync(~0u, overflown) && c.lane == 0) c.s.out_of_range[c.turn & 1][c.warp] = true;
  ptx::mbarrier_arrive(c.s.gates_done[c.turn & 1]);
}

}  // namespace kda::cuda::sm90::grad
