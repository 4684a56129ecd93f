// SPDX-License-Identifier: Apache-2.0
// Arguments of kernels that carry a state from chunk to chunk: chunk_delta_h, chunk_o and the fused
// forward.
#pragma once

#include "cuda/tile/arguments.hpp"
#include "cuda/tile/factors.hpp"

namespace kda::cuda {

/// Results of a launch of chunk_delta_h.
enum class ChainUse {
  kForward,  ///< both stages at once: outputs and the final state
  kScan,     ///< M and B of segments
  kStates,   ///< chunk_delta_h alone: S and vn of every chunk
  kOutputs,  ///< chunk_o alone: o from S and vn, all chunks at once
  kErrors,   ///< for the backward: S and E of every chunk; no checkpoints, no final state
  kReverse,  ///< the chain of the backward (staged/backward/reverse.hpp): no use of chunk_delta_h
};

struct ChainArgs {
  Shape shape;
  SequenceMap map;  ///< segments begin at chunk boundaries of their sequence
  Factors factors;
  RowView o;  ///< forward

  StateView initial, final_state, checkpoints;
  int64_t checkpoint_every = 0;      ///< tokens; a multiple of 64 (16 in the fused kernel)
  const float* states_in = nullptr;  ///< [spans, HV, K, V] instead of `initial`

  float* M = nullptr;       ///< scan: [spans, HV, K, K]
  float* B = nullptr;       ///< scan: [spans, HV, K, V]
  bool skip_last = false;   ///< scan: nothing follows the last segment of a sequence
  bool skip_empty = false;  ///< scan: no use of M and B of spans without tokens

  // States writes these and outputs reads them; they are swizzled like the factors. Errors writes E
  // where vn is; of both, columns past V of the last V tile too.
  void* h = nullptr;       ///< S^T at the start of each chunk, [tiles of factors, V tiles, 64, Kp]
  void* vn = nullptr;      ///< [tiles of factors, V tiles, 64, 64]
  int64_t num_chunks = 0;  ///< outputs: upper bound, over the batch

  int32_t* flags = nullptr;       ///< MetadataFlag bits, or null
  bool accumulate_flags = false;  ///< an earlier kernel of this call has set the word
};

}  // namespace kda::cuda
