// SPDX-License-Identifier: Apache-2.0
// Sub-chunks whose decays go beyond the range of one anchor have several, kAnchorStep powers of two
// apart: a row takes the last one that its decay since the start of the sub-chunk has passed. For
// one anchor after the other its rows meet columns: those of the same anchor as they are, those of
// the one before after kAnchorDecay. All others are 0 there, and so is, outside of the sub-chunk,
// what decays over an anchor.
#pragma once

#include "cuda/staged/backward/grad_sm90/gates.cuh"

namespace kda::cuda::sm90::grad {

template <class Factor>
__device__ __forceinline__ void scale_operand(const Operand& x, Operand& out, Factor&& factor) {
  to_operand(out, [&](int n, int i) { return element(x, n, i) * factor(n, i); });
}

/// The decay of a channel over the whole sub-chunk.
__device__ __forceinline__ float decay_over(float total) {
  return anchor_of(total) == 0 ? total : 0.0f;
}

/// step(anchor, columns) for each anchor of a sub-chunk. own(n, i): a column as its own has it.
template <class Own, class Step>
__device__ __forceinline__ void for_each_anchor(const Decays& d, int r, Own&& own, Step&& step) {
  float columns[2][4] = {};
  unsigned anchors = d.anchors[r];
#pragma unroll 1
  for (unsigned anchor = 0; anchors != 0; anchors >>= 1, ++anchor) {
    for_each([&](int n, int i) {
      const bool starts = anchor_of(d.row[2 * r + n][i]) == anchor;
      columns[n][i] = starts ? own(n, i) : columns[n][i] * kAnchorDecay;
    });
    step(anchor, columns);
  }
}

/// Adds the columns of sub-chunk r to its own rows. `ends`, if wanted: the columns as the anchor of
/// the last row has them.
template <bool kEnds, class W>
__device__ __forceinline__ void add_by_anchors(const W& c, int which, const Operand& raw_k,
                                               const Decays& d, int r, float (*acc)[4],
                                               Operand& ends) {
  const auto own = [&](int n, int i) {
    return element(raw_k, n, i) * ptx::rcp(d.row[2 * r + n][i]);
  };
  float last[2][4];
  Operand pairs;
  c.load_rows(which, r, r, pairs);
  for_each_anchor(d, r, own, [&](unsigned anchor, const float(&columns)[2][4]) {
    Operand operand;
    float sum[2][4] = {};
    to_operand(operand, [&](int n, int i) { return columns[n][i]; });
    multiply(sum, operand, pairs);
    for_each([&](int n, int i) {
      if (anchor_of(d.row[2 * r + n][i]) == anchor)
        acc[n][i] = (anchor == 0 ? acc[n][i] : 0.0f) + sum[n][i];
      if (kEnds && anchor_of(d.total[r][i / 2]) == anchor) last[n][i] = columns[n][i];
    });
  });
  if (kEnds) to_operand(ends, [&](int n, int i) { return last[n][i]; });
}

/// What add_columns() does in such a sub-chunk, but for the tokens with themselves.
template <class W>
__device__ __forceinline__ void add_columns_by_anchors(const W& c, const Operand& raw_q,
                                                       const Operand& raw_k, const Decays& d, int r,
                                                       Tokens& acc, Tokens& dG) {
  Operand rows_q, rows_k, by_d_o, by_dz;
  const auto find_rows = [&](unsigned anchor) {
    const auto row = [&](int n, int i) {
      const float x = d.row[2 * r + n][i];
      return anchor_of(x) == anchor ? x : 0.0f;
    };
    scale_operand(raw_q, rows_q, row), scale_operand(raw_k, rows_k, row);
  };
  find_rows(0);
  const float over[2] = {decay_over(d.total[r][0]), decay_over(d.total[r][1])};
#pragma unroll
  for (int earlier = r - 1; earlier >= 0; --earlier) {
    c.load_columns(0, r, earlier, by_d_o), c.load_columns(1, r, earlier, by_dz);
    decay_part(acc + 2 * earlier, over);
    multiply(acc + 2 * earlier, rows_q, by_d_o);
    multiply(acc + 2 * earlier, rows_k, by_dz);
  }
  float(*const x)[4] = acc + 2 * r;
  decay_part(x, d.total[r]);
  c.load_columns(0, r, r, by_d_o), c.load_columns(1, r, r, by_dz);
  const auto own = [&](int n, int i) { return ptx::rcp(d.row[2 * r + n][i]); };
  float all[2][4] = {};
  for_each_anchor(d, r, own, [&](unsigned anchor, const float(&columns)[2][4]) {
    Operand operand;
    float sum[2][4];
    for_each(
        [&](int n, int i) { sum[n][i] = anchor_of(d.total[r][i / 2]) == anchor ? x[n][i] : 0.0f; });
    if (anchor > 0) find_rows(anchor);
    multiply(sum, rows_q, by_d_o);
    multiply(sum, rows_k, by_dz);
    scale_operand(raw_k, operand, [&](int n, int i) { return columns[n][i]; });
    for_each([&](int n, int i) {
      dG[2 * r + n][i] -= element(operand, n, i) * sum[n][i];
      all[n][i] = fmaf(columns[n][i], sum[n][i], all[n][i]);
    });
  });
  for_each([&](int n, int i) { x[n][i] = all[n][i]; });
}

}  // namespace kda::cuda::sm90::grad
