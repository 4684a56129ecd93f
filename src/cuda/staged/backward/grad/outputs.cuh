// SPDX-License-Identifier: Apache-2.0
// What leaves: rows of gradients.
#pragma once

#include "cuda/backward/backward.hpp"
#include "cuda/staged/backward/grad/sums.cuh"
#include "cuda/staged/backward/grad/tokens.cuh"

namespace kda::cuda::grad {

/// Floats of a row, after one round or two.
constexpr int kNarrowRow = backward_row(kChannels), kWideRow = backward_row(2 * kChannels);
__device__ __forceinline__ int row_size(const GradContext& c) {
  return c.rounds() == 1 ? kNarrowRow : kWideRow;
}
/// The row of a token of the chunk.
__device__ __forceinline__ float* row_of(const GradContext& c, int token) {
  return c.a.rows + ((c.chunk.begin + token) * c.a.shape.HV + c.head) * row_size(c);
}

/// Which of the gradients of a row.
enum Gradient : int { kQueries, kKeys, kLogDecays };

__device__ __forceinline__ void store_rows(const GradContext& c, Gradient which, const Tokens& x) {
  float* first = row_of(c, 2 * c.t()) + which * c.padded_K() + c.channel();
  const int64_t step = c.a.shape.HV * row_size(c);
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * n + 2 * c.t() + i % 2 < c.chunk.count)
        first[(8 * n + i % 2) * step + i / 2 * 8] = x[n][i];
}

/// dq: without the norm's factor, and with the token itself.
__device__ __forceinline__ void finish_queries(const GradContext& c, Tokens& x) {
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    const TokenPair size(c, c.s.q_size, r), own(c, c.s.diagonal, r), beta(c, c.s.beta, r),
        norm(c, c.s.k_norm, r);
    Operand k;
    load_transposed(c, c.s.k, r, k);
    for_each([&](int n, int i) {
      const float factor = own.at(n, i) * (beta.at(n, i) * norm.at(n, i));
      float& y = x[2 * r + n][i];
      y = fmaf(factor, element(k, n, i), y * size.at(n, i));
    });
  }
}

/// dk in place of the rows' part, and the columns' with the token itself in place of theirs.
__device__ __forceinline__ void finish_keys(const GradContext& c, Tokens& rows, Tokens& columns) {
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    const TokenPair size(c, c.s.k_size, r), own(c, c.s.diagonal, r), beta(c, c.s.beta, r),
        q_norm(c, c.s.q_norm, r);
    Operand q;
    load_transposed(c, c.s.q, r, q);
    for_each([&](int n, int i) {
      const float factor = own.at(n, i) * (c.a.gate.scale * q_norm.at(n, i));
      float &x = rows[2 * r + n][i], &y = columns[2 * r + n][i];
      y = fmaf(factor, element(q, n, i), y * size.at(n, i));
      x = fmaf(beta.at(n, i), y, x * size.at(n, i));
    });
  }
}

/// k_j . columns_j over the warp's channels.
__device__ __forceinline__ void share_of_betas(const GradContext& c, const Tokens& columns) {
  float* shares = c.s.shares[c.current_round * kWarps + c.warp()];
#pragma unroll
  for (int r = 0; r < kSubchunks; ++r) {
    const TokenPair norm(c, c.s.k_norm, r);
    Operand k;
    load_transposed(c, c.s.k, r, k);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = element(k, n, i) * columns[2 * r + n][i] +
                    element(k, n, i + 2) * columns[2 * r + n][i + 2];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        if (c.g() == 0) shares[16 * r + 8 * n + 2 * c.t() + i] = sum * norm.at(n, i);
      }
  }
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
