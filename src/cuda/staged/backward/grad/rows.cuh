// SPDX-License-Identifier: Apache-2.0
// The rows of gradients in device memory.
#pragma once

#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/staged/backward/grad/context.cuh"

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

/// Visits this lane's elements of a gradient of the tokens of a sub-chunk, if they are there:
/// visit(n, i, element).
template <class Visit>
__device__ __forceinline__ void for_each_stored(const GradContext& c, Gradient which, int subchunk,
                                                Visit&& visit) {
  const int token0 = subchunk * kSubchunk + 2 * c.t();
  int step = static_cast<int>(c.a.shape.HV) * row_size(c);  // 64 of them fit: HV is below 65,536
  ptx::make_opaque(step);                                   // no multiples of it are kept
  float* first = row_of(c, 0) + (token0 * step + which * c.padded_K() + c.channel());
  for_each([&](int n, int i) {
    if (token0 + 8 * n + i % 2 < c.chunk.count)
      visit(n, i, first[(8 * n + i % 2) * step + i / 2 * 8]);
  });
}
__device__ __forceinline__ void store_rows(const GradContext& c, Gradient which, int subchunk,
                                           const float (*x)[4]) {
  for_each_stored(c, which, subchunk, [&](int n, int i, float& stored) { stored = x[n][i]; });
}

}  // namespace kda::cuda::grad
