// SPDX-License-Identifier: Apache-2.0
// A maker, one warp or two, makes the factors of every kMakers-th run.
#pragma once

#include "cuda/fused/anchored_scores.cuh"

namespace kda::cuda::sm90::fused {

template <int kK, class Operand, class E, int kGateMode, bool kSegments>
struct Producer : Scores<kK, Operand, E, kGateMode, kSegments> {
  using Base = Scores<kK, Operand, E, kGateMode, kSegments>;
  using Base::a;
  using Base::Base;
  using Base::first;
  using Base::forget_index;
  using Base::is_first;
  using Base::is_last;
  using Base::kBlocks;
  using Base::kLastWarp;
  using Base::kWarps;
  using Base::left;
  using Base::load_raw;
  using Base::load_v;
  using Base::maker;
  using Base::mine;
  using Base::next_o;
  using Base::o;
  using Base::own;
  using Base::pending;
  using Base::rank;
  using Base::ring;
  using Base::store_outputs;
  using Base::thread;
  using typename Base::Stage;

  /// Of the phase of this maker's barriers that is next: its stages are used in turn.
  int parity = 0;

  /// Until this block is done with what the stages of this maker held before: its outputs are
  /// there. (Barriers that were not used yet let this pass.)
  __device__ void wait_for_outputs() const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) ptx::mbarrier_wait(ring.done[first() + i], 1 - parity);
  }
  /// Until the other block is.
  __device__ void wait_for_peer() const {
    if constexpr (kBlocks > 1) ptx::mbarrier_wait(ring.peer_done[mine()], 1 - parity);
  }
  /// By the first warp: outputs of the runs before leave their stages, v of these comes in.
  __device__ void move() {
    if (pending > 0) store_outputs();
    if (next_o) o = next_o;
    next_o = nullptr;
    pending = left;
    load_v(pending);
  }

  /// Powers of two out of norms, to q and k.
  __device__ void take_powers(typename Base::AllNorms& norms, typename Base::Pairs& q,
                              typename Base::Pairs& k) const {
    this->split_powers(norms);
    this->template sync<0>();
    this->multiply_by(own.power.q, q);
    this->multiply_by(own.power.k, k);
  }
  /// Rows with q and k times powers of two, gates of any size.
  __device__ void put_again(const Stage& s, typename Base::AllNorms& norms, typename Base::Pairs& q,
                            typename Base::Pairs& k, int rows) {
    if (thread == kLastWarp) own.anchored = kRun;
    take_powers(norms, q, k);
    float2 factor[kRun];
    this->load_gates(factor);
    const float2 gamma = this->template scan_decays<true>(factor, rows);
    this->put_norms(s, norms);
    this->put_rows(s, factor, gamma, q, k);
    this->template sync<1>();
  }
  /// A run that is being made.
  struct Run {
    int rows;
    typename Base::Betas raw_beta;
    typename Base::Pairs q, k;
    typename Base::AllNorms norms;
  };
  __device__ __forceinline__ void begin_run(Run& run) {
    run.rows = left - rank * kRun;
    this->load_beta(run.raw_beta, run.rows);
    if (thread == kLastWarp) own.anchored = kRun, own.unusual = 0;
    ptx::cp_async_wait<0>();
    this->template sync<0>();
  }
  /// What needs no stage comes first: it goes on while the stage is in use.
  __device__ __forceinline__ void put_rows_of(const Stage& s, Run& run) {
    float2 factor[kRun];
    typename Base::AllSquares squares;
    this->load_gates(factor);
    this->add_squares(squares);  // its waits and those of decays for their units hide each other
    const float2 gamma = this->template scan_decays<false>(factor, run.rows);
    forget_index();
    this->find_norms(run.norms, squares, run.rows, run.raw_beta);
    this->load_pairs(run.q, run.k);
    wait_for_outputs();
    wait_for_peer();
    this->put_norms(s, run.norms);
    this->put_rows(s, factor, gamma, run.q, run.k);
    this->template sync<1>();
  }
  /// Of two warps the first one moves tiles where the second has the inverse to make. kUsual: there
  /// is nothing to make again, and all rows are in range.
  template <bool kUsual>
  __device__ __forceinline__ void put_scores_of(const Stage& s, Run& run) {
    if constexpr (kHalf<Operand>)
      if (!kUsual && own.unusual) [[unlikely]]
        put_again(s, run.norms, run.q, run.k, run.rows);
    const int anchored = kUsual ? kRun : own.anchored;
    if (is_first()) move();
    if (anchored == kRun) load_raw(left - kMakers * kRun);
    forget_index();
    this->anchored_scores(s);
    if (anchored < kRun) [[unlikely]] {
      forget_index();
      this->fine_levels(s, run.q, run.k, run.rows, anchored);
      load_raw(left - kMakers * kRun);
    }
    finish(s);
  }
  __device__ __forceinline__ void finish(const Stage& s) {
    __syncwarp();
    forget_index();
    if (is_last()) this->invert(s);
    ptx::fence_async_proxy();
  }
  /// By levels alone. Raw rows are read, and norms known, before their places are used.
  __device__ void make_deep(const Stage& s, Run& run) {
    float2 decay[kRun];
    typename Base::Pairs &q = run.q, &k = run.k;
    typename Base::AllSquares squares;
    this->load_gates(decay);
    this->add_squares(squares);
    const float2 gamma = Base::kLevelsAlone ? this->decays_of_levels(decay, run.rows)
                                            : this->decays_of_deep(decay, run.rows);
    forget_index();
    typename Base::AllNorms norms;
    this->find_norms(norms, squares, run.rows, run.raw_beta);
    this->load_pairs(q, k);
    this->sync_begin();
    wait_for_outputs();
    wait_for_peer();
    this->template sync_end<1>();
    if (own.unusual) [[unlikely]] {
      take_powers(norms, q, k);
      this->template sync<1>();
    }
    this->put_norms(s, norms);
    this->put_operands(s, decay, q, k);
    this->put_gamma(s, gamma);
    if (is_first()) move();
    load_raw(left - kMakers * kRun);
    this->all_levels(s, decay, q, k);
    finish(s);
  }

  /// The factors to the other block, by the warp that is done last.
  __device__ void send() const {
    ptx::mbarrier_wait(own.half, parity);
    if (thread != kLastWarp) return;
    ptx::Mbarrier& full = ring.full[mine()];
    ptx::cp_async_bulk_to_cluster(&ring.tiles[mine()], &ring.tiles[mine()], sizeof(Tiles<kK>), full,
                                  1 - rank);
    ptx::cp_async_bulk_to_cluster(&ring.factors[mine()], &ring.factors[mine()], sizeof(Factors<kK>),
                                  full, 1 - rank);
  }

  /// A run is made: to the consumers, and on to the next one of this maker.
  __device__ __forceinline__ void deliver() {
    if (is_first()) {
      if constexpr (kWarps > 1) ptx::mbarrier_arrive(own.half);
      ptx::cp_async_wait<1>();  // v
    }
    ptx::mbarrier_arrive(ring.full[mine()]);
    if constexpr (kBlocks > 1) exchange();
    parity = 1 - parity;
    left -= kStages * kRun;
  }

  /// Factors of this run to the other block, those of the other one from there.
  __device__ __forceinline__ void exchange() {
    ptx::Mbarrier& other_full = ring.full[first() + 1 - rank];
    if (thread == kLastWarp)
      ptx::mbarrier_arrive_expect_tx(other_full, sizeof(Tiles<kK>) + sizeof(Factors<kK>));
    else
      ptx::mbarrier_arrive(other_full);
    if (is_last()) send();
  }

  __device__ bool forgets_fast() const { return (own.deep[0] | own.deep[kWarps - 1]) != 0; }
  /// As many runs of every kStages as there are blocks.
  __device__ void run_part() {
    load_raw(left);
    if constexpr (Base::kLevelsAlone)
      for (; left > 0; deliver()) {
        Run run;
        begin_run(run);
        make_deep(ring.stage(mine()), run);
      }
    else if constexpr (kApart)
      run_apart();
    else
      for (; left > 0; deliver()) {
        const Stage s = ring.stage(mine());
        Run run;
        begin_run(run);
        if constexpr (Base::kDeepHeads)
          if (forgets_fast()) {
            make_deep(s, run);
            continue;
          }
        put_rows_of(s, run);
        put_scores_of<false>(s, run);
      }
  }
  /// With softplus gates the code of a run fills the cache of instructions: all that is rare, and
  /// what comes after it, stands behind the loop (docs/performance.md, "Instructions").
  static constexpr bool kApart = kSegments && Base::kDeepHeads;
  __device__ void run_apart() {
    while (left > 0) {
      const Stage s = ring.stage(mine());
      Run run;
      bool deep = false;
      for (; left > 0; deliver()) {
        begin_run(run);
        deep = forgets_fast();
        if (deep) break;
        put_rows_of(s, run);
        if (own.anchored < kRun || own.unusual) break;
        put_scores_of<true>(s, run);
      }
      if (left <= 0) return;
      if (deep)
        make_deep(s, run);
      else
        put_scores_of<false>(s, run);
      deliver();
    }
  }

  /// Levels write what is below the diagonal alone.
  __device__ void clear_scores() const {
    auto& Aqk = *reinterpret_cast<uint4(*)[kRun * kRun / 8]>(ring.factors[mine()].Aqk);
    if (thread < kRun * kRun / 8) Aqk[thread] = {};
  }

  __device__ void run_all(Course& course) {
    if constexpr (Base::kDeepHeads || Base::kLevelsAlone) clear_scores();
    constexpr int kMakersHere = kBlockMakers<kK>;
    int turn = 0;  // maker that has the first runs of the part
    while (next_part<kSegments>(a, course, this->ring.looks)) {
      const Part& part = course.part;
      const int run = (maker + kMakersHere - turn) % kMakersHere * kBlocks;
      this->begin(part, run);
      run_part();
      turn = (turn + runs_of<kBlocks>(part) / kBlocks) % kMakersHere;
    }
    if (is_first() && pending > 0) {
      wait_for_outputs();
      store_outputs();
    }
  }
};

}  // namespace kda::cuda::sm90::fused
