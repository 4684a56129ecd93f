// SPDX-License-Identifier: Apache-2.0
// The factors of a chunk (docs/operation.md, "Chunked form"), as the stages hand them on through
// the workspace. One tile a (chunk of the batch, value head), index chunk * HV + head, rows of
// tokens past the end of a sequence set to exact no-ops. K is padded to 64 or 128, V to tiles
// of 64. Tiles of 16-bit elements are stored as shared memory wants them (tile/swizzle.hpp), so
// that a copy is linear and ldmatrix meets no bank conflict.
#pragma once

#include <cstdint>

namespace kda::cuda {

struct Factors {
  void* w = nullptr;       ///< T' Kgam                     [64, Kp]        bf16 or fp16
  void* u = nullptr;       ///< T' v                        [V tiles, 64, 64]
  void* kg = nullptr;      ///< k exp(G_end - G)            [64, Kp]
  void* qg = nullptr;      ///< scale q exp(G)              [64, Kp]
  void* Aqk = nullptr;     ///< strictly lower part         [64, 64]
  void* T = nullptr;       ///< (I + N diag(beta))^-1       [64, 64]; null: not asked for
  float* gamma = nullptr;  ///< exp(G_end)                  [Kp]
  float* beta = nullptr;   ///< after its transform         [64]
  float* diag = nullptr;   ///< diagonal of Aqk             [64]
};

}  // namespace kda::cuda
