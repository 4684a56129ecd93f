// SPDX-License-Identifier: Apache-2.0
// Backward: what a chunk's inputs become, and the way back through norms, gates and steps
// (equations: backward_kernels.hpp, stage/backward.hpp).
#pragma once

#include "cpu/blocked/backward_kernels.hpp"
#include "cpu/blocked/prepare.hpp"

namespace kda::cpu::blocked::KDA_ISA {

static inline void clear_row(float* row, int count) {
  for (int d = 0; d < count; d += kWidth) store(row + d, set1(0));
}

/// q (normalised and scaled), k (normalised), A_ii, and zeros for missing tokens.
static inline void backward_qk(const PrepareArgs& args, bool keys_only, BackwardChunk& chunk) {
  const int padded = chunk.padded;
  for (int i = 0; i < kBackwardChunk; ++i) {
    float* q = chunk.q[i];
    float* k = chunk.k[i];
    if (i >= args.num_tokens) {
      clear_row(q, padded);
      clear_row(k, padded);
      continue;
    }
    load_row(args.k.data + i * args.k.token_stride_bytes, args.k.dtype, args.key_dim, padded, k);
    const float k_factor = args.qk_l2norm ? l2_factor(k, padded) : 1.0f;
    if (!keys_only) {
      load_row(args.q.data + i * args.q.token_stride_bytes, args.q.dtype, args.key_dim, padded, q);
      const float q_factor = args.scale * (args.qk_l2norm ? l2_factor(q, padded) : 1.0f);
      chunk.A[i][i] = static_cast<float>(dot_f64(q, k, padded) * q_factor * k_factor);
      scale_row(q, padded, q_factor);
    }
    if (args.qk_l2norm) scale_row(k, padded, k_factor);
  }
}

/// Decays and the rows that they scale, by products as in decay_rows().
static inline void backward_decays(const PrepareArgs& args, bool keys_only, BackwardChunk& chunk) {
  const F factor = set1(args.gate_factor);
  const F bound = set1(args.lower_bound);
  const F half = set1(0.5f);
  const F zero = set1(0);
  const F all_ones = set1(__builtin_bit_cast(float, 0xffffffffu));
  for (int d = 0; d < chunk.padded; d += kWidth) {
    F gamma = set1(1);
    F gamma_m1 = set1(0);
    for (int i = 0; i < args.num_tokens; ++i) {
      const ExpPair a = exp_pair(load_log_decay(args, i, d, factor, bound));
      gamma = gamma * a.exp;
      gamma_m1 = fma(gamma_m1, a.expm1, gamma_m1 + a.expm1);
      store(chunk.a[i] + d, a.exp);
      store(chunk.kgam[i] + d, load(chunk.k[i] + d) * gamma);
      if (!keys_only) store(chunk.qgam[i] + d, load(chunk.q[i] + d) * gamma);
    }
    for (int i = args.num_tokens; i < kBackwardChunk; ++i) {
      store(chunk.a[i] + d, set1(1));
      store(chunk.kgam[i] + d, zero);
      store(chunk.qgam[i] + d, zero);
    }
    F after = set1(1);
    for (int i = kBackwardChunk - 1; i >= 0; --i) {
      store(chunk.kend[i] + d, load(chunk.k[i] + d) * after);
      after = after * load(chunk.a[i] + d);
    }
    F to_half = set1(1);
    for (int i = kBackwardChunk / 2 - 1; i >= 0; --i) {
      store(chunk.kmid[i] + d, load(chunk.k[i] + d) * to_half);
      to_half = to_half * load(chunk.a[i] + d);
    }
    store(chunk.decay + d, select_greater(gamma, half, gamma_m1, gamma));
    store(chunk.keep + d, select_greater(gamma, half, all_ones, zero));
  }
}

/// Scores of the tokens first .. first + kRows - 1 with token j; `key` is its key, decayed to just
/// before them.
template <int kRows, bool kQueries>
static inline void score_tokens(const float* key, int j, int first, BackwardChunk& chunk) {
  constexpr int kHalf = kBackwardChunk / 2;
  F sum[2 * kHalf];  // N of row first + i at i, A at kHalf + i
  for (F& x : sum) x = set1(0);
  for (int d = 0; d < chunk.padded; d += kWidth) {
    F decayed = load(key + d);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      decayed = decayed * load(chunk.a[first + i] + d);
      sum[i] = fma(decayed, load(chunk.k[first + i] + d), sum[i]);
      if (kQueries) sum[kHalf + i] = fma(decayed, load(chunk.q[first + i] + d), sum[kHalf + i]);
    }
  }
  float score[2 * kHalf];
#pragma GCC unroll 4
  for (int i = 0; i < (kQueries ? 2 : 1) * kHalf; i += 4)
    reduce_add4({sum[i], sum[i + 1], sum[i + 2], sum[i + 3]}, score + i);
  for (int i = 0; i < kRows; ++i) {
    chunk.N[first + i][j] = score[i];
    if (kQueries) chunk.A[first + i][j] = score[kHalf + i];
  }
}

/// Scores inside each half of the chunk.
template <bool kQueries, int J = 0>
static inline void half_scores(BackwardChunk& chunk) {
  constexpr int kHalf = kBackwardChunk / 2;
  if constexpr (J < kHalf - 1) {
    for (int j = J; j < chunk.num_tokens; j += kHalf)
      score_tokens<kHalf - 1 - J, kQueries>(chunk.k[j], j, j + 1, chunk);
    half_scores<kQueries, J + 1>(chunk);
  }
}

template <bool kQueries>
static inline void backward_scores(BackwardChunk& chunk) {
  constexpr int kHalf = kBackwardChunk / 2;
  half_scores<kQueries>(chunk);
  if (chunk.num_tokens <= kHalf) return;
  for (int j = 0; j < kHalf; ++j) score_tokens<kHalf, kQueries>(chunk.kmid[j], j, kHalf, chunk);
}

static void backward_prepare(const PrepareArgs& args, bool keys_only, BackwardChunk& chunk) {
  chunk.key_dim = args.key_dim;
  chunk.padded = round_up(args.key_dim, kRowsPadded);
  chunk.num_tokens = args.num_tokens;
  clear_row(chunk.N[0], kBackwardChunk * kBackwardChunk);
  clear_row(chunk.A[0], kBackwardChunk * kBackwardChunk);
  backward_qk(args, keys_only, chunk);
  backward_decays(args, keys_only, chunk);
  keys_only ? backward_scores<false>(chunk) : backward_scores<true>(chunk);
  for (int i = 0; i < kBackwardChunk; ++i)
    chunk.beta[i] = i < args.num_tokens ? load_beta(args, i) : 0;
}

static void load_tiles(const RowSource& rows, int count, int columns, float* tiles) {
  const int step = element_bytes(rows.dtype);
  for (int c = 0; c < columns; c += kWidth) {
    float* column = tiles + c / kBlockV * kBackwardChunk * kBlockV + c % kBlockV;
    const char* from = rows.data + c * step;
    const int rest = columns - c;
    for (int i = 0; i < count; ++i, from += rows.token_stride_bytes) {
      float* to = column + i * kBlockV;
      if (rest >= kWidth)
        store(to, load_vector(from, rows.dtype));
      else
        load_row(from, rows.dtype, rest, kWidth, to);
    }
    for (int i = count; i < kBackwardChunk; ++i) store(column + i * kBlockV, set1(0));
  }
  for (int c = round_up(columns, kWidth); c % kBlockV != 0; c += kWidth)
    for (int i = 0; i < kBackwardChunk; ++i)
      store(tiles + (c / kBlockV * kBackwardChunk + i) * kBlockV + c % kBlockV, set1(0));
}

static void store_tiles(const float* tiles, int count, int columns, char* rows,
                        int64_t token_stride_bytes, DType dtype) {
  const int step = element_bytes(dtype);
  for (int i = 0; i < count; ++i, rows += token_stride_bytes)
    for (int c = 0; c < columns; c += kBlockV) {
      const float* from = tiles + (c / kBlockV * kBackwardChunk + i) * kBlockV;
      const int rest = columns - c;
      store_row(from, dtype, rest < kBlockV ? rest : kBlockV, rows + c * step);
    }
}

static void backward_add_row(const float* row, int count, float* out) {
  for (int d = 0; d < count; d += kWidth) store(out + d, load(out + d) + load(row + d));
}

static void backward_scale_row(float factor, int count, float* row) {
  scale_row(row, count, factor);
}

/// Up to so many channels the elements go through fp64: K = 1 leaves nothing but eps of a
/// gradient, the rest cancels.
constexpr int kFewChannels = 8;

static void undo_norm(const RowSource& x, int token, float scale, int key_dim, float* row) {
  alignas(64) float raw[kRowStride];
  const int padded = round_up(key_dim, kRowsPadded);
  load_row(x.data + token * x.token_stride_bytes, x.dtype, key_dim, padded, raw);
  const double r2 = 1 / (dot_f64(raw, raw, padded) + 1e-6);
  const double along = dot_f64(raw, row, padded) * r2;
  const double factor = scale * __builtin_sqrt(r2);
  if (key_dim <= kFewChannels) {
    for (int d = 0; d < key_dim; ++d)
      row[d] = static_cast<float>(factor * (row[d] - raw[d] * along));
    return;
  }
  const F part = set1(static_cast<float>(along));
  for (int d = 0; d < padded; d += kWidth)
    store(row + d, set1(static_cast<float>(factor)) * fnma(part, load(raw + d), load(row + d)));
}

/// a b, and 0 where b is 0 whatever a is; NaN stays NaN.
static inline F product_or_zero(F a, F b) {
  const F zero = set1(0);
  return select_greater(abs(b), zero, a * b, b * zero);
}

/// s(x) s(-x), which loses nothing where s is near 1.
static inline F sigmoid_slope(F x) {
  const F e = exp(set1(0) - abs(x));
  const F denominator = set1(1) + e;
  return e / (denominator * denominator);
}

static void undo_gate(const PrepareArgs& args, int token, float* row, float* ddt_bias,
                      float* dA_log) {
  if (args.gate_mode == GateMode::kLog) return;
  const F factor = set1(args.gate_factor);
  const F zero = set1(0);
  const int count = round_up(args.key_dim, kRowsPadded);
  for (int d = 0; d < count; d += kWidth) {
    const F dg = load(row + d);
    const F x = load_gate_input(args, token, d);
    F raw = dg, by_A_log = zero;
    switch (args.gate_mode) {
      case GateMode::kLog: break;
      case GateMode::kSoftplus:
        raw = product_or_zero(zero - factor * sigmoid(x), dg);
        by_A_log = product_or_zero(zero - factor * softplus(x), dg);
        break;
      case GateMode::kBounded: {
        const F scaled = factor * x;
        const F inner = product_or_zero(set1(args.lower_bound) * sigmoid_slope(scaled), dg);
        raw = factor * inner;
        by_A_log = product_or_zero(scaled, inner);
        break;
      }
    }
    store(row + d, raw);
    store(ddt_bias + d, load(ddt_bias + d) + raw);
    store(dA_log + d, load(dA_log + d) + by_A_log);
  }
}

static float step_slope(const PrepareArgs& args, int token) {
  if (args.beta_mode == BetaMode::kPlain) return 1;
  const float raw =
      load_element(args.beta.data + token * args.beta.token_stride_bytes, args.beta.dtype, 0);
  alignas(64) float lane[kWidth];
  store(lane, sigmoid_slope(set1(raw)));
  return (args.beta_mode == BetaMode::kSigmoid2 ? 2.0f : 1.0f) * lane[0];
}

}  // namespace kda::cpu::blocked::KDA_ISA
