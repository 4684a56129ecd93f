// SPDX-License-Identifier: Apache-2.0
// Sub-chunks whose decays go beyond the range of one anchor have several, kAnchorStep powers of two
// apart: a row takes the last one that its decay since the start of the sub-chunk has passed. Their
// decays are kept as logs. For rows of one anchor after the other, columns are divided by the decay
// since it, or decay up to it. Columns for other sub-chunks decay to the end of their own.
#pragma once

#include "cuda/staged/backward/grad_sm90/gates.cuh"

namespace kda::cuda::sm90::grad {

using Logs = float[2][4];  // of kAnchor times the decay since the start, of a sub-chunk

template <class Factor>
__device__ __forceinline__ void scale_operand(const Operand& x, Operand& out, Factor&& factor) {
  to_operand(out, [&](int n, int i) { return element(x, n, i) * factor(n, i); });
}

/// kAnchor times the decay of a row since that anchor.
__device__ __forceinline__ float row_since(float log, float anchor) {
  return ptx::ex2(fmaf(kAnchorStep, anchor, log));
}
/// What a column is multiplied by; rows of this anchor need none of those that are capped.
__device__ __forceinline__ float column_at(float log, float anchor) {
  return ptx::ex2(fminf(-fmaf(kAnchorStep, anchor, log), kAnchorStep));
}

__device__ __forceinline__ const Logs& logs_of(const Decays& d, int r) {
  return reinterpret_cast<const Logs&>(d.row[2 * r]);
}

/// step(anchor) for each one that rows of the warp have: a bit each in `anchors`.
template <class Step>
__device__ __forceinline__ void for_each_anchor(unsigned anchors, Step&& step) {
#pragma unroll 1
  for (float anchor = 0; anchors != 0; anchors >>= 1, ++anchor)
    if (anchors & 1) step(anchor);
}

/// Decays of columns to the end of sub-chunk r, / kAnchor.
struct Ends {
  float last[2];
  template <class W>
  __device__ __forceinline__ Ends(const W& c, const Logs& logs)
      : last{__shfl_sync(~0u, logs[1][1], c.lane | 3), __shfl_sync(~0u, logs[1][3], c.lane | 3)} {}
  __device__ __forceinline__ float at(float log, int i) const {
    return ptx::ex2(last[i / 2] - log - kLogAnchor);
  }
};

/// add_earlier() of such a sub-chunk: `ends` are its columns, decayed to its end.
template <class W>
__device__ __forceinline__ void add_earlier_by_anchors(const W& c, int which, const Operand& raw_k,
                                                       const Operand& ends, const Decays& d, int r,
                                                       Tokens& acc) {
  const Logs& logs = logs_of(d, r);
  Operand pairs;
#pragma unroll
  for (int later = r + 1; later < kSubchunks; ++later) {
    c.load_rows(which, later, r, pairs);
    decay_part(acc + 2 * later, d.total[r]);
    multiply(acc + 2 * later, ends, pairs);
  }
  float(*const x)[4] = acc + 2 * r;
  for_each([&](int n, int i) { x[n][i] *= ptx::ex2(-kAnchorStep * anchor_of(logs[n][i])); });
  c.load_rows(which, r, r, pairs);
  for_each_anchor(d.anchors[r], [&](float anchor) {
    Operand columns;
    float sum[2][4] = {};
    scale_operand(raw_k, columns, [&](int n, int i) { return column_at(logs[n][i], anchor); });
    multiply(sum, columns, pairs);
    for_each([&](int n, int i) {
      if (anchor_of(logs[n][i]) == anchor) x[n][i] += sum[n][i];
    });
  });
}

/// What add_columns() does in such a sub-chunk, but for the tokens with themselves.
template <class W>
__device__ __forceinline__ void add_columns_by_anchors(const W& c, const Operand& raw_q,
                                                       const Operand& raw_k, const Operand& ends,
                                                       const Decays& d, int r, Tokens& acc,
                                                       Tokens& dG) {
  const Logs& logs = logs_of(d, r);
  Operand rows_q, rows_k, by_d_o, by_dz;
  const auto since_start = [&](int n, int i) { return ptx::ex2(logs[n][i]); };
  scale_operand(raw_q, rows_q, since_start), scale_operand(raw_k, rows_k, since_start);
#pragma unroll
  for (int earlier = r - 1; earlier >= 0; --earlier) {
    c.load_columns(0, r, earlier, by_d_o), c.load_columns(1, r, earlier, by_dz);
    decay_part(acc + 2 * earlier, d.total[r]);
    multiply(acc + 2 * earlier, rows_q, by_d_o);
    multiply(acc + 2 * earlier, rows_k, by_dz);
  }
  const Ends end(c, logs);
  float(*const x)[4] = acc + 2 * r;
  for_each([&](int n, int i) {
    dG[2 * r + n][i] -= element(ends, n, i) * x[n][i];
    x[n][i] *= end.at(logs[n][i], i);
  });
  c.load_columns(0, r, r, by_d_o), c.load_columns(1, r, r, by_dz);
  for_each_anchor(d.anchors[r], [&](float anchor) {
    const auto row = [&](int n, int i) {
      return anchor_of(logs[n][i]) == anchor ? row_since(logs[n][i], anchor) : 0.0f;
    };
    const auto column = [&](int n, int i) { return column_at(logs[n][i], anchor); };
    Operand columns;
    float sum[2][4] = {};
    scale_operand(raw_q, rows_q, row), scale_operand(raw_k, rows_k, row);
    multiply(sum, rows_q, by_d_o);
    multiply(sum, rows_k, by_dz);
    scale_operand(raw_k, columns, column);
    for_each([&](int n, int i) {
      dG[2 * r + n][i] -= element(columns, n, i) * sum[n][i];
      x[n][i] = fmaf(column(n, i), sum[n][i], x[n][i]);
    });
  });
}

}  // namespace kda::cuda::sm90::grad
