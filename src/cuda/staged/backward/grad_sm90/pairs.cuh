// SPDX-License-Identifier: Apache-2.0
// Weights of pairs of tokens: dP = scale beta P below the diagonal, for raw q and k, so with the
// norms of both tokens; dN = beta R alike, from the product -R = dZ E^T. Of one value head the
// first warpgroup has the one, the second the other; of two each has both of its own.
#pragma once

#include "cuda/staged/backward/grad/states.cuh"
#include "cuda/staged/backward/grad_sm90/context.cuh"

namespace kda::cuda::sm90::grad {

/// Norms and what is made of them: a warp has 16 tokens of q or of k. The sum of squares is the
/// diagonal of a product of 16 x 16 tokens.
template <class C>
__device__ __forceinline__ void find_factors_of(const C& c, bool of_k) {
  const bool l2norm = c.a.gate.l2norm;
  const int block = c.warp % 4;
  float2 norms = {1, 1};
  if (l2norm) {
    const uint32_t rows = ptx::shared_address((of_k ? c.s.k : c.s.q)[c.head()]) +
                          block * kSubchunkBytes + 2 * swizzled(c.lane % 16, c.lane / 16);
    float acc[2][4] = {};
#pragma unroll
    for (int step = 0; step < kK / C::kHeads / 16; ++step) {
      Operand x;
      ptx::ldmatrix_x4(x, (rows ^ step % 4 * 32) + step / 4 * static_cast<int>(sizeof(Tile)));
      C::multiply(acc, x, {x[0], x[2], x[1], x[3]});
    }
    const float2 squares = cuda::grad::diagonal_of(c, acc);
    norms = {rsqrtf(squares.x + 1e-6f), rsqrtf(squares.y + 1e-6f)};
  }
  if (c.t() > 1) return;
  const int token = 16 * block + c.g() + 8 * c.t();
  const float norm = c.t() == 0 ? norms.x : norms.y, along = l2norm ? norm * norm : 0;
  Factors& factors = c.s.factors[c.head()];
  if (of_k) {
    const float column = c.numbers().beta[c.head()][token] * norm;
    factors.minus_k_row[token] = -norm * c.back(kOfDz) * c.back(kOfErrors);
    factors.minus_k_state[token] = -norm / kAnchor * c.back(kOfState) * c.back(kOfDz);
    factors.column[token] = column;
    factors.column_state[token] = column * kAnchor * c.back(kOfDState) * c.back(kOfErrors);
    factors.k_along[token] = along;
  } else {
    const float row = c.a.gate.scale * norm;
    factors.q_row[token] = row * c.back(kOfErrors);
    factors.q_state[token] = row / kAnchor * c.back(kOfState);
    factors.q_along[token] = along;
  }
}
template <class C>
__device__ __forceinline__ void find_factors(const C& c) {
  if constexpr (C::kHeads == 2)
    find_factors_of(c, false), find_factors_of(c, true);
  else
    find_factors_of(c, c.group() == 1);
}

/// Pairs of a warp's 16 tokens with those of sub-chunk b, to the place of its rows.
template <class C>
__device__ __forceinline__ void put_pairs(const C& c, bool by_dz, int block, int b,
                                          const float (&x)[2][4]) {
  if constexpr (C::kWide) {
    float* rows = c.wide_pairs(by_dz) + (16 * block + c.g()) * kChunk;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (16 * b + 8 * n) ^ wide_swizzle(c.g());
        *reinterpret_cast<float2*>(rows + 8 * half * kChunk + column + 2 * c.t()) = {
            __uint_as_float(ptx::to_tf32(x[n][2 * half])),
            __uint_as_float(ptx::to_tf32(x[n][2 * half + 1]))};
      }
  } else {
    using T = typename C::T;
    const uint32_t to =
        c.by_columns + by_dz * static_cast<int>(sizeof(Tile)) + block * kSubchunkBytes;
    ptx::stmatrix_x4(to ^ b * 32, {ptx::pack<T>(x[0][0], x[0][1]), ptx::pack<T>(x[0][2], x[0][3]),
                                   ptx::pack<T>(x[1][0], x[1][1]), ptx::pack<T>(x[1][2], x[1][3])});
  }
}

/// A warp stores its 16 rows: later tokens. The diagonals stay in fp32.
template <class C>
__device__ __forceinline__ void store_pairs(const C& c, bool by_dz, const Tokens& products) {
  const int block = c.warp % 4, i0 = 16 * block + c.g();
  const Factors& factors = c.factors();
  const float* of_rows = by_dz ? factors.minus_k_row : factors.q_row;
  const float row[2] = {of_rows[i0], of_rows[i0 + 8]};
  float* diagonal = by_dz ? c.s.products[c.head()] : c.s.own_pair[c.head()];
  const float of_products = c.back(kOfDz) * c.back(kOfErrors);
#pragma unroll
  for (int b = 0; b < kSubchunks; ++b) {
    if (b > block) continue;
    float x[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j0 = 16 * b + 8 * n + 2 * c.t();
      const float2 column = c.of_tokens(factors.column, 2 * b + n);
      const float(&product)[4] = products[2 * b + n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = product[i] * row[i / 2] * (i % 2 ? column.y : column.x);
        if (b != block) continue;
        const int later = i0 + i / 2 * 8, earlier = j0 + i % 2;
        if (later == earlier) diagonal[later] = by_dz ? product[i] * of_products : x[n][i];
        x[n][i] = earlier < later ? x[n][i] : 0;
      }
    }
    put_pairs(c, by_dz, block, b, x);
  }
}

}  // namespace kda::cuda::sm90::grad
