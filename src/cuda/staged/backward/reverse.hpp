// SPDX-License-Identifier: Apache-2.0
// Stage chunk_reverse: the chain of a backward pass, from the last chunk of a sequence to the
// first, with dS, the gradient of the state behind a chunk, in registers. With the factors of
// chunk_intra and X = diag(beta) dVn, where dVn is dv_new before the substitution:
//   dVn = kg dS + Aqk^T d_o + diag d_o            [C, V]
//   dZ  = T'^T X                                  [C, V]; it is dv
//   dS  = Diag(gamma) dS + qg^T d_o - w^T X       [K, V]
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"
#include "cuda/tile/factors.hpp"

namespace kda::cuda {

struct ReverseArgs {
  Shape shape;  ///< K <= 128
  SequenceMap map;
  Factors factors;  ///< all but u; T is needed

  RowView d_o;        ///< bf16, rows at multiples of 16 bytes; no base: zero
  StateView d_final;  ///< [N, HV, K, V] fp32 or bf16, slot: sequence; no base: zero
  RowView dv;         ///< bf16, fp16 or fp32; no base: not wanted
  /// [N, HV, K, V] fp32 or bf16, slot: sequence; no base: not wanted. A sequence without an initial
  /// state gets zero.
  StateView d_initial;
  StateView initial;  ///< of the forward: which sequences have one

  // Workspace, bf16, swizzled like the factors; index of a tile: chunk of the batch * HV + head. On
  // Hopper both may be null: not wanted.
  void* dh = nullptr;  ///< dS^T behind each chunk, [tiles, V tiles, 64, Kp]
  void* dz = nullptr;  ///< dZ, [tiles, V tiles, 64 tokens, 64]
};

/// For bf16 factors. `narrow`: a block has 32 columns of V instead of 64, for few heads.
Status launch_chunk_reverse(const ReverseArgs& args, bool narrow, const Launch& launch);

}  // namespace kda::cuda
