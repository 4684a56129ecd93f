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

/// Keeps the diagonals in fp32 and what is below them as operands, with the norms of both tokens.
__device__ __forceinline__ void store_pairs(const GradContext& c, const Pairs& pairs) {
  Shared& s = c.s;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    if (n / 2 > c.warp()) break;
    const int j = 8 * n + 2 * c.t();
    const float2 of_j = of_tokens(c, s.k_norm, n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = c.warp() * 16 + c.g() + 8 * half;
      const float p0 = pairs.d_o[n][2 * half], p1 = pairs.d_o[n][2 * half + 1];
      const float r0 = pairs.dz[n][2 * half], r1 = pairs.dz[n][2 * half + 1];
      if (i == j || i == j + 1) {
        s.diagonal[i] = i == j ? p0 : p1;
        s.products[i] = i == j ? r0 : r1;
      }
      const float of_q = s.q_norm[i], of_k = -s.k_norm[i];
      const auto put = [&](Tile& to, float first, float second, float factor) {
        *reinterpret_cast<uint32_t*>(to + swizzled(i, n) + 2 * c.t()) =
            ptx::pack<Element16>(j < i ? first * (factor * of_j.x) : 0.0f,
                                 j + 1 < i ? second * (factor * of_j.y) : 0.0f);
      };
      put(s.P, p0, p1, of_q);
      put(s.R, r0, r1, of_k);
    }
  }
}

}  // namespace kda::cuda::grad
