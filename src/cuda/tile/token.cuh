// SPDX-License-Identifier: Apache-2.0
// A token, a warp at a time: from its rows to what the recurrence takes (docs/operation.md).
// load() only asks for the rows, so that other loads can follow; prepare() waits for them. Row is
// where they go: LaneRow, or SharedRow (for which the caller waits).
#pragma once

#include <type_traits>

#include "cuda/tile/head_gates.hpp"
#include "cuda/tile/warp.cuh"

namespace kda::cuda {

/// Normalised q and k, decays; channels past K are 0.
template <int kK>
struct alignas(16) Token {
  float decay[kK], k[kK], q[kK];
  float qk;  // q . k
};

/// q and k of a token on their way.
template <int kK, template <int> class Row = LaneRow>
struct RawQK {
  static constexpr int kCount = kK / 32;
  Row<kCount> raw_q, raw_k;

  template <class Args>
  __device__ __forceinline__ void load(const Args& a, int64_t n, int64_t token, int64_t q_head) {
    raw_q.load(a.q, row_offset(a.q, a.map, n, token, q_head), a.shape.K);
    raw_k.load(a.k, row_offset(a.k, a.map, n, token, q_head), a.shape.K);
  }
  template <class Args>
  __device__ __forceinline__ void prepare(const Args& a, Token<kK>& out) const {
    const int lane = threadIdx.x % 32;
    float q[kCount], k[kCount], qq = 0, kk = 0, qk = 0;
    raw_q.convert(a.q.type, q), raw_k.convert(a.k.type, k);
#pragma unroll
    for (int i = 0; i < kCount; ++i) qq += q[i] * q[i], kk += k[i] * k[i], qk += q[i] * k[i];
    qk = sum_over(qk, 1, 32);
    float q_scale = 1, k_scale = 1;
    if (a.gate.l2norm) {
      q_scale = 1.0f / sqrtf(sum_over(qq, 1, 32) + 1e-6f);
      k_scale = 1.0f / sqrtf(sum_over(kk, 1, 32) + 1e-6f);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out.q[lane + 32 * i] = q[i] * q_scale;
      out.k[lane + 32 * i] = k[i] * k_scale;
    }
    if (lane == 0) out.qk = qk * q_scale * k_scale;
  }
};

/// Gates of a token on their way.
template <int kK, template <int> class Row = LaneRow>
struct RawGates {
  static constexpr int kCount = kK / 32;
  static constexpr bool kInWords = std::is_same_v<Row<1>, SharedRow<1>>;
  Row<kCount> raw_g, raw_bias;
  Row<1> raw_A_log;
  int half;  ///< of the word that has one gate a head of 16 bits, in shared memory

  template <class Args>
  __device__ __forceinline__ void load(const Args& a, int64_t n, int64_t token, int64_t head) {
    const int64_t at = row_offset(a.g, a.map, n, token, head);
    if (is_alone(a, at, head)) {
      if constexpr (kInWords)
        if (threadIdx.x % 32 == 0) raw_g.words[0] = load_bits(a.g.base, a.g.type, at);
    } else {
      raw_g.load(a.g, at, a.shape.K, gate_step(a));
    }
    if constexpr (kInWords && kHasHeadGates<Args>)
      if (threadIdx.x % 32 == 0) half = static_cast<int>(at & 1);
    if (a.gate.gate_mode == GateMode::kLog) return;
    raw_A_log.load(floats(a.gate.A_log), head * a.gate.stride_A, a.gate.A_log ? 1 : 0);
    raw_bias.load(floats(a.gate.dt_bias), head * a.gate.stride_dt, a.gate.dt_bias ? a.shape.K : 0,
                  bias_step(a));
  }
  /// Whether the tensor may end in the middle of the word that has the last head's gate.
  template <class Args>
  __device__ static bool is_alone(const Args& a, int64_t at, int64_t head) {
    if constexpr (kInWords && kHasHeadGates<Args>)
      return gate_step(a) == 0 && a.g.type != Element::kFloat32 && at % 2 == 0 &&
             head + 1 == a.shape.HV;
    return false;
  }
  __device__ static RowView floats(const float* base) {
    return {const_cast<float*>(base), 0, 0, 0, Element::kFloat32, true};
  }
  template <class Args>
  __device__ __forceinline__ void prepare(const Args& a, Token<kK>& out) const {
    float g[kCount], bias[kCount] = {}, A_log[1] = {};
    raw_g.convert(a.g.type, g);
    if constexpr (kInWords && kHasHeadGates<Args>) {
      // Lane 0 has the first half of the word, lane 1 the second.
      if (gate_step(a) == 0 && a.g.type != Element::kFloat32) g[0] = __shfl_sync(~0u, g[0], half);
#pragma unroll
      for (int i = 1; i < kCount; ++i)
        if (gate_step(a) == 0) g[i] = g[0];
    }
    if (a.gate.gate_mode != GateMode::kLog) {
      raw_bias.convert(Element::kFloat32, bias);
      raw_A_log.convert(Element::kFloat32, A_log);
    }
    const float rate = expf(__shfl_sync(~0u, A_log[0], 0));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      out.decay[c] = c < a.shape.K ? exp2f(log2_decay_exact(a.gate, g[i], bias[i], rate)) : 0.0f;
    }
  }
};

/// kCount x 32 values of a token from `column0` on, and beta (of lane 0).
template <int kCount>
struct RawValues {
  LaneRow<kCount> v;
  LaneRow<1> beta;

  /// `columns`: how many of the values there are.
  template <class Args>
  __device__ __forceinline__ void load(const Args& a, int64_t n, int64_t token, int64_t head,
                                       int column0, int columns) {
    v.load(a.v, row_offset(a.v, a.map, n, token, head) + column0, columns);
    beta.load(a.beta, row_offset(a.beta, a.map, n, token, head), 1);
  }
  /// In lane 0.
  template <class Args>
  __device__ __forceinline__ float beta_of(const Args& a) const {
    float raw[1];
    beta.convert(a.beta.type, raw);
    return beta_value(a.gate, raw[0]);
  }
};

}  // namespace kda::cuda
