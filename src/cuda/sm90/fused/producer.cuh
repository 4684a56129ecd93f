// SPDX-License-Identifier: Apache-2.0
// Two warps make the factors of every kMakers-th run.
#pragma once

#include "cuda/sm90/fused/scores.cuh"

namespace kda::cuda::sm90::fused {

template <class E, int kGateMode>
struct Producer : Scores<E, kGateMode> {
  using Base = Scores<E, kGateMode>;
  using Base::Base;
  using Base::first;
  using Base::forget_index;
  using Base::half;
  using Base::load_raw;
  using Base::load_v;
  using Base::mine;
  using Base::num_runs;
  using Base::own;
  using Base::rank;
  using Base::ring;
  using Base::store_outputs;
  using Base::thread;
  using Base::tokens_from;

  /// The phases of this pair's barriers go round with its runs.
  __device__ static int parity(int run) {
    return static_cast<int>(static_cast<unsigned>(run) / kStages % 2);
  }

  /// Until this block is done with what the stages of these two runs held before: its outputs are
  /// there.
  __device__ void wait_for_outputs(int run) const {
#pragma unroll
    for (int i = 0; i < kHalves; ++i)
      ptx::mbarrier_wait(ring.done[first() + i], parity(run - kStages));
  }
  /// By the first warp: outputs of the runs before leave the stages of these two, their v comes in.
  __device__ void move(int run) {
    if (run >= kStages) store_outputs(run - kStages);
    load_v(run);
  }

  /// What needs no stage comes first: it goes on while the stage is in use. The first warp moves
  /// tiles where the second has the inverse to make.
  __device__ void make(int run, Stage& s) {
    const int rows = tokens_from(run);
    const uint32_t raw_beta = this->load_beta(rows);
    if (thread == 32) own.anchored = kRun;
    ptx::cp_async_wait<0>();
    this->template sync<0>();
    float2 factor[kRun];
    typename Base::Pairs q, k;
    this->scan_decays(factor, rows);
    const auto norms = this->norms(rows, raw_beta);
    this->load_pairs(q, k);
    forget_index();
    if (run >= kStages) {
      wait_for_outputs(run);
      ptx::mbarrier_wait(ring.peer_done[mine()], parity(run - kStages));
    }
    this->put_norms(s, norms);
    this->put_rows(s, factor, q, k);
    this->template sync<1>();
    const int anchored = own.anchored;
    if (half() == 0) move(run - rank);
    if (anchored == kRun) load_raw(run + kMakers);
    forget_index();
    this->anchored_scores(s);
    if (anchored < kRun) [[unlikely]] {
      forget_index();
      this->fine_levels(s, q, k, rows, anchored);
      load_raw(run + kMakers);
    }
    __syncwarp();
    forget_index();
    if (half() == 1) this->invert(s);
    ptx::fence_async_proxy();
  }

  /// The factors to the other block, by the warp that is done last.
  __device__ void send(int run) const {
    ptx::mbarrier_wait(own.half, parity(run));
    Stage& s = ring.stages[mine()];
    if (thread == 32) ptx::bulk_copy_to(&s, &s, kStageBytes, ring.full[mine()], 1 - rank);
  }

  __device__ void run_all() {
    load_raw(mine());
    ptx::Mbarrier &full = ring.full[mine()], &other_full = ring.full[first() + 1 - rank];
    int run = first();
    for (; run < num_runs; run += kStages) {
      const bool has_mine = run + rank < num_runs, has_other = run + 1 - rank < num_runs;
      if (has_mine) {
        make(run + rank, ring.stages[mine()]);
        if (half() == 0) ptx::mbarrier_arrive(own.half);
      } else {
        if (run >= kStages) wait_for_outputs(run);
        if (half() == 0) move(run);
        ptx::cp_async_commit();
      }
      if (half() == 0) ptx::cp_async_wait<1>();  // v
      if (has_mine) ptx::mbarrier_arrive(full);
      if (has_other) {
        if (thread == 32)
          ptx::mbarrier_arrive_expect(other_full, kStageBytes);
        else
          ptx::mbarrier_arrive(other_full);
      }
      if (half() == 1 && has_mine) send(run + rank);
    }
    if (half() == 0 && run >= kStages) {
      run -= kStages;
      for (int i = 0; i < kHalves && run + i < num_runs; ++i)
        ptx::mbarrier_wait(ring.done[first() + i], parity(run));
      store_outputs(run);
    }
  }
};

}  // namespace kda::cuda::sm90::fused
