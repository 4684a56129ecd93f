// SPDX-License-Identifier: Apache-2.0
// Sums over tokens, as in grad/sums.cuh, with one anchor for all pairs of a sub-chunk: its start.
// Rows x P and columns k / P, rounded, serve all other sub-chunks too; accumulators decay from one
// to the next. What was computed from decays is computed again, not kept in registers or spilled.
#pragma once

#include "cuda/staged/backward/grad_sm90/anchors.cuh"

namespace kda::cuda::sm90::grad {

/// A number of each token of a Part.
template <class C>
__device__ __forceinline__ float of_token(const C& c, const float (&numbers)[kChunk], int r, int n,
                                          int i) {
  const float2 pair = c.of_tokens(numbers, 2 * r + n);
  return i % 2 ? pair.y : pair.x;
}

/// The factor that brings a column in front of its row's anchor.
__device__ __forceinline__ auto inverses(const Decays& d, int r) {
  return [&d, r](int n, int i) { return ptx::rcp(d.row[2 * r + n][i]); };
}

/// Columns: keys of each sub-chunk, decayed back to its start; or back, or on, to the anchor of its
/// last row. They are kept in registers.
template <class C, bool kWide = C::kWide>
struct Columns {
  Operand kept[kSubchunks];
  template <bool kSeveral>
  __device__ __forceinline__ const Operand& make(const C&, const Decays& d, const Operand& raw_k,
                                                 int r) {
    scale_operand(raw_k, kept[r], inverses(d, r));
    if (kSeveral && !d.has_one(r)) find_ends(d, r, kept[r]);
    return kept[r];
  }
  template <bool kSeveral>
  __device__ __forceinline__ const Operand& again(const C&, const Decays&, int r) {
    return kept[r];
  }
  __device__ __forceinline__ void rename(const C& c) {
    ptx::rename_registers(reinterpret_cast<float(&)[kSubchunks][4]>(kept), c.a.zero);
  }
};
/// In tf32 they would be twice as many registers: they are made again.
template <class C>
struct Columns<C, true> {
  Part made;
  template <bool kSeveral>
  __device__ __forceinline__ const Part& make(const C&, const Decays& d, const Operand& raw_k,
                                              int r) {
    scale_operand<typename C::T>(raw_k, made, inverses(d, r));
    if (kSeveral && !d.has_one(r)) find_ends(d, r, made);
    return made;
  }
  template <bool kSeveral>
  __device__ __forceinline__ const Part& again(const C& c, const Decays& d, int r) {
    Operand raw_k;
    C::load(c.channels_of(c.s.k), r, raw_k);
    return make<kSeveral>(c, d, raw_k, r);
  }
  __device__ __forceinline__ void rename(const C&) {}
};

/// Adds the columns of sub-chunk r to its rows and to those of all later ones.
template <bool kSeveral, class C>
__device__ __forceinline__ void add_earlier(const C& c, int which, const Operand& raw_k,
                                            const typename C::Decayed& columns, const Decays& d,
                                            int r, Tokens& acc) {
  const bool several = kSeveral && !d.has_one(r);
  if (several) {
    typename C::Decayed own;
    scale_operand<typename C::T>(raw_k, own, inverses(d, r));
    add_by_anchors(c, which, own, d, r, acc + 2 * r);
    const float kept[2] = {anchor_of(d.total[r][0]) == 0 ? 1.0f : 0.0f,
                           anchor_of(d.total[r][1]) == 0 ? 1.0f : 0.0f};
#pragma unroll
    for (int later = r + 1; later < kSubchunks; ++later) decay_part(acc + 2 * later, kept);
  }
  typename C::Pairs pairs[2];  // the next ones are on their way
  c.load_rows(which, r, r, pairs[r % 2]);
#pragma unroll
  for (int later = r; later < kSubchunks; ++later) {
    if (later + 1 < kSubchunks) c.load_rows(which, later + 1, r, pairs[(later + 1) % 2]);
    if (later > r || !several) C::multiply(acc + 2 * later, columns, pairs[later % 2]);
    if (later > r) decay_part(acc + 2 * later, d.total[r]);
  }
}

/// From S0 d_o^T to dq, with the token itself; makes the columns.
template <bool kSeveral, class C>
__device__ __forceinline__ void add_queries(const C& c, const Decays& d, Tokens& queries,
                                            Columns<C>& columns, Tokens& dG) {
  using T = typename C::T;
  const uint32_t q = c.channels_of(c.s.q), k = c.channels_of(c.s.k);
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    Operand raw_q, raw_k;
    typename C::Decayed rows;
    C::load(k, r, raw_k);
    c.template fence_in<Fence::kQueries>(r);
    const auto row = [&](int n, int i) { return d.row[2 * r + n][i]; };
    const auto& column = columns.template make<kSeveral>(c, d, raw_k, r);
    C::load(q, r, raw_q);
    add_earlier<kSeveral>(c, 0, raw_k, column, d, r, queries);
    scale_operand<T>(raw_q, rows, row);
    for_each([&](int n, int i) {
      float& x = queries[2 * r + n][i];
      dG[2 * r + n][i] = element(rows, n, i) * x;
      x = row(n, i) * x + of_token(c, c.s.own_pair[c.head()], r, n, i) * element<T>(raw_k, n, i);
    });
    ptx::fence_operands(reinterpret_cast<float(&)[2][4]>(dG[2 * r]));
  }
}

/// Returns what E dS^T adds to the gradient by every log decay of the chunk: of this lane's tokens.
template <bool kSeveral, class C>
__device__ __forceinline__ float2 boundary_of_columns(const C& c, const Decays& d,
                                                      Columns<C>& columns, const Tokens& acc,
                                                      float2* over_chunk) {
  float share[2] = {}, after[2] = {1, 1};
#pragma unroll
  for (int r = kSubchunks - 1; r >= 0; --r) {
    float sum[2] = {};
    const auto& column = columns.template again<kSeveral>(c, d, r);
    // Nothing makes fp16 rows again: their products stay in range, decays first.
    if constexpr (C::kWide) after[0] *= d.total[r][0], after[1] *= d.total[r][1];
    for_each([&](int n, int i) {
      const float x = C::kWide ? acc[2 * r + n][i] * after[i / 2] : acc[2 * r + n][i];
      sum[i / 2] = fmaf(element(column, n, i), x, sum[i / 2]);
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (C::kWide) {
        share[half] += sum[half];
      } else {
        after[half] *= d.total[r][half];
        share[half] = fmaf(after[half], sum[half], share[half]);
      }
      if (kSeveral && anchor_of(d.total[r][half]) != 0) after[half] = 0;
    }
  }
  *over_chunk = {after[0], after[1]};
  return {share[0], share[1]};
}

/// From E dS^T to the columns' part of dk, with the token itself.
template <bool kSeveral, class C>
__device__ __forceinline__ void add_columns(const C& c, const Decays& d, Columns<C>& columns,
                                            Tokens& acc, Tokens& dG) {
  using T = typename C::T;
  const uint32_t q = c.channels_of(c.s.q), k = c.channels_of(c.s.k);
#pragma unroll
  for (int r = kSubchunks - 1; r >= 0; --r) {
    Operand raw_q, raw_k;
    typename C::Decayed rows_q, rows_k;
    C::load(q, r, raw_q), C::load(k, r, raw_k);
    c.template fence_in<Fence::kColumns>(r);
    const auto row = [&](int n, int i) { return d.row[2 * r + n][i]; };
    scale_rows<T>(raw_q, rows_q, row), scale_rows<T>(raw_k, rows_k, row);
    typename C::Decayed own;
    if constexpr (C::kWide) {
      scale_operand<T>(raw_k, own, inverses(d, r));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) own[i] = columns.kept[r][i];
    }
    if (kSeveral && !d.has_one(r)) {
      add_rows_by_anchors(c, rows_q, rows_k, d, r, acc);
      scale_operand<T>(raw_k, own, inverses(d, r));
    } else {
#pragma unroll
      for (int earlier = r; earlier >= 0; --earlier) {
        typename C::Pairs by_d_o, by_dz;
        c.load_columns(0, r, earlier, by_d_o), c.load_columns(1, r, earlier, by_dz);
        decay_part(acc + 2 * earlier, d.total[r]);
        C::multiply(acc + 2 * earlier, rows_q, by_d_o);
        C::multiply(acc + 2 * earlier, rows_k, by_dz);
      }
    }
    for_each([&](int n, int i) {
      float& x = acc[2 * r + n][i];
      dG[2 * r + n][i] -= element(own, n, i) * x;
      x = ptx::rcp(row(n, i)) * x +
          of_token(c, c.s.own_pair[c.head()], r, n, i) * element<T>(raw_q, n, i);
    });
    ptx::fence_operands(reinterpret_cast<float(&)[2][4]>(dG[2 * r]));
  }
}

/// From -S0 dZ^T, with the rows' part, to dk.
template <bool kSeveral, class C>
__device__ __forceinline__ void add_keys(const C& c, const Decays& d, Columns<C>& columns,
                                         Tokens& keys, Tokens& dk, Tokens& dG) {
  const uint32_t k = c.channels_of(c.s.k);
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    Operand raw_k;
    typename C::Decayed rows;
    if (kSeveral) C::load(k, r, raw_k);
    add_earlier<kSeveral>(c, 1, raw_k, columns.template again<kSeveral>(c, d, r), d, r, keys);
    if (!kSeveral) C::load(k, r, raw_k);
    c.template fence_in<Fence::kKeys>(r);
    const auto row = [&](int n, int i) { return d.row[2 * r + n][i]; };
    scale_operand<typename C::T>(raw_k, rows, row);
    for_each([&](int n, int i) {
      dG[2 * r + n][i] += element(rows, n, i) * keys[2 * r + n][i];
      dk[2 * r + n][i] += row(n, i) * keys[2 * r + n][i];
    });
  }
}

}  // namespace kda::cuda::sm90::grad
