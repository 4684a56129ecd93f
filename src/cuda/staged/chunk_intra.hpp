// SPDX-License-Identifier: Apache-2.0
// Stage chunk_intra with the tensor cores: everything of a chunk that needs no state, from the raw
// inputs (gates, norms, scores, inverse, w, u) in one pass. Exact for every gate and causal to the
// bit: blocks of scores by dyadic midpoints, those on the diagonal anchored at their start where
// bf16 has the range (docs/algorithm.md).
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"
#include "cuda/tile/factors.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda {

struct ChunkIntraArgs {
  Shape shape;  ///< K <= 128
  SequenceMap map;
  int64_t num_chunks = 0;  ///< upper bound, over the batch
  RowView q, k, v, g, beta;
  GateView gate;
  Factors factors;
};

/// `half`: q, k, v and the factors are fp16, else bf16. `tokens`: diagonal blocks of 16 tokens pair
/// by pair in fp32 (IntraForm::kToken), else on the tensor cores. factors.qg and factors.kg may be
/// null.
Status launch_chunk_intra(const HeadGates<ChunkIntraArgs>& args, bool half, bool tokens,
                          const Launch& launch);

/// Stage recompute_w_u: w, u (and qg, kg) again from the inputs and a stored factors.T; nothing
/// else is written. What the backward pass needs instead of four stored tensors.
Status launch_recompute_w_u(const HeadGates<ChunkIntraArgs>& args, bool half, const Launch& launch);

}  // namespace kda::cuda
