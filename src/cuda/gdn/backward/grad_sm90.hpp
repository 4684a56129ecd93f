// SPDX-License-Identifier: Apache-2.0
// Gradients of a chunk of Gated DeltaNet, all chunks at once, from S0, E, dS, dZ and d_o. With D
// and the factors of tokens as in gdn/factors.hpp, P = d_o E^T, R = dZ E^T, raw q and k:
//   p_ij  = m_i n_j D_ij P_ij;  r_ij = -n_i n_j D_ij R_ij
//   dq'_i = row_q_i S0 d_o_i + sum_{j<=i} p_ij beta_j k_j
//   dk'_j = col_k_j dS E_j - row_k_j S0 dZ_j + sum_{i>=j} p_ij beta_j q_i
//           + sum_{i>j} r_ij beta_j k_i + sum_{i<j} r_ji beta_i k_i
//   dq    = dq' - q (q . dq') / |q|^2, and dk likewise; without the norm dq', dk'
//   dg_t  = exp(G_end) <S0, dS> + sum_{i>=t} a_i + sum_{j<t} b_j + sum_{j<t<=i} beta_j M_ij
//   dbeta_j = dZ_j . E_j / beta_j, or for plain steps near 0, which is the same,
//             b_j / beta_j + sum_{i>j} M_ij + p_jj q_j . k_j
// with a_i  = q_i . row_q_i S0 d_o_i - k_i . row_k_i S0 dZ_i,  b_j = k_j . col_k_j dS E_j
//      M_ij = p_ij q_i . k_j + r_ij k_i . k_j
// No sum of dg is the difference of two others.
// dq and dk are sums over the value heads of a q/k head.
#pragma once

#include "cuda/gdn/factors.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::gdn {

struct GradArgs {
  Shape shape;  ///< K <= 128
  SequenceMap map;
  int64_t num_chunks = 0;  ///< upper bound, over the batch
  Divisor q_heads;         ///< H
  GateView gate;
  RowView d_o;        ///< bf16, rows aligned to 16 bytes; no base: zero
  RowView dq, dk;     ///< the same; no base: not wanted
  RowView dg, dbeta;  ///< of any type; no base: not wanted
  Factors made;       ///< its tiles of q and k, and numbers
  const BackwardNumbers* numbers = nullptr;

  // The chains leave these, as in ChainArgs.
  const void* h = nullptr;       ///< S0^T
  const void* errors = nullptr;  ///< E
  const void* dh = nullptr;      ///< dS^T behind the chunk
  const void* dz = nullptr;      ///< dZ

  double* sums = nullptr;  ///< [tiles, 2]: ddt_bias and dA_log of a chunk; null: not wanted
};

Status launch_chunk_grad(const HeadGates<GradArgs>& args, int64_t num_sms, const Launch& launch);

}  // namespace kda::cuda::gdn
