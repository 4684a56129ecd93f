// SPDX-License-Identifier: Apache-2.0
// Two warps make the factors of every kMakers-th run.
#pragma once

#include "cuda/sm90/fused/scores.cuh"

namespace kda::cuda::sm90::fused {

template <class E, int kGateMode>
struct Producer : Scores<E, kGateMode> {
  using Base = Scores<E, kGateMode>;
  using Base::Base;
  using Base::count;
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

  /// Until this block is done with the stages of two runs: their outputs are there.
  __device__ void wait_for_outputs(int run) const {
#pragma unroll
    for (int i = 0; i < kHalves; ++i)
      if (run + i < num_runs) ptx::mbarrier_wait(ring.done[(run + i) % kStages], run / kStages % 2);
  }
  /// Until both blocks are done with what the stages of two runs held before.
  __device__ void wait_for_stages(int run) const {
    if (run < kStages) return;
    wait_for_outputs(run - kStages);
    if (run + rank < num_runs)
      ptx::mbarrier_wait(ring.peer_done[(run + rank) % kStages], (run / kStages - 1) % 2);
  }
  /// By the first warp: outputs of the runs before leave the stages of these two, their v comes in.
  __device__ void move(int run) {
    if (run >= kStages) store_outputs(run - kStages);
    load_v(run);
  }

  /// What needs no stage comes first: it goes on while the stage is in use. The first warp moves
  /// tiles where the second has the inverse to make.
  __device__ void make(int run, Stage& s) {
    const int rows = count(run);
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
    wait_for_stages(run - rank);
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
    ptx::mbarrier_wait(own.half, run / kMakers % 2);
    Stage& s = ring.stages[run % kStages];
    if (thread == 32) ptx::bulk_copy_to(&s, &s, kStageBytes, ring.full[run % kStages], 1 - rank);
  }

  __device__ void run_all() {
    load_raw(mine());
    int run = first();
    for (; run < num_runs; run += kMakers) {
      const int made = run + rank, other = run + 1 - rank;
      if (made < num_runs) {
        make(made, ring.stages[made % kStages]);
        if (half() == 0) ptx::mbarrier_arrive(own.half);
      } else {
        wait_for_stages(run);
        if (half() == 0) move(run);
        ptx::cp_async_commit();
      }
      if (half() == 0) ptx::cp_async_wait<1>();  // v
      if (made < num_runs) ptx::mbarrier_arrive(ring.full[made % kStages]);
      if (other < num_runs) {
        if (thread == 32)
          ptx::mbarrier_arrive_expect(ring.full[other % kStages], kStageBytes);
        else
          ptx::mbarrier_arrive(ring.full[other % kStages]);
      }
      if (half() == 1 && made < num_runs) send(made);
    }
    run -= kStages;
    if (half() == 0 && run >= 0) {
      wait_for_outputs(run);
      store_outputs(run);
    }
  }
};

}  // namespace kda::cuda::sm90::fused
