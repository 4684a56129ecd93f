// SPDX-License-Identifier: Apache-2.0
// Stage chunk_grad: from S0, dS, E, dZ and d_o of a chunk of 64 tokens and a value head, the
// gradients by its scaled queries, its normalised keys, its log decays and its transformed betas.
// All chunks at once. With D(j, i) the product of a channel's decays of tokens j + 1 to i, Gamma
// that of the chunk, and P and R without beta:
//   P = d_o E^T (j <= i),  R = -dZ E^T (j < i)
//   dq_i = D(start, i) S0 d_o_i                        + sum_j<=i P_ij beta_j D(j, i) k_j
//   rows_i = -D(start, i) S0 dZ_i                      + sum_j<i  R_ij beta_j D(j, i) k_j
//   columns_j = D(j, end) dS E_j + sum_i>=j P_ij D(j, i) scale q_i + sum_i>j R_ij D(j, i) k_i
//   dk_j = rows_j + beta_j columns_j
//   dbeta_j = dZ_j . E_j / beta_j, or k_j . columns_j, which is the same, where beta_j is small
//   dg_j = sum of dG_i over i >= j of the chunk + Gamma rowsum_V(S0 dS) + what dS E adds up to
//          (dG and the last term: grad/sums.cuh)
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda {

struct ChunkGradArgs {
  Shape shape;  ///< K <= 128
  SequenceMap map;
  int64_t num_chunks = 0;  ///< upper bound, over the batch
  RowView q, k, g, beta;   ///< of the forward, raw
  GateView gate;
  RowView d_o;  ///< bf16, rows at multiples of 16 bytes; no base: zero

  // bf16, swizzled like the factors (tile/factors.hpp); index of a tile: chunk of the batch * HV +
  // head. Rows of tokens past the end of a sequence are zero.
  const void* h = nullptr;       ///< S0^T before each chunk, [tiles, V tiles, 64, Kp]
  const void* dh = nullptr;      ///< dS^T behind each chunk, the same
  const void* errors = nullptr;  ///< E, [tiles, V tiles, 64 tokens, 64]
  const void* dz = nullptr;      ///< dZ, the same

  /// [token of the batch, HV, backward_row(Kp)]: gradients by scale q / |q| (without the scale), by
  /// k / |k|, by the log decay, Kp floats each, and one of beta after its transform.
  float* rows = nullptr;
};

/// Words that chunk_grad_sm90.hpp keeps of each chunk and value head beside the rows.
inline constexpr int kFallbackWords = 2;

/// For bf16 q, k.
Status launch_chunk_grad(const HeadGates<ChunkGradArgs>& args, const Launch& launch);

}  // namespace kda::cuda
