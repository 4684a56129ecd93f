// SPDX-License-Identifier: Apache-2.0
// What pairs of tokens weigh: dP = scale beta P below the diagonal, for raw q and k, so with the
// norms of both tokens; dN = -beta R alike. The first warpgroup has the one, the second the other.
#pragma once

#include "cuda/staged/backward/grad_sm90/context.cuh"

namespace kda::cuda::sm90::grad {

/// A warp stores its 16 rows: later tokens. The diagonals stay in fp32.
__device__ __forceinline__ void store_pairs(const Worker& c, const Tokens& products) {
  const bool by_dz = c.group() == 1;
  const int block = c.warp % 4, i0 = 16 * block + c.g();
  const Numbers& numbers = c.numbers();
  const float* of_rows = by_dz ? numbers.minus_k_row : numbers.q_row;
  const float row[2] = {of_rows[i0], of_rows[i0 + 8]};
  float* diagonal = by_dz ? c.s.products : c.s.own_pair;
  const uint32_t to =
      c.by_columns + c.group() * static_cast<int>(sizeof(Tile)) + block * kSubchunkBytes;
#pragma unroll
  for (int b = 0; b < kSubchunks; ++b) {
    if (b > block) continue;
    float x[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j0 = 16 * b + 8 * n + 2 * c.t();
      const float2 column = c.of_tokens(numbers.column, 2 * b + n);
      const float(&product)[4] = products[2 * b + n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[n][i] = product[i] * row[i / 2] * (i % 2 ? column.y : column.x);
        if (b != block) continue;
        const int later = i0 + i / 2 * 8, earlier = j0 + i % 2;
        if (later == earlier) diagonal[later] = by_dz ? product[i] : x[n][i];
        x[n][i] = earlier < later ? x[n][i] : 0;
      }
    }
    ptx::stmatrix_x4(
        to ^ b * 32,
        {ptx::pack<Element16>(x[0][0], x[0][1]), ptx::pack<Element16>(x[0][2], x[0][3]),
         ptx::pack<Element16>(x[1][0], x[1][1]), ptx::pack<Element16>(x[1][2], x[1][3])});
  }
}

}  // namespace kda::cuda::sm90::grad
