// SPDX-License-Identifier: Apache-2.0
// The loop of a consumer warp that multiplies with mma.sync. Four warps hold S^T of 64 columns of
// V, 16 each: they wait for the same stages, and for each other at stops alone.
#pragma once

#include "cuda/fused/consumer_steps.cuh"
#include "cuda/fused/portable/storage.cuh"

namespace kda::cuda::sm90::fused {

template <int kK, class InputT, class Operand>
using PortableConsumer = ConsumerContext<kK, InputT, Operand, false, BlockForm<kK>>;

/// pq [V, 32] = S^T rows^T, S^T rounded: two neighbouring tiles of accumulators are an operand.
template <class C>
__device__ __forceinline__ void multiply_rows(const C& c, uint32_t rows, float (&pq)[4][4]) {
  using Operand = typename C::Operand;
  const int row = c.lane % 8 + c.lane / 16 * 8;
  const uint32_t from = rows + row * 128 + ((c.lane / 8 % 2 ^ row) & 7) * 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) pq[i / 4][i % 4] = 0;
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    const uint32_t at = (from ^ step % 4 * 32) + step / 4 * (2 * kSubchunk * 128);
    uint32_t k[4], q[4], rounded[4];
    ptx::ldmatrix_x4(k, at);
    ptx::ldmatrix_x4(q, at + kSubchunk * 128);
    chain::round_pairs<Operand>(c.state[2 * step], c.state[2 * step + 1], rounded);
    add_product<Operand>(&pq[0], rounded, k);
    add_product<Operand>(&pq[2], rounded, q);
  }
}
/// S^T += vn^T kg. low: in bf16 what vn, rounded, lacks.
template <class C>
__device__ __forceinline__ void add_update(C& c, uint32_t kg, const uint32_t (&vn)[4],
                                           const uint32_t (&low)[4]) {
  using Operand = typename C::Operand;
  const int token = c.lane % 16;
  const uint32_t from = kg + token * 128 + ((c.lane / 16 ^ token) & 7) * 16;
#pragma unroll
  for (int n = 0; n < C::kTiles; n += 2) {
    uint32_t columns[4];
    ptx::ldmatrix_x4_trans(columns, (from ^ n % 8 * 16) + n / 8 * (kSubchunk * 128));
    add_product<Operand>(&c.state[n], vn, columns);
    if constexpr (!kFp16<Operand>) add_product<Operand>(&c.state[n], low, columns);
  }
}

/// Consumes a stage, as consume_subchunk() of fused/consumer.cuh does.
template <class Group, class C>
__device__ __forceinline__ bool consume_stage(C& c, uint32_t group, uint32_t (&v)[4],
                                              float (&pq)[4][4]) {
  using Operand = typename C::Operand;
  using Tiles = fused::Tiles<C::kK>;
  using Factors = fused::Factors<C::kK>;
  const uint32_t tiles = group + offsetof(Group, tiles), factors = group + offsetof(Group, factors),
                 values = group + offsetof(Group, v);
  uint32_t inverse[4], Aqk[4];
  ptx::ldmatrix_x4_trans(v, piece_of(c, values));
  load_square(c, factors + offsetof(Factors, inverse), inverse);
  const TokenFactors k_norm(factors + offsetof(Factors, k_norm), c.lane);
  if constexpr (kFp16<Operand>) scale_in_place(c, v);
  multiply_rows(c, tiles + offsetof(Tiles, rows), pq);

  float4 gamma[C::kTiles / 2];
  load_gammas<0>(c, factors, gamma);
  load_gammas<1>(c, factors, gamma);
  load_square(c, factors + offsetof(Factors, Aqk), Aqk);
  const TokenFactors k_beta(factors + offsetof(Factors, k_beta), c.lane);
  float error[2][4];
  uint32_t z[4], vn[4], low[4] = {};
  subtract(c, v, pq, k_norm, error);
  round_errors<Operand>(error, z);
  add_product<Operand>(error, z, inverse);  // T' - I: `error` is there already
  decay_state(c, gamma);
  multiply(error, k_beta);
  round_errors<Operand>(error, vn);
  add_product<Operand>(&pq[2], vn, Aqk);
  if constexpr (!kFp16<Operand>)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* exact = error[i / 2] + i % 2 * 2;
      const float2 kept = ptx::unpack<Operand>(vn[i]);
      low[i] = ptx::pack<Operand>(exact[0] - kept.x, exact[1] - kept.y);
    }
  __syncwarp();  // outputs take the place of v, which other lanes have read
  put_outputs(c, Outputs::kRounded, &pq[2], error,
              TokenFactors(factors + offsetof(Factors, q_norm), c.lane),
              TokenFactors(factors + offsetof(Factors, diag), c.lane), outputs_place(c, values));
  add_update(c, tiles + offsetof(Tiles, kg), vn, low);
  return !kFp16<Operand> || consume_headroom(c, largest_v(c, v));
}

/// A walk over the groups of a block, in turn: the stage of the next sub-chunk, and the parity of
/// its turn.
struct StageWalk {
  int stage = 0, parity = 0;
  __device__ void next(int groups) {
    if (++stage == groups) stage = 0, parity ^= 1;
  }
};

template <class C, class Storage>
__device__ void run_portable_consumer(C& c, Storage& storage, SchedulerState& scheduler, int warp) {
  using Operand = typename C::Operand;
  using Group = typename Storage::Group;
  const uint32_t first = ptx::shared_address(storage.groups);
  const int groups = storage.block_groups;
  c.column = c.tile_column = warp * 16;
  if (c.lane == 0) storage.consumers[warp] = {};
  __syncwarp();
  const auto group_at = [&](int i) { return first + i * static_cast<uint32_t>(sizeof(Group)); };
  StageWalk walk;
  const auto wait = [&] { ptx::mbarrier_wait(storage.full_barrier(walk.stage), walk.parity); };
  const auto release = [&] {
    __syncwarp();
    ptx::mbarrier_arrive(storage.done_barrier(walk.stage));
    walk.next(groups);
  };
  for (;;) {
    int until = stop(c, scheduler, storage.consumers[warp], storage.norm_check);
    ptx::bar_sync<128>(kConsumerGroup);
    if (until == 0) return;
    while (until > 0) {
      if (!has_headroom(c))
        rescale_if_needed(c, piece_of(c, group_at(walk.stage) + offsetof(Group, v)), wait);
      uint32_t v[4];
      float pq[4][4];
      for (bool more = true; more;) {
        wait();
        more = consume_stage<Group>(c, group_at(walk.stage), v, pq);
        more = !__any_sync(0xffffffff, !more || until <= 1);
        if (more) release();  // the last one below: it may have to be repaired first
        --until;
      }
      if (kFp16<Operand> && __any_sync(0xffffffff, !(largest_v(c, v) < kLarge))) {
        const uint32_t group = group_at(walk.stage);
        repair_overflow(c, Outputs::kRounded, group + offsetof(Group, tiles),
                        group + offsetof(Group, factors), group + offsetof(Group, v), v, pq);
      }
      release();
    }
  }
}

}  // namespace kda::cuda::sm90::fused
