// SPDX-License-Identifier: Apache-2.0
// Factors of a chunk of Gated DeltaNet, as its first kernel hands them on through the workspace
// (docs/design/gdn.md). One tile a (chunk of the batch, value head), index chunk * HV + head; of q
// and k one a (chunk, q/k head), index chunk * H + head.
//
// G_i is the sum of gates from the start of the chunk to token i, n_i and m_i are the factors that
// normalise k_i and q_i (m_i with the scale of the outputs), beta_i is the step size.
#pragma once

#include "cuda/tile/chunk.hpp"

namespace kda::cuda::gdn {

inline constexpr int kMostK = 128;  ///< of the kernels; V is cut into blocks, and may be any size

/// Columns of the tiles of q and k.
inline constexpr int padded_k(int K) { return K <= 64 ? 64 : kMostK; }

/// Numbers of tokens. Past the end of a sequence beta is 0, and rows of k are zeros.
struct Numbers {
  float row_k[kChunk];  ///< exp(G_i) n_i
  float row_q[kChunk];  ///< exp(G_i) m_i
  float col_k[kChunk];  ///< exp(G_end - G_i) n_i beta_i
  float diag[kChunk];   ///< m_i n_i q_i . k_i beta_i
  float last;           ///< exp(G_end)
  // The log2 of a bound of |M|, the map of the chunk's start state: G_end / ln 2, and the sums of
  // log2 max(1, |1 - beta |k|^2|) over the first and the last 32 tokens.
  float log2_decay, log2_growth[2];
};
static_assert(sizeof(Numbers) % 16 == 0);

/// More numbers of tokens, for chunk_grad; zeros past the end of a sequence, but
/// for sums of gates, which stay as they are. The sum of log2 decays to a token is `whole` +
/// `part`.
struct alignas(16) BackwardNumbers {
  float whole[kChunk], part[kChunk];
  float beta[kChunk];
  float q_norm[kChunk], k_norm[kChunk];     ///< m_i, n_i
  float by_gate[kChunk], by_A_log[kChunk];  ///< derivatives of the log decay
  float by_beta[kChunk];  ///< what makes dZ . E the gradient of the raw step; 0 for plain steps
                          ///< near 0, which need another sum
};

/// Squares are strictly lower, 16-bit, swizzled (tile/swizzle.hpp), with zeros elsewhere.
inline constexpr int kSquare = kChunk * kChunk;
struct Factors {
  void *q = nullptr, *k = nullptr;  ///< rows as they are, [tiles, 64, padded_k(K)], swizzled; zeros
                                    ///< past K and past the end of a sequence
  void* inverse = nullptr;  ///< T' - I, [tiles, 64, 64]; T' = (I + low(D o K K^T) diag(beta))^-1
  void* scores = nullptr;   ///< low(D o Q K^T) diag(beta), [tiles, 64, 64]; D_ij = exp(G_i - G_j)
  Numbers* numbers = nullptr;  ///< [tiles]
};

}  // namespace kda::cuda::gdn
