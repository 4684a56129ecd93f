// SPDX-License-Identifier: Apache-2.0
// Decode, a warp at a time: slots of a sequence, and a token from its rows to what the recurrence
// takes (docs/operation.md).
#pragma once

#include "cuda/smxx/decode.hpp"
#include "cuda/tile/warp.cuh"

namespace kda::cuda {

inline constexpr int64_t kMostDecodeTokens = 8;

/// Normalised q and k, decays; channels past K are 0.
template <int kK>
struct alignas(16) DecodeToken {
  float decay[kK], k[kK], q[kK];
  float qk;  // q . k
};

__device__ __forceinline__ int64_t most_tokens(const DecodeArgs& a) {
  return a.index_columns > 1 ? min(a.index_columns, kMostDecodeTokens) : kMostDecodeTokens;
}

/// Slot that the sequence starts from; -1: it is skipped.
__device__ __forceinline__ int64_t source_slot(const DecodeArgs& a, int64_t n) {
  const int64_t accepted = a.num_accepted ? a.num_accepted[n] : 1;
  if (accepted < 1 || accepted > a.index_columns) return -1;
  const int64_t slot = a.pool.indices ? a.pool.indices[n * a.index_columns + accepted - 1] : n;
  return slot >= 0 && slot < a.pool.num_slots ? slot : -1;
}

/// Slot that the state after token `i` of the sequence goes to; -1: none.
__device__ __forceinline__ int64_t target_slot(const DecodeArgs& a, int64_t n, int64_t i, bool last,
                                               int64_t source) {
  if (a.index_columns == 1) return last ? source : -1;
  const int64_t slot = a.pool.indices[n * a.index_columns + i];
  return slot < a.pool.num_slots ? slot : -1;
}

/// q and k of a token on their way.
template <int kK>
struct RawQK {
  static constexpr int kCount = kK / 32;
  float q[kCount], k[kCount];

  __device__ void load(const DecodeArgs& a, int64_t n, int64_t token, int64_t q_head) {
    load_lane(a.q, row_offset(a.q, a.map, n, token, q_head), a.shape.K, q);
    load_lane(a.k, row_offset(a.k, a.map, n, token, q_head), a.shape.K, k);
  }
  __device__ void prepare(const DecodeArgs& a, DecodeToken<kK>& out) const {
    const int lane = threadIdx.x % 32;
    float qq = 0, kk = 0, qk = 0;
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
template <int kK>
struct RawGates {
  static constexpr int kCount = kK / 32;
  float g[kCount], bias[kCount];

  __device__ void load(const DecodeArgs& a, int64_t n, int64_t token, int64_t head) {
    load_lane(a.g, row_offset(a.g, a.map, n, token, head), a.shape.K, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      bias[i] =
          a.gate.dt_bias && c < a.shape.K ? a.gate.dt_bias[head * a.gate.stride_dt + c] : 0.0f;
    }
  }
  __device__ void prepare(const DecodeArgs& a, int64_t head, DecodeToken<kK>& out) const {
    const float rate = gate_rate(a.gate, head);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      out.decay[c] = c < a.shape.K ? exp2f(log2_decay_exact(a.gate, g[i], bias[i], rate)) : 0.0f;
    }
  }
};

}  // namespace kda::cuda
