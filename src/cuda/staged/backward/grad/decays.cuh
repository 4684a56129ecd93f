// SPDX-License-Identifier: Apache-2.0
// Decays of a warp's channels. All of them are running products: no difference of sums, no division
// but inside of a range.
//
// Between sub-chunks of 16 tokens rows are decayed since the start of theirs and columns to the end
// of theirs. Inside, both meet at the start, where columns are divided by the decay since then, if
// the range of the warp's channels allows it; else by dyadic levels: h = 8, 4, 2, 1 pairs rows of
// the second h tokens of every 2 h with columns of the first h, which meet between the two.
#pragma once

#include "cuda/staged/backward/grad/rows.cuh"
#include "cuda/staged/intra/inputs.cuh"

namespace kda::cuda::grad {

/// Rows are held times kAnchor and columns divided by it: bf16's range has more room below 1 than
/// rows need above, and columns the other way.
constexpr float kAnchor = 0x1p24f;
/// What kAnchor times the decay since the start of a sub-chunk may be: 83 nats below 1, 44 above.
constexpr float kLeast = 0x1p-96f, kMost = 0x1p88f;

struct Decays {
  Tokens row;                  // kAnchor times the decay since the start of the sub-chunk
  float total[kSubchunks][2];  // over a sub-chunk, of channels g and g + 8
  unsigned levels;             // bit r: sub-chunk r goes by levels
};

// ---- decays of tokens

/// Gates of the tokens of a sub-chunk as they lie in memory; 0 past the sequence and past K.
using RawGates = uint32_t[2][4];

/// Which gates there are.
struct GatePlace {
  int tokens, channels;  // left from the lane's first
  __device__ GatePlace(const GradContext& c, int subchunk)
      : tokens(c.chunk.count - subchunk * kSubchunk - 2 * c.t()),
        channels(c.a.shape.K - c.channel()) {}
  __device__ bool has(int n, int i) const { return 8 * n + i % 2 < tokens && i / 2 * 8 < channels; }
};

template <class Bits>
__device__ __forceinline__ void load_gate_bits(const GradContext& c, int subchunk, RawGates& raw) {
  const RowView& view = c.a.g;
  const auto* first = static_cast<const Bits*>(view.base) + chunk_offset(view, c.chunk, c.head) +
                      c.channel() + (subchunk * kSubchunk + 2 * c.t()) * view.stride_t;
  const GatePlace place(c, subchunk);
  for_each([&](int n, int i) {
    raw[n][i] = place.has(n, i) ? first[(8 * n + i % 2) * view.stride_t + i / 2 * 8] : 0;
  });
}
__device__ __forceinline__ void load_gates(const GradContext& c, int subchunk, RawGates& raw) {
  c.a.g.type == Element::kFloat32 ? load_gate_bits<uint32_t>(c, subchunk, raw)
                                  : load_gate_bits<uint16_t>(c, subchunk, raw);
}

template <GateMode kGateMode>
__device__ __forceinline__ void transform(const GradContext& c, const RawGates& raw, Part& decay) {
  const GateView& gate = c.a.gate;
  const float rate = gate.A_log ? expf(gate.A_log[c.head * gate.stride_A]) : 1.0f;
  constexpr bool kBounded = kGateMode == GateMode::kBounded;
  const float bound = kBounded ? gate.lower_bound * kLog2e : gate.lower_bound;
  const float slope = kBounded ? rate * kLog2e : rate;
  float bias[2] = {};
  if (gate.dt_bias)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (c.channel() + 8 * half < c.a.shape.K)
        bias[half] = gate.dt_bias[c.head * gate.stride_dt + c.channel() + 8 * half];
  for_each([&](int n, int i) {
    decay[n][i] =
        intra::decay_of<kGateMode>(float_of(raw[n][i], c.a.g.type), bias[i / 2], slope, bound);
  });
}

/// Decays of the tokens of a sub-chunk; 1 past the sequence and past K.
__device__ __forceinline__ void find_decay(const GradContext& c, int subchunk, const RawGates& raw,
                                           Part& decay) {
  if (c.a.gate.gate_mode == GateMode::kLog) transform<GateMode::kLog>(c, raw, decay);
  if (c.a.gate.gate_mode == GateMode::kSoftplus) transform<GateMode::kSoftplus>(c, raw, decay);
  if (c.a.gate.gate_mode == GateMode::kBounded) transform<GateMode::kBounded>(c, raw, decay);
  const GatePlace place(c, subchunk);
  for_each([&](int n, int i) {
    if (!place.has(n, i)) decay[n][i] = 1;  // after the transform: gate(0) is not 0
  });
}

/// Decays that levels need again lie where their gradients will: each thread reads its own.
__device__ __forceinline__ void load_decay(const GradContext& c, int subchunk, Part& decay) {
  for_each([&](int n, int i) { decay[n][i] = 1; });
  for_each_stored(c, kLogDecays, subchunk,
                  [&](int n, int i, const float& stored) { decay[n][i] = stored; });
}

// ---- products over the tokens of a tile, of one channel

/// The lanes of a channel hold two tokens each, t of them in order. Products over the tokens of
/// lanes before this one, and of those after it.
struct Scan {
  float before2, after2;  // among two lanes
  float before4, after4;  // among all four
  float total;
  __device__ Scan(const GradContext& c, float first, float second) {
    const float own = first * second, other = __shfl_xor_sync(~0u, own, 1);
    const float both = own * other, others = __shfl_xor_sync(~0u, both, 2);
    before2 = c.t() % 2 ? other : 1.0f;
    after2 = c.t() % 2 ? 1.0f : other;
    before4 = before2 * (c.t() >= 2 ? others : 1.0f);
    after4 = after2 * (c.t() >= 2 ? 1.0f : others);
    total = both * others;
  }
};

__device__ __forceinline__ bool in_range(float row) { return row >= kLeast && row <= kMost; }

__device__ __forceinline__ void scan_rows(const GradContext& c, int r, const Part& decay,
                                          Decays& d) {
  bool good = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float before = kAnchor;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float x = decay[n][2 * half], y = decay[n][2 * half + 1];
      const Scan scan(c, x, y);
      float* row = d.row[2 * r + n] + 2 * half;
      row[0] = before * (scan.before4 * x);
      row[1] = row[0] * y;
      before *= scan.total;
      good = good && in_range(row[0]) && in_range(row[1]);
    }
    d.total[r][half] = before / kAnchor;
  }
  if (!__any_sync(~0u, !good)) return;
  d.levels |= 1u << r;
  store_rows(c, kLogDecays, r, decay);
}

__device__ __forceinline__ void find_decays(const GradContext& c, const RawGates (&raw)[kSubchunks],
                                            Decays& d) {
  d.levels = 0;
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    Part decay;
    find_decay(c, r, raw[r], decay);
    scan_rows(c, r, decay, d);
  }
}

/// Decays to the end of the sub-chunk, / kAnchor.
__device__ __forceinline__ void find_ends(const GradContext& c, const Decays& d, int r, Part& end) {
  if (!(d.levels >> r & 1)) {
    for_each([&](int n, int i) { end[n][i] = d.total[r][i / 2] * ptx::rcp(d.row[2 * r + n][i]); });
    return;
  }
  Part decay;
  load_decay(c, r, decay);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float after = 1 / kAnchor;
#pragma unroll
    for (int n = 1; n >= 0; --n) {
      const float x = decay[n][2 * half], y = decay[n][2 * half + 1];
      const Scan scan(c, x, y);
      end[n][2 * half + 1] = after * scan.after4;
      end[n][2 * half] = end[n][2 * half + 1] * y;
      after *= scan.total;
    }
  }
}

// ---- factors inside a sub-chunk

/// Factors of rows and columns: row_i column_j is the decay from j to i for the pairs of the level.
struct InnerFactors {
  Part row, column;
};

__device__ __forceinline__ void anchored_factors(const Decays& d, int r, InnerFactors& f) {
  for_each([&](int n, int i) {
    f.row[n][i] = d.row[2 * r + n][i];
    f.column[n][i] = ptx::rcp(f.row[n][i]);
  });
}

/// 0 for tokens that are no rows or no columns of level h.
__device__ __forceinline__ void level_factors(const GradContext& c, const Part& decay, int h,
                                              InnerFactors& f) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float x = decay[n][i], y = decay[n][i + 1];
      const Scan scan(c, x, y);
      const float before = h == 8 ? scan.before4 : h == 4 ? scan.before2 : 1.0f;
      const float after = h == 8 ? scan.after4 : h == 4 ? scan.after2 : 1.0f;
      const bool is_row = h == 8 ? n == 1 : h == 4 ? c.t() >= 2 : c.t() % 2 == 1;
      f.row[n][i] = h > 1 && is_row ? before * x : 0.0f;
      f.row[n][i + 1] = h == 1 ? y : is_row ? before * x * y : 0.0f;
      f.column[n][i] = h == 1 ? 1.0f : is_row ? 0.0f : after * y;
      f.column[n][i + 1] = h == 1 || is_row ? 0.0f : after;
    }
}

/// Keeps the pairs of level h in a B operand of a diagonal block: tokens 8 n + g with sums over
/// tokens 8 half + 2 t and the next one.
__device__ __forceinline__ void keep_level(const GradContext& c, int h, Operand& x) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 8 * n + c.g(), j = 8 * half + 2 * c.t();
      const bool first = (i ^ j) / h == 1, second = (i ^ (j + 1)) / h == 1;
      x[2 * n + half] &= (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
    }
}

/// Runs step(factors, keep) on the pairs inside a sub-chunk: once, or for each level; keep(x) masks
/// a B operand of the diagonal block.
template <class Step>
__device__ __forceinline__ void for_each_level(const GradContext& c, const Decays& d, int r,
                                               Step&& step) {
  InnerFactors f;
  if (!(d.levels >> r & 1)) {
    anchored_factors(d, r, f);
    step(f, [](Operand&) {});
    return;
  }
  Part decay;
  load_decay(c, r, decay);
#pragma unroll 1
  for (int h = 8; h > 0; h /= 2) {
    level_factors(c, decay, h, f);
    step(f, [&](Operand& x) { keep_level(c, h, x); });
  }
}

}  // namespace kda::cuda::grad
