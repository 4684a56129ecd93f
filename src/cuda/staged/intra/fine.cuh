// SPDX-License-Identifier: Apache-2.0
// Scores inside runs of 16 tokens by dyadic levels 8, 4, 2, 1: any gate, any type.
#pragma once

#include "cuda/staged/intra/scores.cuh"

namespace kda::cuda::intra {

/// In place of what the anchored form has for rows from s.anchored on. Which those are depends on
/// no later token. A run is made and met by warps of its own, in its rows of q and k; barriers of
/// these warps alone were 4% faster, but compute-sanitizer's racecheck does not follow them.
template <class T, int kK>
struct Fine : Scores<T, kK> {
  using Base = Scores<T, kK>;
  using Base::Base;
  using Base::decay;
  using Base::k;
  using Base::kStride;
  using Base::kWarps;
  using Base::lane;
  using Base::multiply;
  using Base::put;
  using Base::put_A;
  using Base::put_L;
  using Base::q;
  using Base::run;
  using Base::s;
  using Base::warp;

  static constexpr int kRunWarps = kWarps / kRuns;

  /// Level h: rows (8 of q, then of k) and 8 columns.
  template <int h>
  __device__ void level_operands(T (*rows)[kStride], T (*columns)[kStride]) const {
#pragma unroll
    for (int begin = 0; begin < kRun; begin += 2 * h) {
      float2 factor{1, 1};
#pragma unroll
      for (int i = 0; i < h; ++i) {
        const int token = begin + h + i, row = begin / 2 + i;
        multiply(factor, decay[token]);
        put(rows, row, q[token], factor);
        put(rows, 8 + row, k[token], factor);
      }
      factor = {1, 1};
#pragma unroll
      for (int i = h - 1; i >= 0; --i) {
        if constexpr (h == 1)
          put(columns, begin / 2, k[begin]);
        else
          put(columns, begin / 2 + i, k[begin + i], factor);
        multiply(factor, decay[begin + i]);
      }
    }
  }

  /// Columns of other pairs of the level are dropped.
  template <int h>
  __device__ void store_level(const float (&acc)[4]) const {
    const int r = lane() / 4, n = lane() % 4 * 2;
    const int row = r / h * 2 * h + h + r % h;
    if (row < s.anchored[run()]) return;
    const int i = run() * kRun + row, j = run() * kRun + n / h * 2 * h + n % h;
    if constexpr (h > 1) {
      if (n / h != r / h) return;
      const auto of_row = this->row_norms(i);
      const auto of_pair = this->pair_norms(j);
      put_A(i, j, acc[0], acc[1], of_row, of_pair);
      put_L(i, j, acc[2], acc[3], of_row, of_pair);
    } else {  // the column before the diagonal
      if (n != r && n + 1 != r) return;
      const float q = n == r ? acc[0] : acc[1], k = n == r ? acc[2] : acc[3];
      s.after.Aqk[i][i - 1] = static_cast<T>(q * (s.q_norm[i] * s.k_norm[i - 1]));
      s.after.N[i][i - 1] = k * (s.k_norm[i] * s.k_beta[i - 1]);
    }
  }

  template <int h>
  __device__ void level() const {
    T(*rows)[kStride] = s.q + run() * kRun;
    T(*columns)[kStride] = s.k + run() * kRun;
    level_operands<h>(rows, columns);
    __syncthreads();
    constexpr int kWhich = h == 8 || h == 2 ? 0 : 1;  // of two warps, each takes every second level
    if (warp() % kRunWarps == kWhich % kRunWarps) {
      float acc[1][4] = {};
      const T(*const of_both[1])[kStride] = {rows};
      this->template multiply_rows<1, 1>(of_both, columns, acc);
      store_level<h>(acc[0]);
    }
    __syncthreads();
  }

  __device__ void fine_levels() const {
    const int4 anchored = *reinterpret_cast<const int4*>(s.anchored);
    if (min(min(anchored.x, anchored.y), min(anchored.z, anchored.w)) == kRun) return;
    __syncthreads();
    level<8>();
    level<4>();
    level<2>();
    level<1>();
  }
};

}  // namespace kda::cuda::intra
