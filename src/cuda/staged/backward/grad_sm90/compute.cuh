// SPDX-License-Identifier: Apache-2.0
// The warps that compute: all chunks of the block.
#pragma once

#include "cuda/staged/backward/grad_sm90/gates.cuh"
#include "cuda/staged/backward/grad_sm90/outputs.cuh"
#include "cuda/staged/backward/grad_sm90/pairs.cuh"
#include "cuda/staged/backward/grad_sm90/products.cuh"
#include "cuda/staged/backward/grad_sm90/sums.cuh"

namespace kda::cuda::sm90::grad {

template <GateMode kMode, class C>
__device__ __forceinline__ void run_chunk(const C& c) {
  constexpr bool kPair = C::kHeads == 2, kSeveral = kSeveralAnchors<kMode>;
  auto& s = c.s;
  const Factors& factors = c.factors();
  const uint32_t q = c.channels_of(s.q), k = c.channels_of(s.k);
  Tokens pairs, by_dz, queries, dG;  // by_dz: of a pair
  Decays d;
  wait_full(s.rows_full, c.turn);
  wait_full(s.values_full, c.turn);
  ptx::fence_async_proxy();  // d_o was not copied by it
  ptx::wgmma_fence();
  if constexpr (kPair)
    begin_pairs(c, s.d_o, pairs), begin_pairs(c, s.dz, by_dz);
  else
    begin_pairs(c, c.group() == 0 ? s.d_o : s.dz, pairs);
  ptx::wgmma_commit();
  begin_state(c, s.state, s.d_o, queries);
  find_factors(c);
  find_decays<kMode>(c, d);
  c.sync();
  c.template fence<Fence::kBeforePairs>();
  ptx::wgmma_wait<1>();
  ptx::fence_operands(pairs);
  if constexpr (kPair) {
    ptx::fence_operands(by_dz);
    store_pairs(c, false, pairs), store_pairs(c, true, by_dz);
  } else {
    store_pairs(c, c.group() == 1, pairs);
  }
  c.sync();

  const float2 states = multiply_states(c);
  c.template fence<Fence::kBeforeQueries>();
  ptx::wgmma_wait<0>();
  ptx::fence_operands(queries);
  ptx::mbarrier_arrive(s.d_o_empty);
  c.scale_tokens(factors.q_state, queries);
  Columns columns;
  add_queries<kSeveral>(c, d, queries, columns, dG);

  Tokens dk;
  ptx::wgmma_fence();
  begin_state(c, s.d_state, s.errors, dk);
  ptx::rename_registers(d.row, c.a.zero);
  add_earlier_heads(c, 0, queries);
  store_shares(c, 0, q, queries, s.shares[0]);
  c.sync();
  add_shares(c, s.shares[0], factors.q_along, s.along_q[c.head()]);
  ptx::wgmma_wait<0>();
  ptx::fence_operands(dk);
  ptx::mbarrier_arrive(s.d_state_empty);
  c.scale_tokens(factors.column_state, dk);
  float2 over_chunk;
  float2 boundary = boundary_of_columns<kSeveral>(d, columns, dk, &over_chunk);
  c.sync();
  store_output(c, 0, q, s.along_q[c.head()], queries);
  ptx::rename_registers(d.row, c.a.zero);
  if (kSeveral) ptx::rename_registers(reinterpret_cast<float(&)[kSubchunks][4]>(columns), c.a.zero);
  add_columns<kSeveral>(c, d, columns, dk, dG);

  Tokens keys;
  ptx::wgmma_fence();
  begin_state(c, s.state, s.dz, keys);
  boundary.x = fmaf(over_chunk.x, states.x, sum_over(boundary.x, 1, 4));
  boundary.y = fmaf(over_chunk.y, states.y, sum_over(boundary.y, 1, 4));
  add_earlier_heads(c, 1, dk);
  ptx::rename_registers(d.row, c.a.zero);
  ptx::wgmma_wait<0>();
  ptx::fence_operands(keys);
  ptx::mbarrier_arrive(s.state_empty);
  ptx::mbarrier_arrive(s.q_empty);
  c.scale_tokens(factors.minus_k_state, keys);
  add_keys<kSeveral>(c, d, columns, keys, dk, dG);
  store_shares(c, 1, k, dk, s.shares[1]);
  c.sync();
  add_shares(c, s.shares[1], factors.k_along, s.along_k[c.head()]);
  c.sync();
  store_output(c, 1, k, s.along_k[c.head()], dk);
  ptx::mbarrier_arrive(s.k_empty);
  store_gates<kMode>(c, dG, boundary);
}

template <GateMode kMode, Heads kHeads>
__device__ __forceinline__ void run_compute(const FinishedGradArgs& a,
                                            Shared<kCountOf<kHeads>>& s) {
  ComputeContext<kCountOf<kHeads>> c(a, s);
  const unsigned tasks = existing_tasks<kHeads>(a);
#pragma unroll 1
  for (Turns<kHeads> turns(a); turns.task < tasks; turns.advance(a)) {
    c.turn = turns.count;
    c.has_earlier = turns.has_earlier(), c.has_later = turns.has_later(a);
    run_chunk<kMode>(c);
  }
}

}  // namespace kda::cuda::sm90::grad
