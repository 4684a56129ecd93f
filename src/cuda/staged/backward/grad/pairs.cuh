// SPDX-License-Identifier: Apache-2.0
// P = d_o E^T and R = -dZ E^T, on and below the diagonal. A warp has 16 rows of both.
#pragma once

#include "cuda/staged/backward/grad/pipeline.cuh"

namespace kda::cuda::grad {

struct Pairs {
  Tokens p = {}, minus_r = {};  // [16 rows, 64 columns]: the same places as of an accumulator
};

__device__ __forceinline__ void multiply_pairs(const GradContext& c, const Tile (&tiles)[3],
                                               Pairs& pairs) {
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    Operand d_o, dz;
    load_rows(c, tiles[1], c.warp(), step, d_o);
    load_rows(c, tiles[2], c.warp(), step, dz);
#pragma unroll
    for (int block = 0; block < kSubchunks; ++block) {
      if (block > c.warp()) break;
      Operand errors;
      load_columns(c, tiles[0], block, step, errors);
      multiply(pairs.p + 2 * block, d_o, errors);
      multiply(pairs.minus_r + 2 * block, dz, errors);
    }
  }
}

/// Keeps the diagonals in fp32, P below the diagonal and R^T above it as operands. By blocks of 8
/// tokens, whose lanes have pairs of a row.
__device__ __forceinline__ void store_pairs(const GradContext& c, const Pairs& pairs) {
  Shared& s = c.s;
  const int g = c.g(), j = 2 * c.t();
  const auto put = [&](int rows, int columns, uint32_t pair) {
    *reinterpret_cast<uint32_t*>(s.pairs + swizzled(8 * rows + g, columns) + j) = pair;
  };
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = 2 * c.warp() + half;  // block of rows
      if (n > m) continue;
      const float *p = pairs.p[n] + 2 * half, *r = pairs.minus_r[n] + 2 * half;
      const uint32_t below = ptx::pack<Element16>(p[0], p[1]);
      const uint32_t above = ptx::movmatrix_trans(ptx::pack<Element16>(-r[0], -r[1]));
      if (n < m) {
        put(m, n, below);
        put(n, m, above);
        continue;
      }
      const auto chosen = [&](int column) { return column < g ? below : column > g ? above : 0; };
      put(m, m, (chosen(j) & 0xffffu) | (chosen(j + 1) & 0xffff0000u));
      if (g == j) s.diagonal[8 * m + g] = p[0], s.products[8 * m + g] = r[0];
      if (g == j + 1) s.diagonal[8 * m + g] = p[1], s.products[8 * m + g] = r[1];
    }
}

}  // namespace kda::cuda::grad
