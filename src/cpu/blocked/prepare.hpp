// SPDX-License-Identifier: Apache-2.0
// prepare(): gates, norms, decayed rows and in-chunk scores of a group (equations: kernels.hpp).
#pragma once

#include "cpu/blocked/kernels.hpp"
#include "cpu/blocked/math.hpp"
#include "cpu/blocked/rows.hpp"

namespace kda::cpu::blocked::KDA_ISA {

static inline int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

static inline float scalar_sigmoid(float x) {
  alignas(64) float lane[kWidth];
  store(lane, sigmoid(set1(x)));
  return lane[0];
}

static inline float load_beta(const PrepareArgs& args, int token) {
  const float raw =
      load_element(args.beta.data + token * args.beta.token_stride_bytes, args.beta.dtype, 0);
  if (args.beta_mode == BetaMode::kPlain) return raw;
  return (args.beta_mode == BetaMode::kSigmoid2 ? 2.0f : 1.0f) * scalar_sigmoid(raw);
}

static inline void scale_row(float* row, int count, float factor) {
  for (int d = 0; d < count; d += kWidth) store(row + d, load(row + d) * set1(factor));
}

/// rsqrt(sum x^2 + eps); the sum in fp64, so that long rows lose nothing.
static inline float l2_factor(const float* row, int count) {
  return static_cast<float>(1.0 / __builtin_sqrt(dot_f64(row, row, count) + 1e-6));
}

/// q (normalised and scaled) and k (normalised) of a token; returns A_ii. It comes from the raw
/// rows in fp64: with few tokens it is all of o, and q . k may cancel.
static inline float load_qk_row(const PrepareArgs& args, int token, int padded, float* q,
                                float* k) {
  load_row(args.q.data + token * args.q.token_stride_bytes, args.q.dtype, args.key_dim, padded, q);
  load_row(args.k.data + token * args.k.token_stride_bytes, args.k.dtype, args.key_dim, padded, k);
  const float q_factor = args.scale * (args.qk_l2norm ? l2_factor(q, padded) : 1.0f);
  const float k_factor = args.qk_l2norm ? l2_factor(k, padded) : 1.0f;
  const auto diagonal = static_cast<float>(dot_f64(q, k, padded) * q_factor * k_factor);
  scale_row(q, padded, q_factor);
  if (args.qk_l2norm) scale_row(k, padded, k_factor);
  return diagonal;
}

/// Rows and diagonals of the tokens of one chunk.
static inline void load_qk(const PrepareArgs& args, int first, int count, int padded, Group& group,
                           float (&A)[kChunk][kChunk]) {
  for (int i = 0; i < count; ++i)
    A[i][i] = load_qk_row(args, first + i, padded, group.q_row[i], group.k_row[i]);
}

/// Raw gate of channels [d, d + rest), rest < kWidth; zeros behind them.
static inline F load_last_gates(const PrepareArgs& args, const char* row, int d, int rest) {
  alignas(64) float lane[kWidth];
  if (args.one_gate) {
    const float gate = load_element(row, args.g.dtype, 0);
    for (int i = 0; i < kWidth; ++i) lane[i] = i < rest ? gate : 0;
  } else {
    load_row(row + d * element_bytes(args.g.dtype), args.g.dtype, rest, kWidth, lane);
  }
  return load(lane);
}

/// Raw gate plus dt_bias of kWidth channels; zeros past key_dim.
static inline F load_gate_input(const PrepareArgs& args, int token, int d) {
  const char* row = args.g.data + token * args.g.token_stride_bytes;
  if (d + kWidth <= args.key_dim) {
    const F raw = args.one_gate ? set1(load_element(row, args.g.dtype, 0))
                                : load_vector(row + d * element_bytes(args.g.dtype), args.g.dtype);
    if (!args.dt_bias) return raw;
    return raw + (args.one_bias ? set1(*args.dt_bias) : load(args.dt_bias + d));
  }
  const int first = d < args.key_dim ? d : args.key_dim;
  const int rest = args.key_dim - first;
  alignas(64) float lane[kWidth];
  const F raw = load_last_gates(args, row, first, rest);
  if (!args.dt_bias) return raw;
  if (args.one_bias) return raw + set1(*args.dt_bias);
  load_row(args.dt_bias + first, DType::kFloat32, rest, kWidth, lane);
  return raw + load(lane);
}

static inline F load_log_decay(const PrepareArgs& args, int token, int d, F factor, F bound) {
  return log_decay(args.gate_mode, load_gate_input(args, token, d), factor, bound);
}

/// Decays of one chunk, and the rows that they scale. Products only: forward for gamma, backward
/// for kend. expm1 of the chunk's decay is composed as (1 + x)(1 + y) - 1 = x + y + x y.
static inline void decay_rows(const PrepareArgs& args, int chunk, int count, int padded,
                              Group& group) {
  const int first = chunk * kChunk;
  const F factor = set1(args.gate_factor);
  const F bound = set1(args.lower_bound);
  const F all_ones = set1(__builtin_bit_cast(float, 0xffffffffu));
  for (int d = 0; d < padded; d += kWidth) {
    F gamma = set1(1);
    F gamma_m1 = set1(0);
    for (int i = 0; i < count; ++i) {
      const ExpPair a = exp_pair(load_log_decay(args, first + i, d, factor, bound));
      gamma = gamma * a.exp;
      gamma_m1 = fma(gamma_m1, a.expm1, gamma_m1 + a.expm1);
      store(group.a_row[i] + d, a.exp);
      store(group.kgam[first + i] + d, load(group.k_row[i] + d) * gamma);
      store(group.qgam[first + i] + d, load(group.q_row[i] + d) * gamma);
    }
    F after = set1(1);
    for (int i = count - 1; i >= 0; --i) {
      store(group.kend[first + i] + d, load(group.k_row[i] + d) * after);
      after = after * load(group.a_row[i] + d);
    }
    const F half = set1(0.5f);
    store(group.decay[chunk] + d, select_greater(gamma, half, gamma_m1, gamma));
    store(group.keep[chunk] + d, select_greater(gamma, half, all_ones, set1(0)));
  }
}

/// A short chunk's missing tokens: zero rows, zero scores.
static inline void clear_missing(int chunk, int count, int padded, Group& group) {
  auto& N = group.N[chunk];
  auto& A = group.A[chunk];
  const F zero = set1(0);
  for (int i = count; i < kChunk; ++i) {
    const int row = chunk * kChunk + i;
    for (int d = 0; d < padded; d += kWidth) {
      store(group.kgam[row] + d, zero);
      store(group.qgam[row] + d, zero);
      store(group.kend[row] + d, zero);
      store(group.q_row[i] + d, zero);
      store(group.k_row[i] + d, zero);
      store(group.a_row[i] + d, zero);
    }
    for (int j = 0; j <= i; ++j) N[i][j] = A[i][j] = 0;
    group.beta[row] = 0;
  }
}

/// Scores of the tokens after token J with token J: its key, decayed on and on, against each.
template <int J>
static inline void score_column(const Group& group, int padded, float (&N)[kChunk][kChunk],
                                float (&A)[kChunk][kChunk]) {
  F sum[2 * kChunk];  // N of row i at i, A at kChunk + i
  for (F& x : sum) x = set1(0);
  for (int d = 0; d < padded; d += kWidth) {
    F key = load(group.k_row[J] + d);
#pragma GCC unroll 8
    for (int i = J + 1; i < kChunk; ++i) {
      key = key * load(group.a_row[i] + d);
      sum[i] = fma(key, load(group.k_row[i] + d), sum[i]);
      sum[kChunk + i] = fma(key, load(group.q_row[i] + d), sum[kChunk + i]);
    }
  }
  float score[2 * kChunk];
#pragma GCC unroll 4
  for (int i = 0; i < 2 * kChunk; i += 4)
    reduce_add4({sum[i], sum[i + 1], sum[i + 2], sum[i + 3]}, score + i);
  for (int i = J + 1; i < kChunk; ++i) {
    N[i][J] = score[i];
    A[i][J] = score[kChunk + i];
  }
}

template <int J = 0>
static inline void score_columns(const Group& group, int count, int padded,
                                 float (&N)[kChunk][kChunk], float (&A)[kChunk][kChunk]) {
  if constexpr (J < kChunk - 1) {
    if (J + 1 >= count) return;
    score_column<J>(group, padded, N, A);
    score_columns<J + 1>(group, count, padded, N, A);
  }
}

static void prepare(const PrepareArgs& args, Group& group) {
  const int padded = round_up(args.key_dim, kWidth > kRowTile ? kWidth : kRowTile);
  group.key_dim = args.key_dim;
  group.num_tokens = args.num_tokens;
  for (int first = 0; first < args.num_tokens; first += kChunk) {
    const int chunk = first / kChunk;
    const int rest = args.num_tokens - first;
    const int count = rest < kChunk ? rest : kChunk;
    load_qk(args, first, count, padded, group, group.A[chunk]);
    decay_rows(args, chunk, count, padded, group);
    clear_missing(chunk, count, padded, group);
    score_columns(group, count, padded, group.N[chunk], group.A[chunk]);
    for (int i = 0; i < count; ++i) group.beta[first + i] = load_beta(args, first + i);
  }
}

}  // namespace kda::cpu::blocked::KDA_ISA
