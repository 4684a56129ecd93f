// SPDX-License-Identifier: Apache-2.0
// Backward: the chunks over one block of value columns, and the gradients of their tokens
// (equations: backward_kernels.hpp).
#pragma once

#include "cpu/blocked/backward_kernels.hpp"
#include "cpu/blocked/sweep.hpp"

namespace kda::cpu::blocked::KDA_ISA {

constexpr int kTileElements = kBackwardChunk * kBlockV;

/// One vector of tokens holds all 16 of them with AVX-512: twice the rows fill the registers.
constexpr int kTokenVecs = kBackwardChunk / kWidth < kTileVecs ? 1 : kTileVecs;
constexpr int kTokenRows = kTileRows * kTileVecs / kTokenVecs;

/// Register tiles of 16 rows of a state: of its update, and of all that reverse_rows() does.
constexpr int kTilesOfUpdate = (kRowsPadded / kTileRows) * (kBlockV / (kTileVecs * kWidth));
constexpr int kTilesOfReverse =
    2 * kTilesOfUpdate + (kRowsPadded / kTokenRows) * (kBackwardChunk / (kTokenVecs * kWidth));

/// out[16, kBlockV] = rows[16, K] * state
static inline void read_backward(const float (&rows)[kBackwardChunk][kRowStride],
                                 const float* state, int key_dim, float* out) {
  LineQueue none;
  for (int r = 0; r < kBackwardChunk; r += kChunk)
    read_state(rows[r], state, key_dim, out + r * kBlockV, none);
}

static void backward_clear(const BackwardChunk& chunk, BackwardSums& sums) {
  const F zero = set1(0);
  const auto clear = [&](float* from, int count) {
    for (int i = 0; i < count; i += kWidth) store(from + i, zero);
  };
  clear(sums.rows[0], chunk.padded * kBlockV);
  clear(sums.columns[0], chunk.padded * kBackwardChunk);
  clear(sums.boundary[0], chunk.padded * kBackwardChunk);
  clear(sums.pairs[0], kBackwardChunk * kBlockV);
  clear(sums.d_beta, kBackwardChunk);
}

static inline void step_tile(const BackwardChunk& chunk, const float* errors, float* v_new) {
  for (int i = 0; i < kBackwardChunk; ++i) {
    const F beta = set1(chunk.beta[i]);
    for (int c = 0; c < kBlockV; c += kWidth)
      store(v_new + i * kBlockV + c, beta * load(errors + i * kBlockV + c));
  }
}

/// The state behind the chunk.
static inline void step_state(const BackwardChunk& chunk, const float* errors, const float* state,
                              float* next, PacedLines* lines) {
  alignas(64) float v_new[kTileElements];
  step_tile(chunk, errors, v_new);
  const RowPair pairs[] = {{chunk.kend[0], v_new}};
  write_rows(chunk.decay, chunk.keep, pairs, chunk.padded, chunk.num_tokens, state, next, lines);
}

static void backward_rebuild(const BackwardChunk& chunk, const float* errors, const float* state,
                             float* next) {
  step_state(chunk, errors, state, next, nullptr);
}

static void backward_advance(const BackwardChunk& chunk, const float* v, float* state,
                             float* errors, int num_lines, LineQueue& lines) {
  alignas(64) float x[kTileElements];
  read_backward(chunk.kgam, state, chunk.key_dim, x);
  for (int c = 0; c < kBlockV; c += kWidth) {
    F e[kBackwardChunk];
    for (int i = 0; i < kBackwardChunk; ++i)
      e[i] = load(v + i * kBlockV + c) - load(x + i * kBlockV + c);
#pragma GCC unroll 16
    for (int j = 0; j < kBackwardChunk; ++j) {
      store(errors + j * kBlockV + c, e[j]);
      const F column = e[j] * set1(chunk.beta[j]);
#pragma GCC unroll 16
      for (int i = j + 1; i < kBackwardChunk; ++i) e[i] = fnma(set1(chunk.N[i][j]), column, e[i]);
    }
  }
  PacedLines paced{lines, num_lines / (kTilesOfUpdate * chunk.padded / kRowsPadded) + 1};
  step_state(chunk, errors, state, state, &paced);
  lines = paced.all;
}

/// dZ of kWidth columns by backward substitution, into the tiles dv and minus_dz. `dv_new` comes as
/// kend dS. Adds dv_new . E to d_beta, by lanes.
static inline void substitute_back(const BackwardChunk& chunk, const float* dv_new,
                                   const float* errors, const float* d_o, float* dv,
                                   float* minus_dz, F (&d_beta)[kBackwardChunk]) {
  F y[kBackwardChunk];
  for (int i = 0; i < kBackwardChunk; ++i) y[i] = load(dv_new + i * kBlockV);
#pragma GCC unroll 16
  for (int j = kBackwardChunk - 1; j >= 0; --j) {
    const F out = load(d_o + j * kBlockV);
#pragma GCC unroll 16
    for (int i = 0; i <= j; ++i) y[i] = fma(set1(chunk.A[j][i]), out, y[i]);
  }
#pragma GCC unroll 16
  for (int j = kBackwardChunk - 1; j >= 0; --j) {
    const F dz = y[j] * set1(chunk.beta[j]);
    d_beta[j] = fma(y[j], load(errors + j * kBlockV), d_beta[j]);
    store(dv + j * kBlockV, dz);
    store(minus_dz + j * kBlockV, set1(0) - dz);
#pragma GCC unroll 16
    for (int i = 0; i < j; ++i) y[i] = fnma(set1(chunk.N[j][i]), dz, y[i]);
  }
}

/// target[kBlockV, kBlockV] from column `first`: tile[16, kBlockV] with tokens as columns.
static inline void turn_tile(const float* tile, float* target, int first) {
  for (int i = 0; i < kBackwardChunk; i += kWidth)
    for (int c = 0; c < kBlockV; c += kWidth)
      transpose(tile + i * kBlockV + c, kBlockV, target + c * kBlockV + first + i, kBlockV);
}

/// out[rows, kColumns] += a[rows, kBlockV] b[kBlockV, kColumns]; rows of b are kBlockV apart.
template <int kColumns, int kRows, int kVecs>
static inline void add_product(const float* a, int rows, const float* b, float* out,
                               PacedLines& lines) {
  for (int c = 0; c < kColumns; c += kVecs * kWidth)
    for (int r = 0; r < rows; r += kRows) {
      F acc[kRows][kVecs];
      float* tile = out + r * kColumns + c;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
        for (int n = 0; n < kVecs; ++n) acc[i][n] = load(tile + i * kColumns + n * kWidth);
      LineQueue some = lines.take();
      multiply_tile(a + r * kBlockV, kBlockV, 1, b + c, kBlockV, acc, &some);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
        for (int n = 0; n < kVecs; ++n) store(tile + i * kColumns + n * kWidth, acc[i][n]);
    }
}

/// All that is left to do with rows d .. d + 15 of both states, while they are in the L1 cache.
static inline void reverse_rows(const BackwardChunk& chunk, int d, const ReverseArgs& args,
                                const float* turned, const float* turned_v, const float* minus_dz,
                                BackwardSums& sums, PacedLines& lines) {
  const float* state = args.state + d * kBlockV;
  float* d_state = args.d_state + d * kBlockV;
  for (int r = 0; r < kRowsPadded; ++r) {
    F sum = load(sums.boundary[d + r]);
    for (int c = 0; c < kBlockV; c += kWidth)
      sum = fma(load(state + r * kBlockV + c), load(d_state + r * kBlockV + c), sum);
    store(sums.boundary[d + r], sum);
  }
  add_product<kBlockV, kTileRows, kTileVecs>(state, kRowsPadded, turned, sums.rows[d], lines);
  add_product<kBackwardChunk, kTokenRows, kTokenVecs>(d_state, kRowsPadded, turned_v,
                                                      sums.columns[d], lines);
  const RowPair pairs[] = {{chunk.qgam[0] + d, args.d_o}, {chunk.kgam[0] + d, minus_dz}};
  write_rows(chunk.decay + d, chunk.keep + d, pairs, kRowsPadded, chunk.num_tokens, d_state,
             d_state, &lines);
}

static void backward_reverse(const BackwardChunk& chunk, const ReverseArgs& args,
                             BackwardSums& sums, LineQueue& lines) {
  alignas(64) float dv_new[kTileElements];
  alignas(64) float v_new[kTileElements];
  alignas(64) float minus_dz[kTileElements];
  alignas(64) float turned[kBlockV * kBlockV];  // row c: d_o of 16 tokens, -dZ of 16 tokens
  alignas(64) float turned_v[kBlockV * kBlockV];
  read_backward(chunk.kend, args.d_state, chunk.key_dim, dv_new);
  F d_beta[kBackwardChunk];
  for (F& x : d_beta) x = set1(0);
  for (int c = 0; c < kBlockV; c += kWidth)
    substitute_back(chunk, dv_new + c, args.errors + c, args.d_o + c, args.dv + c, minus_dz + c,
                    d_beta);
  for (int i = 0; i < kBackwardChunk; i += 4) {
    float sum[4];
    reduce_add4({d_beta[i], d_beta[i + 1], d_beta[i + 2], d_beta[i + 3]}, sum);
    for (int n = 0; n < 4; ++n) sums.d_beta[i + n] += sum[n];
  }
  step_tile(chunk, args.errors, v_new);
  turn_tile(args.d_o, turned, 0);
  turn_tile(minus_dz, turned, kBackwardChunk);
  turn_tile(v_new, turned_v, 0);

  PacedLines paced{lines, args.num_lines / (kTilesOfReverse * chunk.padded / kRowsPadded) + 1};
  add_product<kBlockV, kTileRows, kTileVecs>(v_new, kBackwardChunk, turned, sums.pairs[0], paced);
  for (int d = 0; d < chunk.padded; d += kRowsPadded)
    reverse_rows(chunk, d, args, turned, turned_v, minus_dz, sums, paced);
  lines = paced.all;
}

/// kWidth channels of a chunk, tokens as rows.
struct Channels {
  F q[kBackwardChunk], k[kBackwardChunk], a[kBackwardChunk];
  F dq[kBackwardChunk], dk[kBackwardChunk], dg[kBackwardChunk];
  F column[kBackwardChunk];   // dk as a key that later tokens read
  F decayed[kBackwardChunk];  // the key of one token, decayed to each later one
};

/// Adds what the tokens give to the state before the chunk, and take from that behind it.
static inline void state_terms(const BackwardSums& sums, int d, Channels& x) {
  alignas(64) float U[kBackwardChunk][kWidth], W[kBackwardChunk][kWidth], X[kBackwardChunk][kWidth];
  for (int i = 0; i < kBackwardChunk; i += kWidth) {
    transpose(sums.rows[d] + i, kBlockV, U[i], kWidth);
    transpose(sums.rows[d] + kBackwardChunk + i, kBlockV, W[i], kWidth);
    transpose(sums.columns[d] + i, kBackwardChunk, X[i], kWidth);
  }
  F gamma = set1(1);
  for (int i = 0; i < kBackwardChunk; ++i) {
    gamma = gamma * x.a[i];
    x.dq[i] = gamma * load(U[i]);
    x.dk[i] = gamma * load(W[i]);
  }
  alignas(64) float boundary[kWidth];
  for (int lane = 0; lane < kWidth; lane += 4)
    reduce_add4({load(sums.boundary[d + lane]), load(sums.boundary[d + lane + 1]),
                 load(sums.boundary[d + lane + 2]), load(sums.boundary[d + lane + 3])},
                boundary + lane);
  F through = gamma * load(boundary);
  F after = set1(1);
  for (int i = kBackwardChunk - 1; i >= 0; --i) {
    through = through + fma(x.q[i], x.dq[i], x.k[i] * x.dk[i]);
    x.dg[i] = through;
    x.column[i] = after * load(X[i]);
    after = after * x.a[i];
  }
  F before = set1(0);
  for (int i = 0; i < kBackwardChunk; ++i) {
    x.dg[i] = x.dg[i] + before;
    before = fma(x.k[i], x.column[i], before);
  }
}

/// Pairs of token j with later ones.
template <int J>
static inline void pair_terms(const BackwardSums& sums, Channels& x) {
  F key = x.k[J];
#pragma GCC unroll 16
  for (int i = J + 1; i < kBackwardChunk; ++i) {
    key = key * x.a[i];
    x.decayed[i] = key;
  }
  const float* P = sums.pairs[J];
  const float* R = sums.pairs[J] + kBackwardChunk;
  F later = set1(0);  // sum over r >= i of (P_rj q_r + R_rj k_r) decay(i, r)
#pragma GCC unroll 16
  for (int i = kBackwardChunk - 1; i > J; --i) {
    const F p = set1(P[i]);
    const F r = set1(R[i]);
    later = fma(p, x.q[i], fma(r, x.k[i], later));
    x.dg[i] = fma(x.decayed[i], later, x.dg[i]);
    x.dq[i] = fma(p, x.decayed[i], x.dq[i]);
    x.dk[i] = fma(r, x.decayed[i], x.dk[i]);
    later = later * x.a[i];
  }
  x.column[J] = x.column[J] + later;
}

template <int J = 0>
static inline void all_pairs(const BackwardSums& sums, Channels& x) {
  if constexpr (J < kBackwardChunk - 1) {
    pair_terms<J>(sums, x);
    all_pairs<J + 1>(sums, x);
  }
}

static void backward_gradients(const BackwardChunk& chunk, const BackwardSums& sums,
                               BackwardRows& rows) {
  for (int d = 0; d < chunk.padded; d += kWidth) {
    Channels x;
    for (int i = 0; i < kBackwardChunk; ++i) {
      x.q[i] = load(chunk.q[i] + d);
      x.k[i] = load(chunk.k[i] + d);
      x.a[i] = load(chunk.a[i] + d);
    }
    state_terms(sums, d, x);
    all_pairs(sums, x);
    for (int i = 0; i < kBackwardChunk; ++i) {
      const F diagonal = set1(sums.pairs[i][i]);
      store(rows.dq[i] + d, fma(diagonal, x.k[i], x.dq[i]));
      store(rows.dk[i] + d, fma(diagonal, x.q[i], x.dk[i] + x.column[i]));
      store(rows.dg[i] + d, x.dg[i]);
    }
  }
}

}  // namespace kda::cpu::blocked::KDA_ISA
