// SPDX-License-Identifier: Apache-2.0
// The order of a tile's 16-byte pieces, the same in the workspace and in shared memory.
#pragma once

namespace kda::cuda {

/// Element offset of 16-byte piece `piece` of row `row` in a tile of kColumns columns.
template <int kColumns>
__device__ __forceinline__ constexpr int swizzled(int row, int piece) {
  return row * kColumns + (piece ^ (row & 7)) * 8;
}

}  // namespace kda::cuda
