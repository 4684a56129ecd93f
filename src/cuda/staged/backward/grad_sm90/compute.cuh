// SPDX-License-Identifier: Apache-2.0
// clang-format off
// chunk_grad on Hopper: the warps that compute, over all chunks of the block. Start here; the other files are
// its steps, a file a topic. docs/design/backward_hopper.md says why, chunk_grad.hpp has the formulas.
//
// Roles: 384 threads, one block an SM
//   warps 0 to 7      compute (224 registers): two warpgroups. A warp has 16 of 128 channels and all 64 tokens.
//                     K = V = 64: a value head a warpgroup
//   warps 8, 9        load (56 registers): rows by cp.async, tiles of the workspace by bulk copies (copies.cuh)
//   warps 10, 11      store: dv, dq, dk, dg, dbeta, sums, which chunks fall back (copies.cuh)
//
// Barriers: arrivals of a turn, a turn is a chunk and value head (init_barriers() in shared.cuh)
//   name              who arrives (count)           who waits        what it protects
//   numbers_full      load (64)                     compute          beta, bias and where rows of gates lie are there
//   values_full       load (64), bulk copies (1)    compute, store   gates, d_o, E, dZ, S0, dS are there
//   rows_full         load (64)                     compute          q, k are there: they come last
//   scaled            compute (256)                 store            fp16: all columns of dZ have one power of two
//   d_o_empty         compute (256)                 load             d_o was read
//   d_state_empty     compute (256)                 load             dS and E were read
//   state_empty       compute (256), store (64)     load             S0 and dZ were read; store reads dZ for dv
//   q_empty, k_empty  compute (256)                 load             raw q; raw k were read
//   out_full          compute (256), twice          store            dq, then dk, is in `out`
//   out_empty         store (64), twice             compute          `out` was stored
//   gates_done[2]     compute (256)                 store            dg is where the gates were; sums are there
//   gates_empty[2]    store (64)                    load             dg was stored: gates of the turn after next
//   bar.sync 1 (2)    compute of a value head       the same         factors, pairs, shares that warps share
//
// Shared memory (Shared in shared.cuh): one place for d_o, E, dZ, S0, dS, q, k; two for gates and numbers;
// pairs (P and R, 16-bit), out, shares of sums by warp, factors of tokens. Gates have no place where they are
// read by rows or are a number of each token (GradGates): then dg leaves by rows, or as sums of the warps.
//
// One turn, run_chunk(), in order (D(j, i): product of the decays of tokens j + 1 to i)
//   begin_pairs       P = d_o E^T by one warpgroup, -R = dZ E^T by the other (wgmma); of a pair each has both
//   begin_state       S0 d_o^T, beside:
//   find_decays       gates to log decays, summed from the start of each sub-chunk of 16 tokens; a chunk with one
//                     out of range falls back
//   find_factors      norms of q and k, beta: factors of rows and columns
//   store_pairs       pairs below the diagonal, scaled, to shared memory; dZ_j . E_j, from which dbeta is
//   multiply_states   rowsum over V of S0 dS, for dg
//   add_queries       dq_i = D(start, i) S0 d_o_i + sum_j<=i P_ij beta_j D(j, i) k_j
//   begin_state       dS E^T, beside: shares of q . dq for the norm, then dq to `out`
//   add_columns       beta_j columns_j, with beta_j in column_state and in the pairs; columns_j = D(j, end) dS E_j
//                     + sum_i>=j P_ij D(j, i) scale q_i + sum_i>j R_ij D(j, i) k_i
//   begin_state       S0 dZ^T
//   add_keys          dk_j = -D(start, j) S0 dZ_j + sum_i<j R_ji beta_i D(i, j) k_i + beta_j columns_j
//   store_output      back through the norm of k, dk to `out`
//   store_gates       dg_j = sum of dG_i over i >= j + what all tokens of the chunk share, through the gate
// clang-format on
#pragma once

#include "cuda/staged/backward/grad_sm90/gates.cuh"
#include "cuda/staged/backward/grad_sm90/level.cuh"
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
  RawGates<C::kGates> gates;
  wait_full(s.numbers_full, c.turn);
  begin_gates(c, gates);
  wait_full(s.values_full, c.turn);
  if constexpr (C::kWide) level_operands(c);
  ptx::fence_async_proxy();  // d_o was not copied by it
  ptx::wgmma_fence();
  if constexpr (kPair)
    begin_pairs(c, s.d_o, pairs), begin_pairs(c, s.dz, by_dz);
  else
    begin_pairs(c, c.group() == 0 ? s.d_o : s.dz, pairs);
  ptx::wgmma_commit();
  begin_state(c, s.state, s.d_o, queries);
  find_decays<kMode>(c, gates, d);
  wait_full(s.rows_full, c.turn);
  find_factors(c);
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

  float2 states = multiply_states(c);
  if constexpr (C::kWide) {
    const float back = c.back(kOfState) * c.back(kOfDState);
    states.x *= back, states.y *= back;
  }
  c.template fence<Fence::kBeforeQueries>();
  ptx::wgmma_wait<0>();
  ptx::fence_operands(queries);
  ptx::mbarrier_arrive(s.d_o_empty);
  c.scale_tokens(factors.q_state, queries);
  Columns<C> columns;
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
  float2 boundary = boundary_of_columns<kSeveral>(c, d, columns, dk, &over_chunk);
  c.sync();
  store_output(c, 0, q, s.along_q[c.head()], queries);
  ptx::rename_registers(d.row, c.a.zero);
  if (kSeveral) columns.rename(c);
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
  begin_gates(c, gates);
  store_shares(c, 1, k, dk, s.shares[1]);
  c.sync();
  add_shares(c, s.shares[1], factors.k_along, s.along_k[c.head()]);
  c.sync();
  store_output(c, 1, k, s.along_k[c.head()], dk);
  ptx::mbarrier_arrive(s.k_empty);
  store_gates<kMode>(c, gates, dG, boundary);
}

template <GateMode kMode, Heads kHeads, GradGates kGates, class T>
__device__ __forceinline__ void run_compute(const Args& a, SharedOf<kHeads, kGates, T>& s) {
  ComputeContext<kCountOf<kHeads>, kGates, T> c(a, s);
  const unsigned tasks = existing_tasks<kHeads>(a);
#pragma unroll 1
  for (Turns<kHeads> turns(a); turns.task < tasks; turns.advance(a)) {
    c.turn = turns.count;
    c.has_earlier = turns.has_earlier(), c.has_later = turns.has_later(a);
    run_chunk<kMode>(c);
  }
}

}  // namespace kda::cuda::sm90::grad
