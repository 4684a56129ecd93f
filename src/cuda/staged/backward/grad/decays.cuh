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

/// Rows, which are decays, are held times kAnchor, and columns, their inverses, divided by it: so
/// both lie in the middle of bf16's range.
constexpr float kAnchor = 0x1p24f;
/// Bounds of kAnchor times the decay since the start of a sub-chunk, which then is between exp(-83)
/// and exp(44).
constexpr float kLeast = 0x1p-96f, kMost = 0x1p88f;

// Loops over sub-chunks stay loops: a block runs the code once or twice, so it would wait for more
// of it to be fetched.

/// Turns the sub-chunks of x by one: kStep 1 puts the second one first, -1 the last one.
template <int kStep, class Element, int kCount, int kSize>
__device__ __forceinline__ void turn(Element (&x)[kCount][kSize]) {
  constexpr int kBy = kCount / kSubchunks;
  Element moved[kCount][kSize];
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int i = 0; i < kSize; ++i) moved[n][i] = x[(n + kStep * kBy + kCount) % kCount][i];
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[n][i] = moved[n][i];
}

struct Decays {
  Tokens row;                  // kAnchor times the decay since the start of the sub-chunk
  float total[kSubchunks][2];  // over a sub-chunk, of channels g and g + 8
  unsigned levels;             // bit r: sub-chunk r goes by levels
  __device__ bool by_levels(int r) const { return levels >> r & 1; }
  /// Turns the sub-chunks of `row` and `total`; levels keep their bits.
  template <int kStep>
  __device__ void turn() {
    grad::turn<kStep>(row);
    grad::turn<kStep>(total);
  }
};

// ---- decays of tokens

/// Gates as they lie in memory, of the tokens and channels of Tokens; 0 past the sequence and K.
using RawGates = uint32_t[kTokenTiles][4];

/// f(tile, index, whether there is such a token and channel)
template <class F>
__device__ __forceinline__ void for_each_gate(const GradContext& c, F&& f) {
  const int tokens = c.chunk.count - 2 * c.t();  // from the lane's first on
  const int of_channel[2] = {c.channel() < c.a.shape.K ? tokens : 0,
                             c.channel() + 8 < c.a.shape.K ? tokens : 0};
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) f(n, i, 8 * n + i % 2 < of_channel[i / 2]);
}

/// All gates, to the L2: two threads a token.
__device__ __forceinline__ void prefetch_gates(const GradContext& c) {
  const RowView& view = c.a.g;
  const int size = view.type == Element::kFloat32 ? 4 : 2, row = c.tid / 2;
  static_assert(kThreads == 2 * kChunk);
  if (row >= c.chunk.count) return;
  const char* first = static_cast<const char*>(view.base) +
                      (chunk_offset(view, c.chunk, c.head) + row * view.stride_t) * size;
  const int bytes = (c.gate_step == 0 ? 1 : c.a.shape.K) * size;
  for (int byte = c.tid % 2 * 128; byte < bytes; byte += 256) ptx::prefetch_l2(first + byte);
}

template <class Bits>
__device__ __forceinline__ void load_gate_bits(const GradContext& c, RawGates& raw) {
  const RowView& view = c.a.g;
  const auto* even = static_cast<const Bits*>(view.base) + chunk_offset(view, c.chunk, c.head) +
                     c.channel() * c.gate_step + 2 * c.t() * view.stride_t;
  const auto* odd = even + view.stride_t;
  for_each_gate(c, [&](int n, int i, bool there) {
    raw[n][i] = there ? (i % 2 ? odd : even)[i / 2 * 8 * c.gate_step] : 0;
    if (i == 3) even += 8 * view.stride_t, odd += 8 * view.stride_t;
  });
}
__device__ __forceinline__ void load_gates(const GradContext& c, RawGates& raw) {
  c.a.g.type == Element::kFloat32 ? load_gate_bits<uint32_t>(c, raw)
                                  : load_gate_bits<uint16_t>(c, raw);
}

template <class F>
__device__ __forceinline__ void for_all(Tokens& x, F&& f) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = f(n, i);
}
template <GateMode kGateMode>
__device__ __forceinline__ void transform(const GradContext& c, Tokens& x) {
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
  for_all(x, [&](int n, int i) {
    return intra::decay_of<kGateMode>(x[n][i], bias[i / 2], slope, bound);
  });
}
/// Decays of all tokens; 1 past the sequence and past K.
__device__ __forceinline__ void find_decays(const GradContext& c, const RawGates& raw, Tokens& x) {
  const auto unpack = [&](Element type) {
    for_all(x, [&](int n, int i) { return float_of(raw[n][i], type); });
  };
  if (c.a.g.type == Element::kFloat32)
    unpack(Element::kFloat32);
  else if (c.a.g.type == Element::kFloat16)
    unpack(Element::kFloat16);
  else
    unpack(Element::kBFloat16);
  if (c.a.gate.gate_mode == GateMode::kLog) transform<GateMode::kLog>(c, x);
  if (c.a.gate.gate_mode == GateMode::kSoftplus) transform<GateMode::kSoftplus>(c, x);
  if (c.a.gate.gate_mode == GateMode::kBounded) transform<GateMode::kBounded>(c, x);
  if (c.chunk.count == kChunk && c.a.shape.K == c.padded_K()) return;
  for_each_gate(c, [&](int n, int i, bool there) {
    if (!there) x[n][i] = 1;  // after the transform: gate(0) is not 0
  });
}

/// Decays that levels need again lie where their gradients will: each thread reads its own.
__device__ __forceinline__ void load_decay(const GradContext& c, int subchunk, Part& decay) {
  for_each([&](int n, int i) { decay[n][i] = 1; });
  for_each_stored(c, kLogDecays, subchunk,
                  [&](int n, int i, const float& stored) { decay[n][i] = stored; });
}

// ---- products over the tokens of a tile, of one channel

/// Four lanes have a channel's eight tokens of a tile, two each. Products over the tokens of lanes
/// before this one, and of those after it.
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

/// From decays of tokens to those of rows, in their place.
__device__ __forceinline__ void scan_rows(const GradContext& c, int r, Decays& d) {
  Part decay;
  for_each([&](int n, int i) { decay[n][i] = d.row[2 * r + n][i]; });
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

__device__ __forceinline__ void find_decays(const GradContext& c, const RawGates& raw, Decays& d) {
  find_decays(c, raw, d.row);
  d.levels = 0;
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) scan_rows(c, r, d);
}

/// Decays to the end of sub-chunk r, which is number `place` of `d`, / kAnchor.
__device__ __forceinline__ void find_ends(const GradContext& c, const Decays& d, int r, int place,
                                          Part& end) {
  if (!d.by_levels(r)) {
    for_each([&](int n, int i) {
      end[n][i] = d.total[place][i / 2] * ptx::rcp(d.row[2 * place + n][i]);
    });
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

// ---- levels

/// Factors of level h, whose products are the decays of its pairs; 0 for tokens that are no rows or
/// no columns of it.
__device__ __forceinline__ void level_factors(const GradContext& c, const Part& decay, int h,
                                              Part& row, Part& column) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float x = decay[n][i], y = decay[n][i + 1];
      const Scan scan(c, x, y);
      const float before = h == 8 ? scan.before4 : h == 4 ? scan.before2 : 1.0f;
      const float after = h == 8 ? scan.after4 : h == 4 ? scan.after2 : 1.0f;
      const bool is_row = h == 8 ? n == 1 : h == 4 ? c.t() >= 2 : c.t() % 2 == 1;
      row[n][i] = h > 1 && is_row ? before * x : 0.0f;
      row[n][i + 1] = h == 1 ? y : is_row ? before * x * y : 0.0f;
      column[n][i] = h == 1 ? 1.0f : is_row ? 0.0f : after * y;
      column[n][i + 1] = h == 1 || is_row ? 0.0f : after;
    }
}

/// Stands for h where all pairs of a sub-chunk are of one level.
constexpr int kOneLevel = 0;

/// Masks a B operand of a diagonal block, in which a lane has tokens 8 n + g, with sums over tokens
/// 8 half + 2 t and the next one: keeps pairs of level h. kRows: of rows with sums over columns.
struct LevelMask {
  Operand bits;
  template <bool kRows>
  __device__ static LevelMask of(const GradContext& c, int h) {
    const auto keeps = [&](int n, int k) {
      const int later = kRows ? n : k, earlier = kRows ? k : n;
      return later > earlier && (h == kOneLevel || ((later ^ earlier) >= h &&  //
                                                    (later ^ earlier) < 2 * h));
    };
    LevelMask mask;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 8 * n + c.g(), j = 8 * half + 2 * c.t();
        mask.bits[2 * n + half] =
            (keeps(i, j) ? 0xffffu : 0u) | (keeps(i, j + 1) ? 0xffff0000u : 0u);
      }
    return mask;
  }
  __device__ void apply(Operand& x) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] &= bits[i];
  }
};

/// step(h, factors of rows, factors of columns) for each level of sub-chunk r.
template <class Step>
__device__ __forceinline__ void for_each_level(const GradContext& c, int r, Step&& step) {
  Part decay, row, column;
  load_decay(c, r, decay);
#pragma unroll 1
  for (int h = 8; h > 0; h /= 2) {
    level_factors(c, decay, h, row, column);
    step(h, row, column);
  }
}

}  // namespace kda::cuda::grad
