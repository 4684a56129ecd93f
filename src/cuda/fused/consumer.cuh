// SPDX-License-Identifier: Apache-2.0
// The loop of the consumer warpgroup, from top to bottom. It holds S^T of 64 columns of V and goes
// from sub-chunk to sub-chunk. This is the serial part: what it waits for, everything waits for.
#pragma once

#include "cuda/fused/consumer_steps.cuh"
#include "cuda/ptx/wgmma_small.cuh"

namespace kda::cuda::sm90::fused {

/// pq [V, 32] = S^T rows^T, S^T rounded. Begins the product only.
template <class C>
__device__ __forceinline__ void multiply_rows(const C& c, uint64_t rows, float (&pq)[4][4]) {
  using Operand = typename C::Operand;
  uint32_t rounded[C::kSteps][4];
#pragma unroll
  for (int i = 0; i < C::kSteps; ++i)
    chain::round_pairs<Operand>(c.state[2 * i], c.state[2 * i + 1], rounded[i]);
  ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
  ptx::wgmma_fence();
  ptx::wgmma_n32_k_major<Operand, false>(pq, rounded[0], rows);
#pragma unroll
  for (int i = 1; i < C::kSteps; ++i)
    ptx::wgmma_n32_k_major<Operand, true>(pq, rounded[i],
                                          ptx::next_columns<2 * kSubchunk>(rows, i * 16));
  ptx::wgmma_commit();
}
// ---- a sub-chunk

/// Conditions of compiler_fence(). None is ever true, and each asks for another count that
/// sub-chunks never have: else the compiler drops all fences but the first. They are votes: where
/// lanes could differ, descriptors would leave uniform registers.
struct CompilerFences {
  enum Impossible : int {
    kAfterProducts = -1,
    kAfterWait = -2,
    kAfterErrors = -3,
    kAfterOutputs = -5,
    kAfterUpdate = -6
  };
  bool after_products, after_wait, after_errors, after_outputs, after_update;
  __device__ __forceinline__ explicit CompilerFences(int subchunks)
      : after_products(__any_sync(0xffffffff, subchunks == kAfterProducts)),
        after_wait(__any_sync(0xffffffff, subchunks == kAfterWait)),
        after_errors(__any_sync(0xffffffff, subchunks == kAfterErrors)),
        after_outputs(__any_sync(0xffffffff, subchunks == kAfterOutputs)),
        after_update(__any_sync(0xffffffff, subchunks == kAfterUpdate)) {}
};

/// Consumes a stage. `at`: its tiles; `factors`: its other factors; `values`: v, then o in its
/// place. P and Q are the products of rows, pq: times kAnchor, which k_norm and q_norm take back.
///   E = T' (v - k_norm P);  vn = k_beta E;  o = q_norm (Q + Aqk vn + diag vn);
///   S = Diag(gamma) S + kg^T vn
/// Four warps load at the same time: what loads while the rows are multiplied is no more than the
/// products take, the rest comes where warps wait for something else. Returns false, in fp16, if
/// there is no headroom for another sub-chunk, or v is large.
template <class C>
__device__ __forceinline__ bool consume_subchunk(C& c, Outputs outputs,
                                                 const CompilerFences& fences, uint32_t at,
                                                 uint32_t factors, uint32_t values,
                                                 uint32_t (&v)[4], float (&pq)[4][4]) {
  using Operand = typename C::Operand;
  using Tiles = fused::Tiles<C::kK>;
  using Factors = fused::Factors<C::kK>;
  const uint32_t piece = piece_of(c, values);
  uint32_t inverse[4], Aqk[4];
  ptx::ldmatrix_x4_trans(v, piece);
  load_square(c, factors + offsetof(Factors, inverse), inverse);
  const TokenFactors k_norm(factors + offsetof(Factors, k_norm), c.lane);

  if constexpr (kFp16<Operand>) scale_in_place(c, v);
  float error[2][4];
  multiply_rows(c, ptx::tile_descriptor<2 * kSubchunk>(at + offsetof(Tiles, rows)), pq);
  if constexpr (C::kKeeps)
    if (c.begins_chunk()) keep_state(c, piece);  // while products run
  ptx::compiler_fence(fences.after_products);
  float4 gamma[C::kTiles / 2];
  load_gammas<0>(c, factors, gamma);
  load_square(c, factors + offsetof(Factors, Aqk), Aqk);
  const TokenFactors k_beta(factors + offsetof(Factors, k_beta), c.lane);

  ptx::wgmma_wait<0>();
  ptx::fence_operands(pq);
  ptx::compiler_fence(fences.after_wait);
  load_gammas<1>(c, factors, gamma);
  const TokenFactors q_norm(factors + offsetof(Factors, q_norm), c.lane),
      diag(factors + offsetof(Factors, diag), c.lane);
  subtract(c, v, pq, k_norm, error);
  uint32_t z[4], vn[4];
  [[maybe_unused]] uint32_t low[4];  // in bf16: what vn lacks; the state takes both parts
  round_errors<Operand>(error, z);
  add_product<Operand>(error, z, inverse);  // T' - I: `error` is there already
  [[maybe_unused]] uint32_t kept[4];
  if constexpr (C::kKeeps) round_kept(c, error, kept);
  ptx::compiler_fence(fences.after_errors);
  decay_state(c, gamma);
  multiply(error, k_beta);
  round_errors<Operand>(error, vn);
  add_product<Operand>(&pq[2], vn, Aqk);  // before products that keep the tensor cores busy
  ptx::compiler_fence(fences.after_outputs);
  if constexpr (!kFp16<Operand>)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* exact = error[i / 2] + i % 2 * 2;
      const float2 kept = ptx::unpack<Operand>(vn[i]);
      low[i] = ptx::pack<Operand>(exact[0] - kept.x, exact[1] - kept.y);
    }
  ptx::fence_operands(c.state);
  ptx::wgmma_fence();
  const uint64_t kg = ptx::tile_descriptor<kSubchunk>(at + offsetof(Tiles, kg));
  ptx::wgmma_16_mn_major<Operand>(c.state, vn, kg);
  if constexpr (!kFp16<Operand>) ptx::wgmma_16_mn_major<Operand>(c.state, low, kg);
  ptx::wgmma_commit();
  if (C::kHasResidual && outputs == Outputs::kWithResidual)
    ptx::compiler_fence(fences.after_update);

  if constexpr (C::kKeeps) keep_errors(c, piece, kept);
  put_outputs(c, outputs, &pq[2], error, q_norm, diag, piece);
  const bool more = !kFp16<Operand> || consume_headroom(c, largest_v(c, v));
  ptx::wgmma_wait<0>();
  ptx::fence_operands(c.state);
  return more;
}

// ---- the loop

/// Stages in turn, item after item. Votes and the barrier show the compiler that a warp stays
/// together: descriptors are in uniform registers. So a loop is left at its condition alone.
template <class C, class Storage>
__device__ void run_consumer(C& c, Storage& storage, SchedulerState& scheduler, int warp) {
  using Operand = typename C::Operand;
  constexpr int kBlocks = C::kBlocks;
  const int rank = ptx::cluster_rank();
  const uint32_t tiles = ptx::shared_address(storage.tiles),
                 factors = ptx::shared_address(storage.factors),
                 values = ptx::shared_address(storage.v);
  c.tile_column = warp * 16;
  c.column = rank * kVTile + c.tile_column;
  if (c.lane == 0) storage.consumers[warp] = {};
  __syncwarp();
  const ptx::RemoteBarriers peer_done(storage.peer_done, kBlocks - 1 - rank);
  // One lane tells the other block's producers about their stages.
  const int theirs = c.lane == 0 ? 1 - rank : kBlocks;
  const auto tiles_of = [&](int i) {
    return tiles + i * static_cast<uint32_t>(sizeof(Tiles<C::kK>));
  };
  const auto factors_of = [&](int i) {
    return factors + i * static_cast<uint32_t>(sizeof(Factors<C::kK>));
  };
  const auto values_of = [&](int i) {
    return values + i * static_cast<uint32_t>(sizeof(storage.v[0]));
  };
  const auto wait = [&](unsigned subchunk) {
    ptx::mbarrier_wait(storage.full[subchunk % kPipeStages],
                       static_cast<int>(subchunk / kPipeStages % 2));
  };
  const auto release = [&](int i) {
    ptx::mbarrier_arrive(storage.done[i]);
    if (kBlocks > 1 && i % kBlocks == theirs) peer_done.arrive(i);
  };
  for (unsigned subchunk = 0;;) {
    int until = stop(c, scheduler, storage.consumers[warp], storage.norm_check);
    ptx::bar_sync<128>(kConsumerGroup);
    if (until == 0) return;
    const Outputs outputs = outputs_of(c, scheduler.item);
    do {
      if (!has_headroom(c))
        rescale_if_needed(c, piece_of(c, values_of(static_cast<int>(subchunk % kPipeStages))),
                          [&] { wait(subchunk); });
      ptx::rename_registers(c.state, gridDim.z - 1);
      uint32_t v[4];
      float pq[4][4];
      const auto consume = [&](Outputs constant) {
        const CompilerFences fences(until);
        for (bool more = true; more; ++subchunk, --until) {
          const auto i = static_cast<int>(subchunk % kPipeStages);
          wait(subchunk);
          more = consume_subchunk(c, constant, fences, tiles_of(i), factors_of(i), values_of(i), v,
                                  pq);
          more = !__any_sync(0xffffffff, !more || until <= 1);
          if (more) release(i);  // the last one below: it may have to be repaired first
        }
      };
      if (!C::kHasQt || outputs == Outputs::kRounded)
        consume(Outputs::kRounded);
      else if (C::kHasResidual && outputs == Outputs::kWithResidual)
        consume(Outputs::kWithResidual);
      else
        consume(Outputs::kQt);
      const auto i = static_cast<int>((subchunk - 1) % kPipeStages);
      if (kFp16<Operand> && __any_sync(0xffffffff, !(largest_v(c, v) < kLarge)))
        repair_overflow(c, outputs, tiles_of(i), factors_of(i), values_of(i), v, pq);
      release(i);
    } while (kFp16<Operand> && __any_sync(0xffffffff, until > 0));
  }
}

}  // namespace kda::cuda::sm90::fused
