// SPDX-License-Identifier: Apache-2.0
// Copies of rows as they lie in memory.
#pragma once

#include "cuda/tile/elements.cuh"

namespace kda::cuda::tail {

KDA_HOST_DEVICE_INLINE int size_of(const RowView& view) {
  return view.type == Element::kFloat32 ? 4 : 2;
}

/// Thread `index` of `threads` copies its part of a row of `size` elements, the same part of every
/// row.
__device__ __forceinline__ void copy_row(const RowView& from, int64_t from_at, const RowView& to,
                                         int64_t to_at, int size, int index, int threads) {
#pragma unroll 1
  for (int c = index; c < size; c += threads)
    if (to.type == Element::kFloat32)
      static_cast<uint32_t*>(to.base)[to_at + c] =
          static_cast<const uint32_t*>(from.base)[from_at + c];
    else
      static_cast<uint16_t*>(to.base)[to_at + c] =
          static_cast<const uint16_t*>(from.base)[from_at + c];
}

}  // namespace kda::cuda::tail
