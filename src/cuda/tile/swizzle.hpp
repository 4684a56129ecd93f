// SPDX-License-Identifier: Apache-2.0
// The order of a tile's 16-byte pieces, the same in the workspace and in shared memory.
#pragma once

#include "core/host_device.hpp"

namespace kda::cuda {

/// Element offset of 16-byte piece `piece` of row `row` in a tile of kRows rows of 16-bit elements:
/// 64 columns after each other, each with rows of 128 bytes whose pieces are permuted. That is what
/// ldmatrix reads without bank conflicts, and what wgmma calls the 128-byte swizzle, of K-major and
/// of MN-major operands.
template <int kRows = 64>
KDA_HOST_DEVICE_INLINE constexpr int swizzled(int row, int piece) {
  return piece / 8 * kRows * 64 + row * 64 + ((piece ^ row) & 7) * 8;
}

/// swizzled(row0 + row, piece0 + piece), where row0 is a multiple of 8 and `piece0` and `piece`
/// have no bit in common. With constants row0 and piece0 that is one value of the lane, for all of
/// them, a constant exclusive or, and a constant.
KDA_HOST_DEVICE_INLINE constexpr int swizzled_from(int row0, int piece0, int row, int piece) {
  const int first = row * 64 + ((piece ^ row) & 7) * 8;
  return piece0 / 8 * 64 * 64 + row0 * 64 + (first ^ (piece0 & 7) * 8);
}

}  // namespace kda::cuda
