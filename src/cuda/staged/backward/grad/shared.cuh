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
  Tile stages[2][3];                           // of the pipeline (pipeline.cuh)
  Tile q, k;                                   // raw, the channels of a round
  Tile P, R;                                   // below the diagonal
  float q_factor[kChunk], k_factor[kChunk];    // scale / |q| and 1 / |k|, or scale and 1
  float beta[kChunk], beta_k_factor[kChunk];   // and its product with k_factor
  float diagonal[kChunk];                      // P_jj
  float products[kChunk];                      // dZ_j . E_j
  float shares[kMostRounds * kWarps][kChunk];  // k_j . columns_j of 16 channels
  int any_small;                               // whether these are needed
};

}  // namespace kda::cuda::grad
