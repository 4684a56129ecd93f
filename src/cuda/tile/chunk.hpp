// SPDX-License-Identifier: Apache-2.0
// The chunk of the staged pipeline.
#pragma once

#include <cstdint>

namespace kda::cuda {

inline constexpr int kChunk = 64;  ///< tokens
inline constexpr int kVTile = 64;  ///< columns of V in a tile of u
inline constexpr int kMaxStagedK = 128;

}  // namespace kda::cuda
