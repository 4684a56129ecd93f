// SPDX-License-Identifier: Apache-2.0
// sweep(): the chunks of a group over one block of value columns (equations: kernels.hpp).
#pragma once

#include "cpu/blocked/kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

/// acc[r][n] += sum_p a[r * a_row + p * a_depth] * b[p * kBlockV + n * kWidth ..]
template <int kRows, int kVecs>
static inline void multiply_tile(const float* a, int64_t a_row, int64_t a_depth, const float* b,
                                 int depth, F (&acc)[kRows][kVecs], LineQueue* lines = nullptr) {
  for (int p = 0; p < depth; ++p) {
    if (lines && lines->next != lines->end) __builtin_prefetch(*lines->next++, 0, 2);
    F column[kVecs];
    for (int n = 0; n < kVecs; ++n) column[n] = load(b + p * kBlockV + n * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F factor = set1(a[r * a_row + p * a_depth]);
      for (int n = 0; n < kVecs; ++n) acc[r][n] = fma(factor, column[n], acc[r][n]);
    }
  }
}

/// out[8, kBlockV] = rows[8, K] * state
static inline void read_state(const float* rows, const float* state, int key_dim, float* out,
                              LineQueue& lines) {
  for (int r = 0; r < kChunk; r += kTileRows)
    for (int c = 0; c < kBlockV; c += kTileVecs * kWidth) {
      F acc[kTileRows][kTileVecs];
      for (auto& row : acc)
        for (F& x : row) x = set1(0);
      multiply_tile(rows + r * kRowStride, kRowStride, 1, state + c, key_dim, acc, &lines);
      for (int i = 0; i < kTileRows; ++i)
        for (int n = 0; n < kTileVecs; ++n)
          store(out + (r + i) * kBlockV + c + n * kWidth, acc[i][n]);
    }
}

/// Cache lines to ask for, some a tile.
struct PacedLines {
  LineQueue all;
  int per_tile;

  LineQueue take() {
    LineQueue some = all;
    if (all.end - all.next > per_tile) some.end = all.next + per_tile;
    all.next = some.end;
    return some;
  }
};

/// Rows [tokens, kRowStride] and [tokens, kBlockV], whose product left^T right enters a state.
struct RowPair {
  const float* left;
  const float* right;
};

/// out = Gamma in + sum over pairs of left^T right, rows [0, key_dim) of a state; `in` may be
/// `out`.
template <int kPairs>
static inline void write_rows(const float* decay, const float* keep, const RowPair (&pairs)[kPairs],
                              int key_dim, int count, const float* in, float* out,
                              PacedLines* lines = nullptr) {
  for (int d = 0; d < key_dim; d += kTileRows)
    for (int c = 0; c < kBlockV; c += kTileVecs * kWidth) {
      F acc[kTileRows][kTileVecs];
      const int at = d * kBlockV + c;
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; ++i) {
        const F factor = set1(decay[d + i]);
        const F whole = set1(keep[d + i]);
        for (int n = 0; n < kTileVecs; ++n) {
          const F old = load(in + at + i * kBlockV + n * kWidth);
          acc[i][n] = fma(old, factor, bit_and(old, whole));
        }
      }
      LineQueue some;
      if (lines) some = lines->take();
      for (const RowPair& pair : pairs)
        multiply_tile(pair.left + d, 1, kRowStride, pair.right + c, count, acc,
                      lines ? &some : nullptr);
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; ++i)
        for (int n = 0; n < kTileVecs; ++n) store(out + at + i * kBlockV + n * kWidth, acc[i][n]);
    }
}

/// state = Gamma state + kend[count, K]^T v_new[count, kBlockV]
static inline void write_state(const Group& group, int chunk, int count, const float* v_new,
                               float* state) {
  const RowPair pairs[] = {{group.kend[chunk * kChunk], v_new}};
  write_rows(group.decay[chunk], group.keep[chunk], pairs, group.key_dim, count, state, state);
}

/// Forward substitution of v_new, and the outputs, for kWidth columns.
/// `x`, `y`: kgam S0 and qgam S0; y becomes o.
template <bool kOutput>
static inline void substitute(const Group& group, int chunk, const float* v, const float* x,
                              float* v_new, float* y) {
  const auto& N = group.N[chunk];
  const auto& A = group.A[chunk];
  F e[kChunk];
  F o[kChunk];
  for (int i = 0; i < kChunk; ++i) {
    e[i] = (v ? load(v + i * kBlockV) : set1(0)) - load(x + i * kBlockV);
    if (kOutput) o[i] = load(y + i * kBlockV);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kChunk; ++j) {
    const F column = e[j] * set1(group.beta[chunk * kChunk + j]);
    store(v_new + j * kBlockV, column);
#pragma GCC unroll 8
    for (int i = j + 1; i < kChunk; ++i) e[i] = fnma(set1(N[i][j]), column, e[i]);
    if (kOutput) {
#pragma GCC unroll 8
      for (int i = j; i < kChunk; ++i) o[i] = fma(set1(A[i][j]), column, o[i]);
    }
  }
  if (kOutput)
    for (int i = 0; i < kChunk; ++i) store(y + i * kBlockV, o[i]);
}

template <bool kOutput>
static inline void sweep_chunk(const Group& group, int chunk, float* state, const float* v,
                               float* o, LineQueue& lines) {
  alignas(64) float x[kChunk * kBlockV];
  alignas(64) float v_new[kChunk * kBlockV];
  const int first = chunk * kChunk;
  const int rest = group.num_tokens - first;
  read_state(group.kgam[first], state, group.key_dim, x, lines);
  if (kOutput) read_state(group.qgam[first], state, group.key_dim, o, lines);
  for (int c = 0; c < kBlockV; c += kWidth)
    substitute<kOutput>(group, chunk, v ? v + c : nullptr, x + c, v_new + c,
                        kOutput ? o + c : nullptr);
  write_state(group, chunk, rest < kChunk ? rest : kChunk, v_new, state);
}

static void sweep(const Group& group, float* state, const float* v, float* o, LineQueue& lines) {
  for (int chunk = 0; chunk * kChunk < group.num_tokens; ++chunk) {
    const int64_t at = static_cast<int64_t>(chunk) * kChunk * kBlockV;
    const float* v_chunk = v ? v + at : nullptr;
    if (o)
      sweep_chunk<true>(group, chunk, state, v_chunk, o + at, lines);
    else
      sweep_chunk<false>(group, chunk, state, v_chunk, nullptr, lines);
  }
}

static void matmul_block(const float* a, int64_t a_stride, int rows, int depth, const float* block,
                         float* out) {
  for (int c = 0; c < kBlockV; c += kTileVecs * kWidth) {
    int r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) {
      F acc[kTileRows][kTileVecs];
      for (int i = 0; i < kTileRows; ++i)
        for (int n = 0; n < kTileVecs; ++n)
          acc[i][n] = load(out + (r + i) * kBlockV + c + n * kWidth);
      multiply_tile(a + r * a_stride, a_stride, 1, block + c, depth, acc);
      for (int i = 0; i < kTileRows; ++i)
        for (int n = 0; n < kTileVecs; ++n)
          store(out + (r + i) * kBlockV + c + n * kWidth, acc[i][n]);
    }
    for (; r < rows; ++r) {
      F acc[1][kTileVecs];
      for (int n = 0; n < kTileVecs; ++n) acc[0][n] = load(out + r * kBlockV + c + n * kWidth);
      multiply_tile(a + r * a_stride, a_stride, 1, block + c, depth, acc);
      for (int n = 0; n < kTileVecs; ++n) store(out + r * kBlockV + c + n * kWidth, acc[0][n]);
    }
  }
}

}  // namespace kda::cpu::blocked::KDA_ISA
