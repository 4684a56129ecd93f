// SPDX-License-Identifier: Apache-2.0
// Stage "chunk_intra": everything of a chunk of C = 64 tokens that needs no state. q, k, beta and
// the log decay g are taken after norms and transforms; a_t = exp(g_t); i, j are tokens of the
// chunk.
//   gamma_i = prod_{t<=i} a_t                              [C, K], per channel
//   N_ij   = k_i . (k_j prod_{j<t<=i} a_t),  j < i         [C, C]
//   Aqk_ij = scale q_i . (k_j prod_{j<t<=i} a_t),  j <= i  [C, C]; its diagonal is `diag`
//   T' = (I + N diag(beta))^-1                             [C, C], unit lower triangular; `T`
//   w  = T' (k gamma),  u = T' v                           [C, K], [C, V]
//   kg_i = k_i prod_{t>i} a_t,  qg_i = scale q_i gamma_i   [C, K]
//   gamma = gamma_{C-1}                                    [K], what is left of a state
// Tokens past the end of a sequence are exact no-ops. Shapes and types: stage/buffers.hpp.
#pragma once

#include "kda/stages.hpp"
#include "stage/call.hpp"

namespace kda::stage {

/// Writes w, u, Aqk, gamma, beta, diag and, where they are not null, kg, qg, T.
struct ChunkIntra {
  Call call;
  const StageTensors& buffers;
};

}  // namespace kda::stage
