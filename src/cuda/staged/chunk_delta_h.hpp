// SPDX-License-Identifier: Apache-2.0
// Stages chunk_delta_h and chunk_o: the serial part, chunk by chunk, with the state in registers.
//   E = u - w S;  vn = beta E;  o = qg S + Aqk vn + diag vn;  S = Diag(gamma) S + kg^T vn
// One kernel, four uses: forward (both stages at once), scan (M and B of segments), states
// (chunk_delta_h alone: S and vn of every chunk) and outputs (chunk_o alone: o from S and vn, all
// chunks at once).
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"
#include "cuda/tile/factors.hpp"

namespace kda::cuda {

enum class ChainUse { kForward, kScan, kStates, kOutputs };

struct ChainArgs {
  Shape shape;
  SequenceMap map;  ///< segments begin at chunk boundaries of their sequence
  Factors factors;
  RowView o;  ///< forward

  StateView initial, final_state, checkpoints;
  int64_t checkpoint_every = 0;      ///< multiple of 64
  const float* states_in = nullptr;  ///< [spans, HV, K, V] instead of `initial`

  float* M = nullptr;      ///< scan: [spans, HV, K, K]
  float* B = nullptr;      ///< scan: [spans, HV, K, V]
  bool skip_last = false;  ///< scan: nothing follows the last segment of a sequence

  // Of states (written) and outputs (read), swizzled like the factors.
  void* h = nullptr;       ///< S^T at the start of each chunk, [tiles of factors, V tiles, 64, Kp]
  void* vn = nullptr;      ///< [tiles of factors, V tiles, 64, 64]
  int64_t num_chunks = 0;  ///< outputs: of the batch, at most

  int32_t* flags = nullptr;
  bool accumulate_flags = false;
};

/// `narrow`: tiles of 32 columns of V instead of 64, for few heads.
Status launch_chunk_delta_h(const ChainArgs& args, ChainUse use, bool half, bool narrow,
                            const Launch& launch);

}  // namespace kda::cuda
