// SPDX-License-Identifier: Apache-2.0
// From sums over tokens to the gradients that leave.
#pragma once

#include "cuda/staged/backward/grad/rows.cuh"
#include "cuda/staged/backward/grad/tokens.cuh"

namespace kda::cuda::grad {

/// dq of a sub-chunk, with the token itself.
__device__ __forceinline__ void store_queries(const GradContext& c, int r, float (*x)[4]) {
  const TokenPair own(c, c.s.diagonal, r), factor(c, c.s.beta_k_factor, r);
  Operand k;
  load_transposed(c, c.s.k, r, k);
  for_each([&](int n, int i) {
    x[n][i] = fmaf(own.at(n, i) * factor.at(n, i), element(k, n, i), x[n][i]);
  });
  store_rows(c, kQueries, r, x);
}

/// k_j . columns_j over the warp's channels.
__device__ __forceinline__ void keep_shares(const GradContext& c, int r,
                                            const float (*columns)[4]) {
  float* shares = c.s.shares[c.current_round * kWarps + c.warp()];
  const TokenPair factor(c, c.s.k_factor, r);
  Operand k;
  load_transposed(c, c.s.k, r, k);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = element(k, n, i) * columns[n][i] + element(k, n, i + 2) * columns[n][i + 2];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (c.g() == 0) shares[16 * r + 8 * n + 2 * c.t() + i] = sum * factor.at(n, i);
    }
}

/// dk of a sub-chunk from its rows' part and its columns', with the token itself.
__device__ __forceinline__ void store_keys(const GradContext& c, int r, float (*rows)[4],
                                           float (*columns)[4]) {
  const TokenPair own(c, c.s.diagonal, r), beta(c, c.s.beta, r), factor(c, c.s.q_factor, r);
  Operand q;
  load_transposed(c, c.s.q, r, q);
  for_each([&](int n, int i) {
    columns[n][i] = fmaf(own.at(n, i) * factor.at(n, i), element(q, n, i), columns[n][i]);
    rows[n][i] = fmaf(beta.at(n, i), columns[n][i], rows[n][i]);
  });
  store_rows(c, kKeys, r, rows);
  if (c.s.any_small) keep_shares(c, r, columns);
}

__device__ __forceinline__ void store_betas(const GradContext& c) {
  if (c.tid >= c.chunk.count) return;
  float value = c.s.products[c.tid] / c.s.beta[c.tid];
  if (is_small(c, c.tid)) {
    value = 0;
    for (int i = 0; i < c.rounds() * kWarps; ++i) value += c.s.shares[i][c.tid];
  }
  row_of(c, c.tid)[3 * c.padded_K()] = value;
}

}  // namespace kda::cuda::grad
