// SPDX-License-Identifier: Apache-2.0
// Rows of the caller as tiles of shared memory.
#pragma once

#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/swizzle.hpp"

namespace kda::cuda::gdn {

/// Copies a chunk's first `count` rows to a swizzled tile of 64 rows of kColumns, by kThreads
/// threads and cp.async; zeros past `count`, and past the `columns` that a row has. Rows are
/// aligned to 16 bytes.
template <int kColumns, int kThreads, class T>
__device__ __forceinline__ void copy_rows(T* tile, const T* rows, int64_t stride, int count,
                                          int columns, int thread) {
  constexpr int kPieces = kColumns / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kStep % 4 == 0,
                "two steps keep the place in the swizzle");
  const int row0 = thread / kPieces % kStep, piece = thread % kPieces;
  const bool inside = piece * 8 < columns;
  const T* from = rows + row0 * stride + piece * 8;
  const uint32_t to[2] = {ptx::shared_address(tile + swizzled(row0, piece)),
                          ptx::shared_address(tile + swizzled(row0 + kStep, piece))};
  const auto copy = [&](int i, bool valid) {
    ptx::cp_async<16>(to[i % 2] + i / 2 * 2 * kStep * 64 * static_cast<int>(sizeof(T)), from,
                      valid);
    from += kStep * stride;
  };
  if (inside && count == kChunk) {  // most chunks: nothing to compare
#pragma unroll 4
    for (int i = 0; i < kChunk / kStep; ++i) copy(i, true);
    return;
  }
#pragma unroll 2
  for (int i = 0; i < kChunk / kStep; ++i) copy(i, inside && row0 + i * kStep < count);
}

}  // namespace kda::cuda::gdn
