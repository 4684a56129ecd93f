// SPDX-License-Identifier: Apache-2.0
// P = d_o E^T and R = -dZ E^T, on and below the diagonal. A warp has 16 rows of both.
#pragma once

#include "cuda/staged/backward/grad/pipeline.cuh"

namespace kda::cuda::grad {

struct Pairs {
  Tokens d_o = {}, dz = {};  // [16 rows, 64 columns]: the same places as of an accumulator
};

__device__ __forceinline__ void multiply_pairs(const GradContext& c, const Tile (&tiles)[3],
                                               Pairs& pairs) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    Operand d_o, dz;
    load_rows(c, tiles[1], c.warp(), step, d_o);
    load_rows(c, tiles[2], c.warp(), step, dz);
#pragma unroll
    for (int block = 0; block < kSubchunks; ++block) {
      if (block > c.warp()) break;
      Operand errors;
      load_columns(c, tiles[0], block, step, errors);
      multiply(pairs.d_o + 2 * block, d_o, errors);
      multiply(pairs.dz + 2 * block, dz, errors);
    }
  }
}

/// Keeps the diagonals in fp32 and what is below them as operands; 0 above.
__device__ __forceinline__ void store_pairs(const GradContext& c, const Pairs& pairs) {
  Shared& s = c.s;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    if (n / 2 > c.warp()) break;
    const int j = 8 * n + 2 * c.t();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = c.warp() * 16 + c.g() + 8 * half;
      const float *p = pairs.d_o[n] + 2 * half, *r = pairs.dz[n] + 2 * half;
      if (i == j) s.diagonal[i] = p[0], s.products[i] = r[0];
      if (i == j + 1) s.diagonal[i] = p[1], s.products[i] = r[1];
      const auto put = [&](Tile& to, float first, float second) {
        *reinterpret_cast<uint32_t*>(to + swizzled(i, n) + 2 * c.t()) =
            ptx::pack<Element16>(j < i ? first : 0.0f, j + 1 < i ? second : 0.0f);
      };
      put(s.P, p[0], p[1]);
      put(s.R, -r[0], -r[1]);
    }
  }
}

}  // namespace kda::cuda::grad
