// SPDX-License-Identifier: Apache-2.0
// Shared memory of chunk_intra and recompute_w_u.
#pragma once

#include <cstddef>

#include "cuda/staged/chunk_intra.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::intra {

constexpr int kSubchunk = 16;  // tokens of a sub-chunk: a thread has one, of two channels
constexpr int kSubchunks = kChunk / kSubchunk;
constexpr int kBlock = 16;                 // diagonal block of the inverse
constexpr int kScoreStride = kChunk + 4;   // of L and T', fp32
constexpr int kSquareStride = kChunk + 8;  // of Aqk and T', 16 bit

/// Operands of blocks of scores that do not lie in place of q and k.
template <class T, int kStride>
struct BlockOperands {
  T diagonal[kChunk][kStride];        // columns of each sub-chunk for its own rows
  T level16[2 * kSubchunk][kStride];  // columns of the first and the third sub-chunk
  T level32[2 * kSubchunk][kStride];  // columns of the first two sub-chunks
  T far_q[kSubchunk][kStride],
      far_k[kSubchunk][kStride];  // rows of the fourth sub-chunk, decayed over the third
};

/// Scores and what becomes of them.
template <class T, int kStride>
struct Squares {  // T: of the factors
  union {
    float N[kChunk][kScoreStride];  // L = N diag(beta), then T' in place, but for its last quarter
    T v[kChunk][kStride];           // recompute: a tile of v
  };
  T inverse[kChunk][kSquareStride];  // T' in 16 bits
  T Aqk[kChunk][kSquareStride];      // not of recompute
};

/// Shared memory of one chunk and head: two of them on an SM (three of recompute_w_u) hide each
/// other's barriers. Rows are padded by 16 bytes against bank conflicts.
template <class T, int kK, class F = T>
struct Shared {
  static constexpr int kStride = kK + 8;
  T q[kChunk][kStride];                // raw; then decayed rows; later a tile of v
  T k[kChunk][kStride];                // raw; then decayed rows; later Kgam
  float totals[kSubchunks][kK];        // decay over each sub-chunk
  float decay_before[kSubchunks][kK];  // over all sub-chunks before it
  float decay_after[kSubchunks][kK];   // over all sub-chunks after it
  alignas(16) float q_norm[kChunk], k_norm[kChunk];
  float k_beta[kChunk], beta[kChunk], diag[kChunk];
  /// Rows of each sub-chunk that the anchored form has right, where not all.
  alignas(16) int anchored[kSubchunks];
  union {
    BlockOperands<T, kStride> blocks;
    float decay[kChunk][kK];  // token form: of each token
    Squares<F, kStride> after;
  };

  static constexpr std::size_t bytes(bool scores) {
    using S = Squares<F, kStride>;
    return scores ? sizeof(Shared) : offsetof(Shared, after) + offsetof(S, Aqk);
  }
};

}  // namespace kda::cuda::intra
