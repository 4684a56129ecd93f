// SPDX-License-Identifier: Apache-2.0
// Sums over tokens. Norms are factors of tokens, in P, R and the products with the states: operands
// are the raw q and k. dG, whose sums from a token to the end are the gradient by its log decay, is
// made of the operands as they are rounded times the accumulators: so a pair of tokens enters it
// twice with the same bits, and cancels for earlier tokens. A token with itself is left out of it.
#pragma once

#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/outputs.cuh"

namespace kda::cuda::grad {

/// Decays 16 tokens over a sub-chunk.
__device__ __forceinline__ void decay_part(float (*acc)[4], const float (&total)[2]) {
  for_each([&](int n, int i) { acc[n][i] *= total[i / 2]; });
}

/// dG += sign x acc; acc becomes what it is worth to the token.
template <class Factor>
__device__ __forceinline__ void finish(const Operand& x, float sign, float (*dG)[4],
                                       float (*acc)[4], Factor&& factor) {
  for_each([&](int n, int i) {
    dG[n][i] = fmaf(sign * element(x, n, i), acc[n][i], dG[n][i]);
    acc[n][i] *= factor(n, i);
  });
}

/// Operands of the tokens of a sub-chunk.
struct RawRows {
  Operand q, k;
  TokenPair beta;
  float scale;
  __device__ RawRows(const GradContext& c, int r) : beta(c, c.s.beta, r), scale(c.a.gate.scale) {
    load_transposed(c, c.s.q, r, q);
    load_transposed(c, c.s.k, r, k);
  }
  /// Rows of q and k, and columns of beta k, times factor(n, i).
  template <class Factor>
  __device__ __forceinline__ void rows(Operand& of_q, Operand& of_k, Factor&& factor) const {
    scale_operand(q, of_q, [&](int n, int i) { return scale * factor(n, i); });
    scale_operand(k, of_k, factor);
  }
  template <class Factor>
  __device__ __forceinline__ void columns(Operand& x, Factor&& factor) const {
    scale_operand(k, x, [&](int n, int i) { return beta.at(n, i) * factor(n, i); });
  }
};

// ---- rows: sums over earlier tokens

/// Pairs inside of sub-chunk r, to what is finished of its rows.
__device__ __forceinline__ void add_inner_rows(const GradContext& c, const Decays& d, int r,
                                               const RawRows& raw, float (*queries)[4],
                                               float (*keys)[4], float (*dG)[4]) {
  for_each_level(c, d, r, [&](const InnerFactors& f, auto&& keep) {
    const auto of_row = [&](int n, int i) { return f.row[n][i]; };
    Operand column, q, k, x;
    raw.columns(column, [&](int n, int i) { return f.column[n][i]; });
    raw.rows(q, k, of_row);
    const auto add = [&](const Tile& pairs, const Operand& row, float(*to)[4]) {
      Part acc = {};
      load_columns(c, pairs, r, r, x);
      keep(x);
      multiply(acc, column, x);
      finish(row, 1, dG, acc, of_row);
      for_each([&](int n, int i) { to[n][i] += acc[n][i]; });
    };
    add(c.s.P, q, queries);
    add(c.s.R, k, keys);
  });
}

/// From products with the state to the rows' gradients: stores those of q; those of k are left
/// without the norm's factor.
/// Leaves the columns, decayed to the ends of their sub-chunks, in `ends`.
__device__ __forceinline__ void add_rows(const GradContext& c, const Decays& d, Tokens& queries,
                                         Tokens& keys, Tokens& dG, Operand (&ends)[kSubchunks]) {
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    c.forget_index();
    const RawRows raw(c, r);
    Operand q, k, x;
    Part end;
    find_ends(c, d, r, end);
    raw.columns(ends[r], [&](int n, int i) { return end[n][i]; });
#pragma unroll
    for (int later = r + 1; later < kSubchunks; ++later) {
      decay_part(queries + 2 * later, d.total[r]);
      decay_part(keys + 2 * later, d.total[r]);
      load_columns(c, c.s.P, later, r, x);
      multiply(queries + 2 * later, ends[r], x);
      load_columns(c, c.s.R, later, r, x);
      multiply(keys + 2 * later, ends[r], x);
    }
    const auto of_row = [&](int n, int i) { return d.row[2 * r + n][i]; };
    raw.rows(q, k, of_row);
    for_each([&](int n, int i) { dG[2 * r + n][i] = 0; });
    finish(q, 1, dG + 2 * r, queries + 2 * r, of_row);
    finish(k, 1, dG + 2 * r, keys + 2 * r, of_row);
    add_inner_rows(c, d, r, raw, queries + 2 * r, keys + 2 * r, dG + 2 * r);
    store_queries(c, r, queries + 2 * r);
  }
}

// ---- columns: sums over later tokens

/// What the products with dS add to the gradient by every log decay of the chunk.
__device__ __forceinline__ float2 boundary_of_columns(const Decays& d,
                                                      const Operand (&ends)[kSubchunks],
                                                      const Tokens& columns) {
  float share[2] = {}, after[2] = {1, 1};
#pragma unroll
  for (int r = kSubchunks - 1; r >= 0; --r) {
    float sum[2] = {};
    for_each([&](int n, int i) {
      sum[i / 2] = fmaf(element(ends[r], n, i), columns[2 * r + n][i], sum[i / 2]);
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      share[half] = fmaf(after[half], sum[half], share[half]);
      after[half] *= d.total[r][half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // a channel's tokens are in four lanes
    share[half] += __shfl_xor_sync(~0u, share[half], 1);
    share[half] += __shfl_xor_sync(~0u, share[half], 2);
  }
  return {share[0], share[1]};
}

__device__ __forceinline__ void add_inner_columns(const GradContext& c, const Decays& d, int r,
                                                  const RawRows& raw, float (*columns)[4],
                                                  float (*dG)[4]) {
  for_each_level(c, d, r, [&](const InnerFactors& f, auto&& keep) {
    const auto of_column = [&](int n, int i) { return f.column[n][i]; };
    Operand column, q, k, x;
    raw.columns(column, of_column);
    raw.rows(q, k, [&](int n, int i) { return f.row[n][i]; });
    Part acc = {};
    load_columns_transposed(c, c.s.P, r, r, x);
    keep(x);
    multiply(acc, q, x);
    load_columns_transposed(c, c.s.R, r, r, x);
    keep(x);
    multiply(acc, k, x);
    finish(column, -1, dG, acc, of_column);
    for_each([&](int n, int i) { columns[n][i] += acc[n][i]; });
  });
}

/// From products with the state to the columns' gradients, and stores those of k. `small`: some
/// beta is.
__device__ __forceinline__ void add_columns(const GradContext& c, const Decays& d,
                                            const Operand (&ends)[kSubchunks], bool small,
                                            Tokens& keys, Tokens& columns, Tokens& dG) {
#pragma unroll
  for (int r = kSubchunks - 1; r >= 0; --r) {
    c.forget_index();
    const RawRows raw(c, r);
    Operand q, k, x;
    raw.rows(q, k, [&](int n, int i) { return d.row[2 * r + n][i]; });
#pragma unroll
    for (int earlier = 0; earlier < r; ++earlier) {
      decay_part(columns + 2 * earlier, d.total[r]);
      load_columns_transposed(c, c.s.P, earlier, r, x);
      multiply(columns + 2 * earlier, q, x);
      load_columns_transposed(c, c.s.R, earlier, r, x);
      multiply(columns + 2 * earlier, k, x);
    }
    Part end;
    find_ends(c, d, r, end);
    finish(ends[r], -1, dG + 2 * r, columns + 2 * r, [&](int n, int i) { return end[n][i]; });
    add_inner_columns(c, d, r, raw, columns + 2 * r, dG + 2 * r);
    store_keys(c, r, small, keys + 2 * r, columns + 2 * r);
  }
}

// ---- log decays

/// Stores sums of dG from each token to the end of the chunk, and `boundary`.
__device__ __forceinline__ void store_log_decays(const GradContext& c, float2 boundary,
                                                 Tokens& dG) {
  float carry[2] = {boundary.x, boundary.y};
#pragma unroll
  for (int n = kTokenTiles - 1; n >= 0; --n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* x = dG[n] + 2 * half;
      const float own = x[0] + x[1], other = __shfl_xor_sync(~0u, own, 1);
      const float both = own + other, others = __shfl_xor_sync(~0u, both, 2);
      const float after = (c.t() % 2 ? 0.0f : other) + (c.t() >= 2 ? 0.0f : others);
      x[1] += carry[half] + after;
      x[0] += x[1];
      carry[half] += both + others;
    }
    if (n % 2 == 0) store_rows(c, kLogDecays, n / 2, dG + n);
  }
}

}  // namespace kda::cuda::grad
