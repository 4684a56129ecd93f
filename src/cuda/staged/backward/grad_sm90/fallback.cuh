// SPDX-License-Identifier: Apache-2.0
// Chunks that fell back: the sums of grad/, whose rows the same block takes back through norms,
// gates and steps. The value heads of a q/k head share its dq and dk, so all of them are done again
// where one fell back.
#pragma once

#include "cuda/recurrent/backward/gates.cuh"
#include "cuda/staged/backward/grad/chunk.cuh"
#include "cuda/staged/backward/grad_sm90/shared.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::sm90::grad {

using cuda::grad::GradContext;
using cuda::grad::Gradient;

/// A lane's four channels of a row; with K = 64 half of the lanes have some.
struct Four {
  float x[4] = {};
};
__device__ __forceinline__ bool has_channels(const GradContext& c) {
  return 4 * c.lane() < c.a.shape.K;
}
/// A gradient of a token, of the value head `before` heads before c's in memory.
__device__ __forceinline__ Four load_row(const GradContext& c, Gradient which, int before,
                                         int token) {
  if (!has_channels(c)) return {};
  const float4 y = *reinterpret_cast<const float4*>(cuda::grad::row_of(c, token) -
                                                    before * cuda::grad::row_size(c) +
                                                    which * c.padded_K() + 4 * c.lane());
  return {{y.x, y.y, y.z, y.w}};
}
__device__ __forceinline__ Four load_four(const GradContext& c, const RowView& view, int head,
                                          int token) {
  if (!has_channels(c)) return {};
  const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const Element16*>(view.base) +
                                                     chunk_offset(view, c.chunk, head) +
                                                     token * view.stride_t + 4 * c.lane());
  const float2 low = ptx::unpack<Element16>(bits.x), high = ptx::unpack<Element16>(bits.y);
  return {{low.x, low.y, high.x, high.y}};
}
__device__ __forceinline__ void store_four(const GradContext& c, const RowView& view, int head,
                                           int token, const Four& y) {
  if (!view.base || !has_channels(c)) return;
  *reinterpret_cast<uint2*>(static_cast<Element16*>(view.base) + chunk_offset(view, c.chunk, head) +
                            token * view.stride_t + 4 * c.lane()) = {
      ptx::pack<Element16>(y.x[0], y.x[1]), ptx::pack<Element16>(y.x[2], y.x[3])};
}

/// Gates of any type, and one a head.
__device__ __forceinline__ Four load_gates(const GradContext& c, const RowView& view, int token) {
  Four y;
  if (!has_channels(c)) return y;
#pragma unroll
  for (int n = 0; n < 4; ++n)
    y.x[n] = float_of(load_bits(view.base, view.type,
                                chunk_offset(view, c.chunk, c.head) + token * view.stride_t +
                                    (4 * c.lane() + n) * c.gate_step),
                      view.type);
  return y;
}
/// dg of a channel, or the sum over channels. All lanes take part.
__device__ __forceinline__ void store_gates(const GradContext& c, const RowView& view, int step,
                                            int token, const Four& y) {
  if (!view.base) return;
  const int64_t at = chunk_offset(view, c.chunk, c.head) + token * view.stride_t;
  if (step == 0) {
    const float own = has_channels(c) ? (y.x[0] + y.x[1]) + (y.x[2] + y.x[3]) : 0.0f;
    const float sum = sum_over(own, 1, 32);
    if (c.lane() == 0) store_element(view.base, view.type, at, sum);
  } else if (has_channels(c)) {
#pragma unroll
    for (int n = 0; n < 4; ++n) store_element(view.base, view.type, at + 4 * c.lane() + n, y.x[n]);
  }
}

/// dq or dk of a token, from the gradients by scale x / |x|, or by scale x, without the scale, of
/// the value heads before `c`'s, which is the last of its q/k head, in order.
template <GradGates kGates>
__device__ __forceinline__ void finish_row(const GradContext& c, const RowView& input,
                                           const RowView& output, Gradient which, float scale,
                                           int token) {
  const int others = static_cast<int>(c.a.shape.group.value) - 1;
  const int step = kGates != GradGates::kTiles && c.tiled ? static_cast<int>(c.a.shape.H)
                                                          : 1;  // to the next one
  Four dy = load_row(c, which, others * step, token);
#pragma unroll 1
  for (int before = others - 1; before >= 0; --before) {
    const Four more = load_row(c, which, before * step, token);
#pragma unroll
    for (int n = 0; n < 4; ++n) dy.x[n] += more.x[n];
  }
  float factor = scale, along = 0;
  const Four x = load_four(c, input, c.q_head(), token);
  if (c.a.gate.l2norm) {
    float xx = 0, xdy = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) xx = fmaf(x.x[n], x.x[n], xx), xdy = fmaf(x.x[n], dy.x[n], xdy);
    const float r = rsqrtf(sum_over(xx, 1, 32) + 1e-6f);
    along = sum_over(xdy, 1, 32) * r * r;
    factor *= r;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) dy.x[n] = factor * fmaf(-x.x[n], along, dy.x[n]);
  store_four(c, output, c.q_head(), token, dy);
}

struct LeftSums {
  float ddt_bias[cuda::grad::kWarps][kK];
  double dA_log[cuda::grad::kWarps];
};

/// dq and dk, after the last value head of a q/k head.
template <GradGates kGates>
__device__ __forceinline__ void finish_rows(const Args& a, const GradContext& c) {
#pragma unroll 1
  for (int token = c.warp(); token < c.chunk.count; token += cuda::grad::kWarps) {
    finish_row<kGates>(c, a.q, a.dq, cuda::grad::kQueries, a.gate.scale, token);
    finish_row<kGates>(c, a.k, a.dk, cuda::grad::kKeys, 1, token);
  }
}

/// dg, dbeta and sums of a value head, after a barrier; leaves shared memory in use.
template <GradGates kGates>
__device__ __forceinline__ void finish_gates(const Args& a, const GradContext& c) {
  const GateView& gate = a.gate;
  const float rate = gate.A_log ? expf(gate.A_log[c.head * gate.stride_A]) : 1.0f;
  Four bias = {}, ddt_bias = {};
  float dA_log = 0;
  if (gate.dt_bias && has_channels(c))
    for (int n = 0; n < 4; ++n)
      bias.x[n] = gate.dt_bias[c.head * gate.stride_dt + 4 * c.lane() + n];
#pragma unroll 1
  for (int token = c.warp(); token < c.chunk.count; token += cuda::grad::kWarps) {
    Four dg = load_row(c, cuda::grad::kLogDecays, 0, token);
    const Four raw =
        kGates == GradGates::kTiles ? load_four(c, a.g, c.head, token) : load_gates(c, a.g, token);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto gradient = cuda::backward::undo_gate(gate, raw.x[n], bias.x[n], rate, dg.x[n]);
      ddt_bias.x[n] += gradient.raw;
      dA_log += gradient.A_log;
      dg.x[n] = gradient.raw;
    }
    if constexpr (kGates == GradGates::kTiles)
      store_four(c, a.dg, c.head, token, dg);
    else
      store_gates(c, a.dg, a.dgate_step, token, dg);
    if (c.lane() == 0 && a.dbeta.base) {
      const auto at = [&](const RowView& view) {
        return chunk_offset(view, c.chunk, c.head) + token * view.stride_t;
      };
      const float raw_beta = float_of(load_bits(a.beta.base, a.beta.type, at(a.beta)), a.beta.type);
      store_element(a.dbeta.base, a.dbeta.type, at(a.dbeta),
                    cuda::grad::row_of(c, token)[3 * c.padded_K()] *
                        cuda::backward::step_slope(gate, raw_beta));
    }
  }
  if (!a.sums) return;
  auto& sums = *reinterpret_cast<LeftSums*>(ptx::dynamic_shared());
#pragma unroll
  for (int n = 0; n < 4; ++n) sums.ddt_bias[c.warp()][4 * c.lane() + n] = ddt_bias.x[n];
  const double all = sum_over(dA_log, 1, 32);
  if (c.lane() == 0) sums.dA_log[c.warp()] = all;
  __syncthreads();
  const int K = a.shape.K;
  for (int d = c.tid; d <= K; d += cuda::grad::kThreads) {
    double total = 0;
    for (int warp = 0; warp < cuda::grad::kWarps; ++warp)
      total += d < K ? static_cast<double>(sums.ddt_bias[warp][d]) : sums.dA_log[warp];
    a.sums[c.tile() * (K + 1) + d] = total;
  }
}

/// Does the chunks of a q/k head.
template <GradGates kGates>
__device__ __forceinline__ void run_value_heads(const Args& a, unsigned unit) {
  const unsigned group = a.shape.group.value;
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(unit * group));
#pragma unroll 1
  for (unsigned turn = unit * group; turn < (unit + 1) * group; ++turn) {
    constexpr bool kAny = kGates != GradGates::kTiles;
    GradContext c(a, *reinterpret_cast<cuda::grad::Shared*>(ptx::dynamic_shared()), chunk,
                  tile_of<Heads::kGrouped, kGates>(a, turn), static_cast<int>(threadIdx.x),
                  kAny ? a.gate_step : 1, kAny && a.tiled);
    cuda::grad::run_chunk(c);
    __syncthreads();
    finish_gates<kGates>(a, c);
    if (turn + 1 == (unit + 1) * group) finish_rows<kGates>(a, c);
    __syncthreads();
  }
}

/// Word i of those of a chunk and the value heads of a q/k head.
template <GradGates kGates>
__device__ __forceinline__ uint32_t fallback_word(const Args& a, unsigned unit, unsigned i) {
  const unsigned group = a.shape.group.value;
  if constexpr (kGates == GradGates::kTiles)
    return a.fallback[unit * group * kFallbackWords + i];
  else
    return a.fallback[tile_of<Heads::kGrouped, kGates>(a, unit * group + i / kFallbackWords) *
                          kFallbackWords +
                      i % kFallbackWords];
}

/// A block looks at every gridDim.x-th chunk and q/k head, kThreads of them at once.
template <GradGates kGates>
__device__ __forceinline__ void run_fallback(const Args& a) {
  using cuda::grad::kThreads;
  const unsigned group = a.shape.group.value, units = a.tiles / group;
  const auto is_left = [&](unsigned unit) {
    uint32_t any = 0;
    for (unsigned i = 0; unit < units && i < kFallbackWords * group; ++i)
      any |= fallback_word<kGates>(a, unit, i);
    return any != 0;
  };
#pragma unroll 1
  for (unsigned first = blockIdx.x; first < units; first += gridDim.x * kThreads) {
    if (!__syncthreads_or(is_left(first + gridDim.x * threadIdx.x))) continue;
#pragma unroll 1
    for (unsigned i = 0; i < kThreads; ++i)
      if (is_left(first + gridDim.x * i)) run_value_heads<kGates>(a, first + gridDim.x * i);
  }
}

}  // namespace kda::cuda::sm90::grad
