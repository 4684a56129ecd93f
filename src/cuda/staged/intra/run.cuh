// SPDX-License-Identifier: Apache-2.0
// chunk_intra as a sequence of steps. A block of 2 K threads computes one chunk of one value head,
// a thread two channels of one sub-chunk of 16 tokens. In brackets: what shared memory then holds.
//   1. load q, k and gates; compute decays by running products, norms by mma [raw q and k]
//   2. scan the decays of the four sub-chunks [per sub-chunk: its decay, the decay before it,
//      the decay after it]
//   3. operands of the scores: anchored rows in place of the raw ones, columns beside them;
//      operands of levels 16 and 32 [rows, operands]
//   4. multiply them: the scores Aqk and L [matrices Aqk and L in place of the operands]
//   5. for sub-chunks out of range: levels 8, 4, 2, 1
//   6. decayed rows k gamma, and the results kg and qg; load v in place of q [k gamma, v]
//   7. the inverse: blocks of 16, then 32, then 64 [T']
//   8. w = T' (k gamma), u = T' v; store them through shared memory in whole lines
#pragma once

#include "cuda/staged/intra/blocks.cuh"
#include "cuda/staged/intra/context.cuh"
#include "cuda/staged/intra/fine.cuh"
#include "cuda/staged/intra/inputs.cuh"
#include "cuda/staged/intra/inverse.cuh"
#include "cuda/staged/intra/scores.cuh"
#include "cuda/staged/intra/solve.cuh"
#include "cuda/staged/intra/tokens.cuh"

namespace kda::cuda::intra {

template <bool kTokens, class C>
__device__ void run_intra(C& c) {
  const ChunkIntraArgs& a = c.a;
  constexpr bool kDiagonal = C::kAnchored && !kTokens;
  load_inputs<true>(c);
  const bool grows = !C::kMakesU && has_growth(c);
  keep_pairs(c);
  find_norms<true>(c);
  scan_totals(c);
  __syncthreads();  // decayed rows take the place of raw ones
  block_operands<kDiagonal>(c);
  __syncthreads();
  c.forget_index();
  Accumulators<C> scores;
  block_products<kDiagonal>(c, scores);
  __syncthreads();  // operands give way to decays or squares
  if constexpr (kTokens) {
    token_operands(c);
    __syncthreads();
    token_products(c, scores);
    __syncthreads();
    store_tokens(c, scores);
  }
  store_scalars(c);
  store_blocks<kDiagonal>(c, scores);
  if constexpr (!kTokens) fine_levels(c);
  c.forget_index();
  decayed_rows<true>(c);
  __syncthreads();
  c.forget_index();
  if constexpr (C::kMakesU) load_rows(c, c.s.q, a.v, c.head, 0, a.shape.V);
  invert_pairs(c);
  if (C::kWarps == 4 || c.warp() >= 4) copy_square<128, true>(c, a.factors.Aqk, c.tid % 128);
  __syncthreads();
  invert_halves(c);
  ptx::cp_async_wait<0>();
  __syncthreads();
  if constexpr (C::kMakesU)
    solve<false>(c, c.s.q);
  else
    solve_w(c, grows);
  if (a.factors.T) copy_square<C::kThreads, false>(c, a.factors.T, c.tid);
}

}  // namespace kda::cuda::intra
