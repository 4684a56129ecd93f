// SPDX-License-Identifier: Apache-2.0
// Scores inside sub-chunks by dyadic levels 8, 4, 2, 1: any gate, any type. They take the place of
// what the anchored form has for rows from s.anchored on. Which those are depends on no later
// token. A sub-chunk is made and met by warps of its own, in its rows of q and k; barriers of these
// warps alone were 4% faster, but compute-sanitizer's racecheck does not follow them.
#pragma once

#include "cuda/staged/intra/scores.cuh"

namespace kda::cuda::intra {

/// Stores operands of level h: rows (8 of q, then of k) and 8 columns.
template <int h, class C>
__device__ void level_operands(const C& c, RowsOf<C>* rows, RowsOf<C>* columns) {
#pragma unroll
  for (int begin = 0; begin < kSubchunk; begin += 2 * h) {
    float2 factor{1, 1};
#pragma unroll
    for (int i = 0; i < h; ++i) {
      const int token = begin + h + i, row = begin / 2 + i;
      multiply(factor, c.decay[token]);
      put(c, rows, row, c.q[token], factor);
      put(c, rows, 8 + row, c.k[token], factor);
    }
    factor = {1, 1};
#pragma unroll
    for (int i = h - 1; i >= 0; --i) {
      if constexpr (h == 1)
        put(c, columns, begin / 2, c.k[begin]);
      else
        put(c, columns, begin / 2 + i, c.k[begin + i], factor);
      multiply(factor, c.decay[begin + i]);
    }
  }
}

/// Columns of other pairs of the level are dropped.
template <int h, class C>
__device__ void store_level(const C& c, const float (&acc)[4]) {
  auto& s = c.s;
  const int r = c.lane() / 4, n = c.lane() % 4 * 2;
  const int row = r / h * 2 * h + h + r % h;
  if (row < s.anchored[c.subchunk()]) return;
  const int i = c.subchunk() * kSubchunk + row,
            j = c.subchunk() * kSubchunk + n / h * 2 * h + n % h;
  if constexpr (h > 1) {
    if (n / h != r / h) return;
    const RowNorms of_row = row_norms(c, i);
    const PairNorms of_pair = pair_norms(c, j);
    put_A(c, i, j, acc[0], acc[1], of_row, of_pair);
    put_L(c, i, j, acc[2], acc[3], of_row, of_pair);
  } else {  // the column before the diagonal
    if (n != r && n + 1 != r) return;
    const float q = n == r ? acc[0] : acc[1], k = n == r ? acc[2] : acc[3];
    s.after.Aqk[i][i - 1] = static_cast<typename C::F>(q * (s.q_norm[i] * s.k_norm[i - 1]));
    s.after.N[i][i - 1] = k * (s.k_norm[i] * s.k_beta[i - 1]);
  }
}

template <int h, class C>
__device__ void level(const C& c) {
  constexpr int kSubchunkWarps = C::kWarps / kSubchunks;
  RowsOf<C>* rows = c.s.q + c.subchunk() * kSubchunk;
  RowsOf<C>* columns = c.s.k + c.subchunk() * kSubchunk;
  level_operands<h>(c, rows, columns);
  __syncthreads();
  constexpr int kWhich = h == 8 || h == 2 ? 0 : 1;  // of two warps, each takes every second level
  if (c.warp() % kSubchunkWarps == kWhich % kSubchunkWarps) {
    float acc[1][4] = {};
    const RowsOf<C>* const of_both[1] = {rows};
    multiply_rows<1, 1>(c, of_both, columns, acc);
    store_level<h>(c, acc[0]);
  }
  __syncthreads();
}

template <class C>
__device__ void fine_levels(const C& c) {
  const int4 anchored = *reinterpret_cast<const int4*>(c.s.anchored);
  if (min(min(anchored.x, anchored.y), min(anchored.z, anchored.w)) == kSubchunk) return;
  __syncthreads();
  level<8>(c);
  level<4>(c);
  level<2>(c);
  level<1>(c);
}

}  // namespace kda::cuda::intra
