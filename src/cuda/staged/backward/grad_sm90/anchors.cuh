// SPDX-License-Identifier: Apache-2.0
// Sub-chunks whose decays go beyond the range of one anchor have several, kAnchorStep powers of two
// apart: a row takes the last one that its decay since the start of the sub-chunk has passed, and
// so does a column; later ones never take an earlier one. A product is made for each anchor, of the
// columns or the rows that have it; what has been added up before decays by kAnchorDecay from
// anchor to anchor. Outside of the sub-chunk counts as 0 what decays over an anchor.
#pragma once

#include "cuda/staged/backward/grad_sm90/gates.cuh"

namespace kda::cuda::sm90::grad {

/// The decay of a channel over the whole sub-chunk.
__device__ __forceinline__ float decay_over(float total) {
  return anchor_of(total) == 0 ? total : 0.0f;
}

/// Numbers of a sub-chunk's anchors, in pairs as its operands have them.
struct Anchors {
  Operand pairs;
  __device__ __forceinline__ Anchors(const Decays& d, int r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* row = d.row[2 * r + i / 2] + i % 2 * 2;
      pairs[i] = anchor_of(row[0]) | anchor_of(row[1]) << 16;
    }
  }
  /// x where the anchor is this one, else 0.
  __device__ __forceinline__ void take(unsigned anchor, const Operand& x, Operand& out) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = x[i] & ptx::equal_u16x2(pairs[i], anchor * 0x10001u);
  }
  __device__ __forceinline__ unsigned of(int n, int i) const {
    return pairs[2 * n + i / 2] >> i % 2 * 16 & 0xffffu;
  }
  __device__ __forceinline__ void take(unsigned anchor, const Part& x, Part& out) const {
    for_each([&](int n, int i) { out[n][i] = of(n, i) == anchor ? x[n][i] : 0; });
  }
};

/// Columns in front of their own anchors, to that of the last row.
__device__ __forceinline__ void find_ends(const Decays& d, int r, Operand& columns) {
  const Anchors anchors(d, r);
  Operand decayed;
  to_operand(decayed, [&](int n, int i) { return element(columns, n, i) * kAnchorDecay; });
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned last = anchor_of(d.total[r][i % 2]) * 0x10001u;
    columns[i] = (columns[i] & ptx::equal_u16x2(anchors.pairs[i], last)) |
                 (decayed[i] & ptx::equal_u16x2(anchors.pairs[i] + 0x10001u, last));
  }
}

__device__ __forceinline__ void find_ends(const Decays& d, int r, Part& columns) {
  const Anchors anchors(d, r);
  for_each([&](int n, int i) {
    const unsigned last = anchor_of(d.total[r][i / 2]), own = anchors.of(n, i);
    float& x = columns[n][i];
    x = own == last ? x : own + 1 == last ? x * kAnchorDecay : 0;
  });
}

/// Adds columns in front of their own anchors to the rows of the same sub-chunk.
template <class C>
__device__ __forceinline__ void add_by_anchors(const C& c, int which,
                                               const typename C::Decayed& columns, const Decays& d,
                                               int r, float (*acc)[4]) {
  const Anchors anchors(d, r);
  typename C::Pairs pairs;
  c.load_rows(which, r, r, pairs);
  unsigned rest = d.anchors[r];
#pragma unroll 1
  for (unsigned anchor = 0; rest != 0; rest >>= 1, ++anchor) {
    if (anchor > 0)
      for_each([&](int n, int i) {
        if (anchor_of(d.row[2 * r + n][i]) >= anchor) acc[n][i] *= kAnchorDecay;
      });
    typename C::Decayed taken;
    anchors.take(anchor, columns, taken);
    C::multiply(acc, taken, pairs);
  }
}

/// Adds rows behind their own anchors to the columns of the same sub-chunk and of all earlier ones.
template <class C>
__device__ __forceinline__ void add_rows_by_anchors(const C& c, const typename C::Decayed& rows_q,
                                                    const typename C::Decayed& rows_k,
                                                    const Decays& d, int r, Tokens& acc) {
  const Anchors anchors(d, r);
  typename C::Decayed taken_q, taken_k;
  typename C::Pairs by_d_o, by_dz;
  const auto take = [&](unsigned anchor) {
    anchors.take(anchor, rows_q, taken_q), anchors.take(anchor, rows_k, taken_k);
  };
  take(0);
  const float over[2] = {decay_over(d.total[r][0]), decay_over(d.total[r][1])};
#pragma unroll
  for (int earlier = r - 1; earlier >= 0; --earlier) {
    c.load_columns(0, r, earlier, by_d_o), c.load_columns(1, r, earlier, by_dz);
    decay_part(acc + 2 * earlier, over);
    C::multiply(acc + 2 * earlier, taken_q, by_d_o);
    C::multiply(acc + 2 * earlier, taken_k, by_dz);
  }
  c.load_columns(0, r, r, by_d_o), c.load_columns(1, r, r, by_dz);
  float(*const x)[4] = acc + 2 * r;
  decay_part(x, d.total[r]);
#pragma unroll 1
  for (int anchor = ptx::highest_bit(d.anchors[r]); anchor >= 0; --anchor) {
    const auto number = static_cast<unsigned>(anchor);
    const bool decays[2] = {number < anchor_of(d.total[r][0]), number < anchor_of(d.total[r][1])};
    for_each([&](int n, int i) {
      if (decays[i / 2] && anchor_of(d.row[2 * r + n][i]) <= number) x[n][i] *= kAnchorDecay;
    });
    take(number);
    C::multiply(x, taken_q, by_d_o);
    C::multiply(x, taken_k, by_dz);
  }
}

}  // namespace kda::cuda::sm90::grad
