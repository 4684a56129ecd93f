// SPDX-License-Identifier: Apache-2.0
// Sums over tokens. dG, whose sums from a token to the end are the gradient by its log decay, is
// made of the operands as they are rounded times the accumulators: so a pair of tokens enters it
// twice from the same operands, and cancels for earlier tokens but for fp32's rounding. A token
// with itself is left out of it. The boundary is the part that all tokens of the chunk share.
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

// ---- rows: sums over earlier tokens

/// B operands for sums over the tokens of sub-chunk r, of rows of it or a later one. A diagonal
/// block has both in it.
__device__ __forceinline__ void load_P(const GradContext& c, int later, int r, Operand& x) {
  load_columns(c, c.s.pairs, later, r, x);
}
__device__ __forceinline__ void load_R(const GradContext& c, int later, int r, Operand& x) {
  load_columns_transposed(c, c.s.pairs, r, later, x);
}
/// acc += the pairs of rows of sub-chunk `later` with columns of sub-chunk r.
__device__ __forceinline__ void multiply_columns(const GradContext& c, const Operand& columns,
                                                 int r, int later, float (*queries)[4],
                                                 float (*keys)[4]) {
  const auto mask = LevelMask::of<true>(c, kOneLevel);
  Operand x;
  load_P(c, later, r, x);
  if (later == r) mask.apply(x);
  multiply(queries, columns, x);
  load_R(c, later, r, x);
  if (later == r) mask.apply(x);
  multiply(keys, columns, x);
}

/// Columns of sub-chunk r, the first of `d`, anchored at its start (if not by levels), and decayed
/// to its end.
__device__ __forceinline__ void find_columns(const GradContext& c, const Decays& d, int r,
                                             const RawRows& raw, Operand& anchored, Operand& ends) {
  if (d.by_levels(r)) {
    Part end;
    find_ends(c, d, r, 0, end);
    raw.columns(ends, [&](int n, int i) { return end[n][i]; });
    return;
  }
  Part x;
  for_each([&](int n, int i) {
    x[n][i] = element(raw.k, n, i) * (raw.of_column.at(n, i) * ptx::rcp(d.row[n][i]));
  });
  to_operand(anchored, [&](int n, int i) { return x[n][i]; });
  to_operand(ends, [&](int n, int i) { return x[n][i] * d.total[0][i / 2]; });
}

/// Pairs inside of sub-chunk r by levels, to what is finished of its rows.
__device__ __forceinline__ void add_row_levels(const GradContext& c, int r, const RawRows& raw,
                                               float (*queries)[4], float (*keys)[4],
                                               float (*dG)[4]) {
  for_each_level(c, r, [&](int h, const Part& row, const Part& column) {
    const auto of_row = [&](int n, int i) { return row[n][i]; };
    Operand of_k, of_q, columns, x;
    raw.columns(columns, [&](int n, int i) { return column[n][i]; });
    raw.rows(of_q, of_k, of_row);
    const auto mask = LevelMask::of<true>(c, h);
    const auto add = [&](const Operand& rows, float(*to)[4]) {
      Part acc = {};
      mask.apply(x);
      multiply(acc, columns, x);
      finish(rows, 1, dG, acc, of_row);
      for_each([&](int n, int i) { to[n][i] += acc[n][i]; });
    };
    load_P(c, r, r, x);
    add(of_q, queries);
    load_R(c, r, r, x);
    add(of_k, keys);
  });
}

/// From products with the state to the rows' gradients: stores those of q. Leaves the columns,
/// decayed to the ends of their sub-chunks, in `ends`. The sub-chunk at hand is always the first of
/// the arrays, which are turned behind it.
__device__ __forceinline__ void add_rows(const GradContext& c, Decays& d, Tokens& queries,
                                         Tokens& keys, Tokens& dG, Operand (&ends)[kSubchunks]) {
#pragma unroll 1
  for (int r = 0; r < kSubchunks; ++r) {
    c.forget_index();
    const RawRows raw(c, r);
    const auto of_row = [&](int n, int i) { return d.row[n][i]; };
    Operand of_q, of_k, anchored;
    raw.rows(of_q, of_k, of_row);
    find_columns(c, d, r, raw, anchored, ends[0]);
#pragma unroll
    for (int distance = 1; distance < kSubchunks; ++distance) {
      if (r + distance >= kSubchunks) continue;
      decay_part(queries + 2 * distance, d.total[0]);
      decay_part(keys + 2 * distance, d.total[0]);
      multiply_columns(c, ends[0], r, r + distance, queries + 2 * distance, keys + 2 * distance);
    }
    if (!d.by_levels(r)) multiply_columns(c, anchored, r, r, queries, keys);
    for_each([&](int n, int i) { dG[n][i] = 0; });
    finish(of_q, 1, dG, queries, of_row);
    finish(of_k, 1, dG, keys, of_row);
    if (d.by_levels(r)) add_row_levels(c, r, raw, queries, keys, dG);
    store_queries(c, r, raw, queries);
    turn<1>(queries), turn<1>(keys), turn<1>(dG), turn<1>(ends);
    d.turn<1>();
  }
}

// ---- columns: sums over later tokens

/// Adds what the products with dS give to the gradient by every log decay of the chunk.
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

/// acc += the pairs of columns of sub-chunk `earlier` with rows of sub-chunk r; those of level h,
/// if they are the same.
__device__ __forceinline__ void multiply_rows(const GradContext& c, const Operand& of_q,
                                              const Operand& of_k, int r, int earlier, int h,
                                              float (*acc)[4]) {
  const auto mask = LevelMask::of<false>(c, h);
  Operand x;
  load_columns_transposed(c, c.s.pairs, r, earlier, x);  // P
  if (earlier == r) mask.apply(x);
  multiply(acc, of_q, x);
  load_columns(c, c.s.pairs, earlier, r, x);  // R
  if (earlier == r) mask.apply(x);
  multiply(acc, of_k, x);
}

/// Pairs inside of sub-chunk r of level h, with its factors of rows and columns, to what is
/// finished of its columns.
__device__ __forceinline__ void add_inner_columns(const GradContext& c, int r, const RawRows& raw,
                                                  const Part& row, const Part& column, int h,
                                                  float (*columns)[4], float (*dG)[4]) {
  const auto of_column = [&](int n, int i) { return column[n][i]; };
  Operand operand, of_q, of_k;
  raw.columns(operand, of_column);
  raw.rows(of_q, of_k, [&](int n, int i) { return row[n][i]; });
  Part acc = {};
  multiply_rows(c, of_q, of_k, r, r, h, acc);
  finish(operand, -1, dG, acc, of_column);
  for_each([&](int n, int i) { columns[n][i] += acc[n][i]; });
}

/// From products with the state to the columns' gradients, and stores those of k. The sub-chunk at
/// hand is always the last of the arrays, which are turned behind it.
__device__ __forceinline__ void add_columns(const GradContext& c, Decays& d,
                                            Operand (&ends)[kSubchunks], Tokens& keys,
                                            Tokens& columns, Tokens& dG) {
  constexpr int kLast = kSubchunks - 1;
  float(*const acc)[4] = columns + 2 * kLast;
#pragma unroll 1
  for (int r = kLast; r >= 0; --r) {
    c.forget_index();
    const RawRows raw(c, r);
    Part row, column;
    for_each([&](int n, int i) { row[n][i] = d.row[2 * kLast + n][i]; });
    Operand of_q, of_k;
    raw.rows(of_q, of_k, [&](int n, int i) { return row[n][i]; });
#pragma unroll
    for (int distance = 1; distance < kSubchunks; ++distance) {
      if (distance > r) continue;
      decay_part(acc - 2 * distance, d.total[kLast]);
      multiply_rows(c, of_q, of_k, r, r - distance, kOneLevel, acc - 2 * distance);
    }
    find_ends(c, d, r, kLast, column);
    finish(ends[kLast], -1, dG + 2 * kLast, acc, [&](int n, int i) { return column[n][i]; });
    if (d.by_levels(r)) {
      for_each_level(c, r, [&](int h, const Part& of_rows, const Part& of_columns) {
        add_inner_columns(c, r, raw, of_rows, of_columns, h, acc, dG + 2 * kLast);
      });
    } else {
      for_each([&](int n, int i) { column[n][i] = ptx::rcp(row[n][i]); });
      add_inner_columns(c, r, raw, row, column, kOneLevel, acc, dG + 2 * kLast);
    }
    store_keys(c, r, raw, keys + 2 * kLast, acc);
    turn<-1>(columns), turn<-1>(keys), turn<-1>(dG), turn<-1>(ends);
    d.turn<-1>();
  }
}

// ---- log decays

/// 0 where the decay is 0, whatever is left of what cancels: gates may be as large there as they
/// like.
__device__ __forceinline__ void drop_dead(const GradContext& c, int r, float (*dg)[4]) {
  Part decay;
  load_decay(c, r, decay);
  for_each([&](int n, int i) {
    if (decay[n][i] == 0) dg[n][i] = 0;
  });
}

/// The boundary is in all sums to the end of the chunk: in dG of its last token.
__device__ __forceinline__ void add_boundary(const GradContext& c, float2 boundary, Tokens& dG) {
  const bool has_last = c.t() == 3;
  dG[kTokenTiles - 1][1] += has_last ? boundary.x : 0;
  dG[kTokenTiles - 1][3] += has_last ? boundary.y : 0;
}

/// Stores sums of dG from each token to the end of the chunk.
__device__ __forceinline__ void store_log_decays(const GradContext& c, const Decays& d,
                                                 Tokens& dG) {
  float carry[2] = {};
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
    if (n % 2 != 0) continue;
    if (d.by_levels(n / 2)) drop_dead(c, n / 2, dG + n);
    store_rows(c, kLogDecays, n / 2, dG + n);
  }
}

}  // namespace kda::cuda::grad
