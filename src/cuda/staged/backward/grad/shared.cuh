// SPDX-License-Identifier: Apache-2.0
// Shared memory of chunk_grad.
#pragma once

#include <cuda_bf16.h>

#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::grad {

constexpr int kChannels = 64;  // of a round; a warp has 16 of them and all tokens
constexpr int kMostRounds = kMaxStagedK / kChannels;
constexpr int kWarps = kChannels / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSubchunk = 16;
constexpr int kSubchunks = kChunk / kSubchunk;
constexpr int kTokenTiles = kChunk / 8;  // n8 tiles of tokens

/// 64 rows of 64 elements, swizzled (tile/swizzle.hpp).
using Tile = __nv_bfloat16[64 * 64];

struct Shared {
  Tile stages[2][3];  // of the pipeline (pipeline.cuh)
  Tile q, k;          // raw, the channels of a round
  Tile P, R;          // P_ij r_i r'_j (j < i) and R_ij r'_i r'_j, r and r' the norms' factors
  float q_norm[kChunk], k_norm[kChunk];  // r, r': 1 / |q|, 1 / |k|, or 1
  float q_size[kChunk], k_size[kChunk];  // 1 / r, 1 / r'
  float beta[kChunk];
  float diagonal[kChunk];                      // P_jj
  float products[kChunk];                      // dZ_j . E_j
  float shares[kMostRounds * kWarps][kChunk];  // k_j . columns_j of 16 channels
};

}  // namespace kda::cuda::grad
