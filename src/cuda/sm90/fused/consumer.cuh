// SPDX-License-Identifier: Apache-2.0
// A warpgroup holds S^T of 64 columns of V and goes from run to run. This is the serial part: what
// it waits for, everything waits for.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma_run.cuh"
#include "cuda/sm80/chain.cuh"
#include "cuda/sm90/fused/shared.cuh"

namespace kda::cuda::sm90::fused {

struct Consumer : delta_h::Chain<T, kK, DeltaUse::kForward> {
  using Base = delta_h::Chain<T, kK, DeltaUse::kForward>;
  using Base::Base;

  /// Factors of this lane's tokens: 2j, 2j + 1 of each 8.
  struct Pairs {
    float2 x[2];
    __device__ __forceinline__ Pairs(uint32_t at, int lane)
        : x{ptx::load_shared_pair(at + lane % 4 * 8),
            ptx::load_shared_pair(at + 32 + lane % 4 * 8)} {}
  };
  __device__ __forceinline__ static void multiply(float (&x)[2][4], const Pairs& factor) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      x[n][0] *= factor.x[n].x, x[n][1] *= factor.x[n].y;
      x[n][2] *= factor.x[n].x, x[n][3] *= factor.x[n].y;
    }
  }

  /// pq [V, 32] = S rows^T, S rounded.
  __device__ __forceinline__ void multiply_rows(uint64_t rows, float (&pq)[4][4]) const {
    uint32_t rounded[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) round_pairs(state[2 * i], state[2 * i + 1], rounded[i]);
    ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
    ptx::wgmma_fence();
    ptx::wgmma_32_rows<false>(pq, rounded[0], rows);
#pragma unroll
    for (int i = 1; i < kSteps; ++i)
      ptx::wgmma_32_rows<true>(pq, rounded[i], ptx::next_columns_of<2 * kRun>(rows, i * 16));
    ptx::wgmma_commit();
  }

  /// A square of a stage as B operand of 16 tokens.
  __device__ __forceinline__ void load_square(uint32_t at, uint32_t (&x)[4]) const {
    ptx::ldmatrix_x4(x, at + (lane % 8 + lane / 16 * 8) * kSquare * 2 + lane / 8 % 2 * 16);
  }
  __device__ __forceinline__ static void add_product(float (&d)[2][4], const uint32_t (&x)[4],
                                                     const uint32_t (&square)[4]) {
    ptx::mma_16816<T>(d[0], x, square[0], square[1]);
    ptx::mma_16816<T>(d[1], x, square[2], square[3]);
  }

  /// `at`: a stage; `values`: v, then o in its place.
  ///   E = T' (v - k_norm P);  vn = beta E;  o = q_norm (Q + Aqk vn + diag vn);
  ///   S = Diag(gamma) S + kg^T vn
  __device__ __forceinline__ void run_one(ptx::Mbarrier& full, int parity, uint32_t at,
                                          uint32_t values) {
    const uint32_t piece =
        values + static_cast<uint32_t>(sizeof(T)) *
                     swizzled_in<kRun>(lane % 8 + lane / 16 * 8, tile_column / 8 + lane / 8 % 2);
    uint32_t v[4], inverse[4], Aqk[4];
    ptx::ldmatrix_x4_trans(v, piece);
    load_square(at + offsetof(Stage, inverse), inverse);
    const Pairs k_norm(at + offsetof(Stage, k_norm), lane);

    float pq[4][4], error[2][4], o[2][4] = {};
    multiply_rows(ptx::tile_descriptor_of<2 * kRun>(at + offsetof(Stage, rows)), pq);
    // Passed at once. ptxas would put what follows between the products, and each waits for it;
    // it moves nothing over a branch.
    ptx::mbarrier_wait(full, parity);
    float4 gamma[kTiles / 2];
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i)
      gamma[i] =
          ptx::load_shared_four(at + offsetof(Stage, gamma) + lane % 4 * kGammaStride * 4 + i * 16);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const float4 x = gamma[n / 2];
      state[n][0] *= x.x, state[n][1] *= x.y, state[n][2] *= x.x, state[n][3] *= x.y;
      state[n + 1][0] *= x.z, state[n + 1][1] *= x.w;
      state[n + 1][2] *= x.z, state[n + 1][3] *= x.w;
    }

    load_square(at + offsetof(Stage, Aqk), Aqk);
    const Pairs k_beta(at + offsetof(Stage, k_beta), lane),
        q_norm(at + offsetof(Stage, q_norm), lane), diag(at + offsetof(Stage, diag), lane);

    ptx::wgmma_wait<0>();
    ptx::hold(pq);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 upper = ptx::unpack<T>(v[2 * n]), lower = ptx::unpack<T>(v[2 * n + 1]);
      const float2 norm = k_norm.x[n];
      error[n][0] = upper.x - norm.x * pq[n][0];
      error[n][1] = upper.y - norm.y * pq[n][1];
      error[n][2] = lower.x - norm.x * pq[n][2];
      error[n][3] = lower.y - norm.y * pq[n][3];
    }
    uint32_t z[4], vn[4], low[4];
    round_pairs(error[0], error[1], z);
    add_product(error, z, inverse);
    multiply(error, k_beta);
    round_pairs(error[0], error[1], vn);
    add_product(o, vn, Aqk);  // before products that keep the tensor cores busy
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* exact = error[i / 2] + i % 2 * 2;
      const float2 kept = ptx::unpack<T>(vn[i]);
      low[i] = ptx::pack<T>(exact[0] - kept.x, exact[1] - kept.y);
    }
    ptx::hold(state);
    ptx::wgmma_fence();
    const uint64_t kg = ptx::tile_descriptor_of<kRun>(at + offsetof(Stage, kg));
    ptx::wgmma_16_columns(state, vn, kg);
    ptx::wgmma_16_columns(state, low, kg);
    ptx::wgmma_commit();

#pragma unroll
    for (int n = 0; n < 2; ++n) {
      constexpr float kScale = 1 / kAnchor;
      o[n][0] += pq[2 + n][0] * kScale + diag.x[n].x * error[n][0];
      o[n][1] += pq[2 + n][1] * kScale + diag.x[n].y * error[n][1];
      o[n][2] += pq[2 + n][2] * kScale + diag.x[n].x * error[n][2];
      o[n][3] += pq[2 + n][3] * kScale + diag.x[n].y * error[n][3];
    }
    multiply(o, q_norm);
    uint32_t pairs[4];
    round_pairs(o[0], o[1], pairs);
    ptx::stmatrix_x4_trans(piece, pairs);
    ptx::wgmma_wait<0>();
    ptx::hold(state);
  }

  __device__ void store_checkpoint_after(int run) {
    const int64_t done =
        min(span.end, span.begin + (run + 1) * kRun) - sequence_span(a.map, span.sequence).begin;
    if (done % a.checkpoint_every == 0)
      store_to(a.checkpoints, state_slot(a.checkpoints, checkpoint++));
  }

  template <bool kCheckpoints>
  __device__ __forceinline__ void run_chain(Ring& ring, int num_runs) {
    const int rank = ptx::cluster_rank();
    const uint32_t stages = ptx::shared_address(ring.stages), values = ptx::shared_address(ring.v);
    for (int run = 0; run < num_runs; ++run) {
      const int i = static_cast<int>(static_cast<unsigned>(run) % kStages);
      const int parity = static_cast<int>(static_cast<unsigned>(run) / kStages % 2);
      ptx::mbarrier_wait(ring.full[i], parity);
      run_one(ring.full[i], parity, stages + i * static_cast<uint32_t>(sizeof(Stage)),
              values + i * static_cast<uint32_t>(sizeof(ring.v[0])));
      ptx::mbarrier_arrive(ring.done[i]);
      if (i % kHalves != rank && lane == 0) ptx::mbarrier_arrive_in(ring.peer_done[i], 1 - rank);
      if constexpr (kCheckpoints) store_checkpoint_after(run);
    }
  }

  /// Two loops: instructions of the one without checkpoints lie together.
  __device__ void run_all(Ring& ring) {
    const int num_runs = static_cast<int>((span.end - span.begin + kRun - 1) / kRun);
    load_start();
    if (a.checkpoints.base)
      run_chain<true>(ring, num_runs);
    else
      run_chain<false>(ring, num_runs);
    store_end();
  }
};

}  // namespace kda::cuda::sm90::fused
