// SPDX-License-Identifier: Apache-2.0
// Split boundary states (SplitDesc): the fold that reads and writes all bits. It makes v_new of its
// rows anew from them, one row after the other, as the recurrence does. Rows that stay behind it
// get the v_new that follows from the new bf16, which is what later tokens read.
#pragma once

#include "cuda/decode/tail/rows.cuh"

namespace kda::cuda::tail {

/// A number as split_float() of core/convert.hpp has it.
struct SplitNumber {
  uint32_t bf16;
  int32_t rest;

  __device__ __forceinline__ static SplitNumber of(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return {bits >> 16 | 0x40u, 0};
    return {(bits + 0x8000u) >> 16, static_cast<int16_t>(bits)};
  }
  __device__ __forceinline__ float joined() const {
    return __uint_as_float((bf16 << 16) + static_cast<uint32_t>(rest));
  }
  __device__ __forceinline__ float rounded() const { return __uint_as_float(bf16 << 16); }
};

/// Where the elements of a state lie that a thread has.
struct SplitPlace {
  uint16_t* bf16;
  int16_t* rest;
  int64_t bf16_step, rest_step;  ///< from one channel to the next

  __device__ SplitPlace(const TailArgs& a, int64_t slot, int64_t head, int channel, int column)
      : bf16(static_cast<uint16_t*>(a.initial.base) +
             state_offset(a.initial, slot, head, channel, column)),
        rest(static_cast<int16_t*>(a.rest.base) +
             state_offset(a.rest, slot, head, channel, column)),
        bf16_step(a.initial.vk ? 1 : a.initial.stride_row),
        rest_step(a.rest.vk ? 1 : a.rest.stride_row) {}
};

/// 64 channels of a column in the registers of a thread, quads of neighbours. Of more channels
/// kThreads neighbouring threads have a column.
template <int kK, bool kDense>
struct SplitColumn {
  static constexpr int kQuads = 16;
  static constexpr int kThreads = kK / (4 * kQuads);
  float S[kQuads][4];
  const int part, column;
  int K;  ///< channels of this column; 0: there is none

  __device__ SplitColumn(const Shape& shape, int first)
      : part(static_cast<int>(threadIdx.x) % kThreads),
        column(first + static_cast<int>(threadIdx.x) / kThreads),
        K(column < shape.V ? shape.K : 0) {}
  __device__ int channel(int j) const { return (j * kThreads + part) * 4; }

  /// with(element, channels from the first of this thread on) for each that there is.
  template <class With>
  __device__ __forceinline__ void visit(With&& with) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (kDense || channel(j) + r < K) with(S[j][r], j * kThreads * 4 + r);
  }
  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) S[j][r] = 0;
  }
  __device__ void load(const SplitPlace& from) {
    visit([&](float& s, int at) {
      s = SplitNumber{from.bf16[at * from.bf16_step], from.rest[at * from.rest_step]}.joined();
    });
  }
  /// Rounds to bf16 behind it.
  __device__ void store(const SplitPlace& to) {
    visit([&](float& s, int at) {
      const SplitNumber number = SplitNumber::of(s);
      to.bf16[at * to.bf16_step] = static_cast<uint16_t>(number.bf16);
      to.rest[at * to.rest_step] = static_cast<int16_t>(number.rest);
      s = number.rounded();
    });
  }
  /// S = Diag(decay) S; returns S^T k, over all channels.
  __device__ float decay(const float* decays, const float* keys) {
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const float4 d = *reinterpret_cast<const float4*>(decays + channel(j));
      const float4 k = *reinterpret_cast<const float4*>(keys + channel(j));
      S[j][0] *= d.x, S[j][1] *= d.y, S[j][2] *= d.z, S[j][3] *= d.w;
      sums[0] = fmaf(S[j][0], k.x, sums[0]), sums[1] = fmaf(S[j][1], k.y, sums[1]);
      sums[2] = fmaf(S[j][2], k.z, sums[2]), sums[3] = fmaf(S[j][3], k.w, sums[3]);
    }
    return sum_over((sums[0] + sums[1]) + (sums[2] + sums[3]), 1, kThreads);
  }
  /// S += k v_new
  __device__ void add(const float* keys, float v_new) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const float4 k = *reinterpret_cast<const float4*>(keys + channel(j));
      S[j][0] = fmaf(k.x, v_new, S[j][0]), S[j][1] = fmaf(k.y, v_new, S[j][1]);
      S[j][2] = fmaf(k.z, v_new, S[j][2]), S[j][3] = fmaf(k.w, v_new, S[j][3]);
    }
  }
};

/// Takes the state behind row i, and returns v_new of the thread's column.
template <class Rows>
__device__ __forceinline__ float advance(const Rows& rows, int i,
                                         SplitColumn<Rows::kKeys, Rows::kIsDense>* state) {
  const TailArgs& a = rows.a;
  const float v = state->K > 0 ? rows.tail_value(i, state->column) : 0.0f;
  const float factor = rows.key_factor(i);
  const float read = factor * state->decay(rows.decay(i), rows.k(i));
  const float v_new = rows.tail_beta(i) * (v - read);
  state->add(rows.k(i), factor * v_new);
  return v_new;
}

/// Folds rows [0, target) of S_0, which is written to the sequence's slot, and makes v_new of the
/// sure rows behind them anew. A function of its own: kernels have their registers to themselves.
template <int kK, bool kDense>
__device__ __noinline__ void fold_split(const TailArgs& a, Unit unit, Start start, int target) {
  const Rows<kK, kDense> rows(a, unit, start, 0, 0);
  using Column = SplitColumn<kK, kDense>;
  const int columns = static_cast<int>(blockDim.x) / Column::kThreads;
  rows.prefetch_values();
  for (int first = 0; first < a.shape.V; first += columns) {
    Column state(a.shape, first);
    const int channel = state.channel(0);
    state.clear();
    if (start.source >= 0) state.load({a, start.source, unit.head, channel, state.column});
#pragma unroll 1
    for (int i = 0;; ++i) {
      if (i == target) state.store({a, start.slot, unit.head, channel, state.column});
      if (i == start.sure()) break;
      const float v_new = advance(rows, i, &state);
      if (i >= target && state.part == 0 && state.K > 0) rows.store_v_new(i, state.column, v_new);
    }
  }
  __syncthreads();
}

}  // namespace kda::cuda::tail
