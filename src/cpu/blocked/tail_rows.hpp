// SPDX-License-Identifier: Apache-2.0
// Kernels of calls with a tail (equations: tail_kernels.hpp).
#pragma once

#include "cpu/blocked/decode.hpp"
#include "cpu/blocked/prepare.hpp"
#include "cpu/blocked/tail_kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

constexpr int kAskDecay = 8;    // lines of 64 bytes a pair of vectors
constexpr int kAskScores = 16;  // a row
constexpr int kAskFold = 8;     // a vector of a row

static inline int padded_keys(int key_dim) {
  return round_up(key_dim, kWidth > kRowTile ? kWidth : kRowTile);
}

static void tail_key(const PrepareArgs& args, const char* row, float* k) {
  const int padded = padded_keys(args.key_dim);
  load_row(row, args.k.dtype, args.key_dim, padded, k);
  if (args.qk_l2norm) scale_row(k, padded, l2_factor(k, padded));
}

static float tail_token(const PrepareArgs& args, int token, float* q, float* k) {
  return load_qk_row(args, token, padded_keys(args.key_dim), q, k);
}

static float tail_beta(const PrepareArgs& args, int token) { return load_beta(args, token); }

/// `args` with the gates of one row as those of its token 0.
static inline PrepareArgs with_gates(const PrepareArgs& args, const char* gates) {
  PrepareArgs row = args;
  row.g.data = gates;
  return row;
}

/// A gate mode known here leaves nothing but arithmetic in the loop, of several vectors at a time.
template <GateMode kMode>
static inline void tail_decay_of(const PrepareArgs& args, const char* gates, float* a,
                                 Ahead& ahead) {
  const PrepareArgs row = with_gates(args, gates);
  const F factor = set1(args.gate_factor);
  const F bound = set1(args.lower_bound);
  const int padded = padded_keys(args.key_dim);
  int d = 0;
  for (; d + 2 * kWidth <= padded; d += 2 * kWidth) {
    ask(ahead, kAskDecay);
    const F first = log_decay(kMode, load_gate_input(row, 0, d), factor, bound);
    const F second = log_decay(kMode, load_gate_input(row, 0, d + kWidth), factor, bound);
    store(a + d, exp(first));
    store(a + d + kWidth, exp(second));
  }
  for (; d < padded; d += kWidth)
    store(a + d, exp(log_decay(kMode, load_gate_input(row, 0, d), factor, bound)));
}

static void tail_decay(const PrepareArgs& args, const char* gates, float* a, Ahead* ahead) {
  switch (args.gate_mode) {
    case GateMode::kLog: return tail_decay_of<GateMode::kLog>(args, gates, a, *ahead);
    case GateMode::kSoftplus: return tail_decay_of<GateMode::kSoftplus>(args, gates, a, *ahead);
    case GateMode::kBounded: return tail_decay_of<GateMode::kBounded>(args, gates, a, *ahead);
  }
}

static void tail_log_decay(const PrepareArgs& args, const char* gates, float* g) {
  const PrepareArgs row = with_gates(args, gates);
  const F factor = set1(args.gate_factor);
  const F bound = set1(args.lower_bound);
  for (int d = 0; d < padded_keys(args.key_dim); d += kWidth)
    store(g + d, load_log_decay(row, 0, d, factor, bound));
}

/// The product of decays runs from the newest row to the oldest, so that it is 0 in front of a
/// decay of 0.
static void tail_scores(const TailScores& s) {
  Ahead& ahead = *s.ahead;
  const int padded = padded_keys(s.key_dim);
  const float* k = s.k + s.row * kRowStride;
  const float* own = s.a + s.row * kRowStride;
  for (int d = 0; d < padded; d += kWidth) store(s.decay + d, load(own + d));
  for (int j = s.num_before - 1; j >= 0; --j) {
    const float* k_i = s.k + s.before[j] * kRowStride;
    const float* a_i = s.a + s.before[j] * kRowStride;
    F with_k = set1(0);
    F with_q = set1(0);
    ask(ahead, kAskScores);
    for (int d = 0; d < padded; d += kWidth) {
      const F decay = load(s.decay + d);
      const F key = load(k_i + d) * decay;
      with_k = fma(key, load(k + d), with_k);
      with_q = fma(key, load(s.q + d), with_q);
      store(s.decay + d, decay * load(a_i + d));
    }
    s.N[j] = reduce_add(with_k);
    s.A[j] = reduce_add(with_q);
  }
  for (int d = 0; d < padded; d += kWidth) {
    store(s.kgam + d, load(k + d) * load(s.decay + d));
    store(s.qgam + d, load(s.q + d) * load(s.decay + d));
  }
}

template <int kRows, int kVecs>
static inline void tail_read_columns(const TailRead& args, int first, int valid) {
  F x[kVecs][kRows];
  F y[kVecs][kRows];
  read_columns<kRows, kVecs, false>(
      {args.state, args.row_stride_bytes, args.dtype, args.value_dim, args.key_dim}, args.kgam,
      args.qgam, first, valid, x, y);
  const int columns = round_up(args.value_dim, kBlockV);
  for (int n = 0; n < kVecs; ++n)
    for (int i = 0; i < kRows && i < args.rows; ++i) {
      store(args.x + i * columns + first + n * kWidth, x[n][i]);
      store(args.y + i * columns + first + n * kWidth, y[n][i]);
    }
}

template <int kRows>
static inline void tail_read_kv_rows(const TailRead& args) {
  for_each_columns<kRows>(args.value_dim, [&]<int kVecs>(int first, int valid) {
    tail_read_columns<kRows, kVecs>(args, first, valid);
  });
}

template <int kRows>
static inline void tail_read_vk_rows(const TailRead& args) {
  const int columns = round_up(args.value_dim, kBlockV);
  alignas(64) float copy[kRowStride];
  for (int c = 0; c < args.value_dim; ++c) {
    F x[kRows];
    F y[kRows];
    read_row<kRows>(args.state + c * args.row_stride_bytes, args.dtype, args.key_dim, args.kgam,
                    args.qgam, copy, x, y);
    for (int i = 0; i < kRows && i < args.rows; ++i) {
      args.x[i * columns + c] = reduce_add(x[i]);
      args.y[i * columns + c] = reduce_add(y[i]);
    }
  }
}

static void tail_read_kv(const TailRead& args) {
  if (args.rows == 1) return tail_read_kv_rows<1>(args);
  if (args.rows == 2) return tail_read_kv_rows<2>(args);
  return args.rows <= 4 ? tail_read_kv_rows<4>(args) : tail_read_kv_rows<8>(args);
}
static void tail_read_vk(const TailRead& args) {
  if (args.rows == 1) return tail_read_vk_rows<1>(args);
  if (args.rows == 2) return tail_read_vk_rows<2>(args);
  return args.rows <= 4 ? tail_read_vk_rows<4>(args) : tail_read_vk_rows<8>(args);
}

static void tail_solve(const TailSolve& s) {
  for (int c = 0; c < s.columns; c += kWidth) {
    F e = load(s.v + c) - load(s.x + c);
    F o = load(s.y + c);
    for (int j = 0; j < s.num_before; ++j) {
      const F v_new = load(s.v_new + s.before[j] * s.columns + c);
      e = fnma(set1(s.N[j]), v_new, e);
      o = fma(set1(s.A[j]), v_new, o);
    }
    const F v_new = e * set1(s.beta);
    store(s.v_new + s.row * s.columns + c, v_new);
    store(s.y + c, fma(set1(s.diagonal), v_new, o));
  }
}

/// kend, and the decay of the state in the form of decay_rows().
static inline void tail_fold_rows(const TailFold& fold, const PrepareArgs& args) {
  const F factor = set1(args.gate_factor);
  const F bound = set1(args.lower_bound);
  const F all_ones = set1(__builtin_bit_cast(float, 0xffffffffu));
  for (int d = 0; d < padded_keys(args.key_dim); d += kWidth) {
    F a[kFoldRows];
    F gamma = set1(1);
    F gamma_m1 = set1(0);
    for (int i = 0; i < fold.rows; ++i) {
      ask(*fold.ahead, kAskFold);
      const ExpPair pair =
          exp_pair(load_log_decay(with_gates(args, fold.g[i]), 0, d, factor, bound));
      a[i] = pair.exp;
      gamma = gamma * pair.exp;
      gamma_m1 = fma(gamma_m1, pair.expm1, gamma_m1 + pair.expm1);
    }
    F after = set1(1);
    for (int i = fold.rows - 1; i >= 0; --i) {
      store(fold.kend[i] + d, load(fold.k + i * kRowStride + d) * after);
      after = after * a[i];
    }
    for (int i = fold.rows; i < kFoldRows; ++i) store(fold.kend[i] + d, set1(0));
    const F half = set1(0.5f);
    store(fold.decay + d, select_greater(gamma, half, gamma_m1, gamma));
    store(fold.keep + d, select_greater(gamma, half, all_ones, set1(0)));
  }
}

template <int kRows>
static inline void tail_fold_kv(const TailFold& fold, int key_dim) {
  const int columns = round_up(fold.value_dim, kBlockV);
  const int64_t size = element_bytes(fold.dtype);
  for (int first = 0; first < fold.value_dim; first += kWidth) {
    const int count = fold.value_dim - first;
    F v_new[kRows];
    for (int i = 0; i < kRows; ++i) v_new[i] = load(fold.v_new + i * columns + first);
    for (int d = 0; d < key_dim; ++d) {
      const char* row = fold.state_in + d * fold.row_stride_bytes_in;
      if (first == 0 && d + kPrefetchRows < key_dim)
        prefetch_row<true>(row + kPrefetchRows * fold.row_stride_bytes_in, fold.value_dim * size);
      F s = load_vector_part(row + first * size, fold.dtype, count);
      s = fma(s, set1(fold.decay[d]), bit_and(s, set1(fold.keep[d])));
      for (int i = 0; i < kRows; ++i) s = fma(set1(fold.kend[i][d]), v_new[i], s);
      store_vector_part(fold.state_out + d * fold.row_stride_bytes_out + first * size, fold.dtype,
                        count, s);
    }
  }
}

template <int kRows>
static inline void tail_fold_vk(const TailFold& fold, int key_dim) {
  const int columns = round_up(fold.value_dim, kBlockV);
  const int64_t size = element_bytes(fold.dtype);
  for (int c = 0; c < fold.value_dim; ++c) {
    const char* in = fold.state_in + c * fold.row_stride_bytes_in;
    char* out = fold.state_out + c * fold.row_stride_bytes_out;
    for (int d = 0; d < key_dim; d += kWidth) {
      F s = load_vector_part(in + d * size, fold.dtype, key_dim - d);
      s = fma(s, load(fold.decay + d), bit_and(s, load(fold.keep + d)));
      for (int i = 0; i < kRows; ++i)
        s = fma(load(fold.kend[i] + d), set1(fold.v_new[i * columns + c]), s);
      store_vector_part(out + d * size, fold.dtype, key_dim - d, s);
    }
  }
}

static void tail_fold(const TailFold& fold, const PrepareArgs& args) {
  tail_fold_rows(fold, args);
  const bool few = fold.rows <= kFoldRows / 2;
  if (fold.transposed)
    return few ? tail_fold_vk<kFoldRows / 2>(fold, args.key_dim)
               : tail_fold_vk<kFoldRows>(fold, args.key_dim);
  few ? tail_fold_kv<kFoldRows / 2>(fold, args.key_dim)
      : tail_fold_kv<kFoldRows>(fold, args.key_dim);
}

}  // namespace kda::cpu::blocked::KDA_ISA
