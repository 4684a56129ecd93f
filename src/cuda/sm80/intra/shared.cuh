// SPDX-License-Identifier: Apache-2.0
// Shared memory of chunk_intra and recompute_w_u.
#pragma once

#include "cuda/sm80/chunk_intra.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::intra {

constexpr int kRun = 16;  // tokens of a thread
constexpr int kRuns = kChunk / kRun;
constexpr int kBlock = 16;                 // diagonal block of the inverse
constexpr int kScoreStride = kChunk + 4;   // of L and T', fp32
constexpr int kSquareStride = kChunk + 8;  // of Aqk and T', 16 bit

/// Operands of one dyadic level: decayed q and k rows, and the k columns that they meet.
template <class T, int kStride>
struct Level {
  T rows[64][kStride];
  T columns[32][kStride];
};

/// Shared memory of one chunk and head: two of them on an SM (three of recompute_w_u) hide each
/// other's barriers. Rows are padded by 16 bytes against bank conflicts.
template <class T, int kK>
struct Shared {
  static constexpr int kStride = kK + 8;
  T q[kChunk][kStride];  // raw; later a tile of v
  T k[kChunk][kStride];  // raw; later Kgam
  union {
    Level<T, kStride> level;
    float decay[kChunk][kK];  // token form: of each token
    struct {
      union {
        float N[kChunk][kScoreStride];  // L = N diag(beta), then T' in place
        T v[kChunk][kStride];           // recompute: a tile of v
      };
      T A[kChunk][kSquareStride];  // Aqk, then T' in 16 bits
    } after;
  };
  float totals[kRuns][kK];        // decay over each run
  float decay_before[kRuns][kK];  // over all runs before it
  float decay_after[kRuns][kK];   // over all runs after it
  alignas(16) float q_norm[kChunk], k_norm[kChunk];
  float k_beta[kChunk], beta[kChunk], diag[kChunk];
};

}  // namespace kda::cuda::intra
