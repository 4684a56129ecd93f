// SPDX-License-Identifier: Apache-2.0
// A warpgroup holds S^T of 64 columns of V and goes from run to run. This is the serial part: what
// it waits for, everything waits for.
#pragma once

#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma_run.cuh"
#include "cuda/sm80/chain.cuh"
#include "cuda/sm90/fused/line.cuh"
#include "cuda/sm90/fused/shared.cuh"

namespace kda::cuda::sm90::fused {

template <bool kSegments>
struct Consumer : delta_h::Chain<T, kK, DeltaUse::kForward> {
  using Base = delta_h::Chain<T, kK, DeltaUse::kForward>;

  const FusedPrefillArgs& fused;
  const int lane;  // out of a shuffle: else the thread's index is asked for in every run

  __device__ explicit Consumer(const FusedPrefillArgs& args)
      : Base(args), fused(args), lane(__shfl_sync(0xffffffff, Base::lane, Base::lane)) {}

  /// Factors of this lane's tokens: 2j, 2j + 1 of each 8.
  struct Factors {
    float2 x[2];
    __device__ __forceinline__ Factors(uint32_t at, int lane) {
      const float4 four = ptx::load_shared_four(at + lane % 4 * 16);
      x[0] = {four.x, four.y}, x[1] = {four.z, four.w};
    }
  };
  __device__ __forceinline__ static void multiply(float (*x)[4], const Factors& factor) {
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
  __device__ __forceinline__ static void add_product(float (*d)[4], const uint32_t (&x)[4],
                                                     const uint32_t (&square)[4]) {
    ptx::mma_16816<T>(d[0], x, square[0], square[1]);
    ptx::mma_16816<T>(d[1], x, square[2], square[3]);
  }

  /// Conditions of keep_order(): never true, each one different, else the compiler drops all fences
  /// but the first. Votes: where lanes could differ, descriptors would leave uniform registers.
  struct Never {
    bool after_products, after_wait, after_errors;
    __device__ __forceinline__ explicit Never(int runs)
        : after_products(__any_sync(0xffffffff, runs == -1)),
          after_wait(__any_sync(0xffffffff, runs == -2)),
          after_errors(__any_sync(0xffffffff, runs == -3)) {}
  };

  /// A half of this lane's.
  template <int kHalf>
  __device__ __forceinline__ void load_gammas(uint32_t at, float4 (&gamma)[kTiles / 2]) const {
    constexpr int kCount = kTiles / 4;
#pragma unroll
    for (int i = kHalf * kCount; i < (kHalf + 1) * kCount; ++i)
      gamma[i] =
          ptx::load_shared_four(at + offsetof(Stage, gamma) + lane % 4 * kGammaStride * 4 + i * 16);
  }
  __device__ __forceinline__ void decay(const float4 (&gamma)[kTiles / 2]) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const float4 x = gamma[n / 2];
      state[n][0] *= x.x, state[n][1] *= x.y, state[n][2] *= x.x, state[n][3] *= x.y;
      state[n + 1][0] *= x.z, state[n + 1][1] *= x.w;
      state[n + 1][2] *= x.z, state[n + 1][3] *= x.w;
    }
  }

  /// `at`: a stage; `values`: v, then o in its place. P and Q times kAnchor are rows' products.
  ///   E = T' (v - k_norm P);  vn = beta E;  o = q_norm (Q + Aqk vn + diag vn);
  ///   S = Diag(gamma) S + kg^T vn
  /// Four warps load at the same time: what loads while the rows are multiplied is no more than the
  /// products take, the rest comes where warps wait for something else.
  __device__ __forceinline__ void run_one(const Never& never, uint32_t at, uint32_t values) {
    const uint32_t piece =
        values + static_cast<uint32_t>(sizeof(T)) *
                     swizzled_in<kRun>(lane % 8 + lane / 16 * 8, tile_column / 8 + lane / 8 % 2);
    uint32_t v[4], inverse[4], Aqk[4];
    ptx::ldmatrix_x4_trans(v, piece);
    load_square(at + offsetof(Stage, inverse), inverse);
    const Factors k_norm(at + offsetof(Stage, k_norm), lane);

    float pq[4][4], error[2][4];
    multiply_rows(ptx::tile_descriptor_of<2 * kRun>(at + offsetof(Stage, rows)), pq);
    ptx::keep_order(never.after_products);
    float4 gamma[kTiles / 2];
    load_gammas<0>(at, gamma);
    load_square(at + offsetof(Stage, Aqk), Aqk);
    const Factors k_beta(at + offsetof(Stage, k_beta), lane);

    ptx::wgmma_wait<0>();
    ptx::hold(pq);
    ptx::keep_order(never.after_wait);
    load_gammas<1>(at, gamma);
    const Factors q_norm(at + offsetof(Stage, q_norm), lane),
        diag(at + offsetof(Stage, diag), lane);
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
    ptx::keep_order(never.after_errors);
    decay(gamma);
    multiply(error, k_beta);
    round_pairs(error[0], error[1], vn);
    float(*o)[4] = &pq[2];
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
      o[n][0] += diag.x[n].x * error[n][0];
      o[n][1] += diag.x[n].y * error[n][1];
      o[n][2] += diag.x[n].x * error[n][2];
      o[n][3] += diag.x[n].y * error[n][3];
    }
    multiply(o, q_norm);
    uint32_t pairs[4];
    round_pairs(o[0], o[1], pairs);
    ptx::stmatrix_x4_trans(piece, pairs);
    ptx::wgmma_wait<0>();
    ptx::hold(state);
  }

  // ---- parts -----------------------------------------------------------------------------------

  __device__ void take(const Part& part) {
    head = part.head;
    unit = part.segment;
    span = part.span;
  }
  __device__ void begin(const Part& part, Stops& stops) {
    take(part);
    stops.in_part = true;
    stops.num_runs = stops.left = runs_of(part);
    if (a.checkpoints.base) find_checkpoint(stops);
    if (kSegments && part.piece > 0) return;  // the state goes on
    if (part.taken_over)
      take_over();
    else if (kSegments &&
             (part.state == FusedState::kZero || part.state == FusedState::kTransition))
      begin_segment(part.state == FusedState::kTransition);
    else
      this->load_start();
  }
  /// With zeros, or the identity.
  __device__ void begin_segment(bool identity) {
    const int difference = column + lane / 4 - lane % 4 * 2;  // of column and channel
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state[n][i] = identity && difference == n * 8 + i % 2 - i / 2 * 8 ? 1.0f : 0.0f;
  }
  __device__ void end(const Part& part) {
    if (part.handed_on) return hand_on();
    if (!kSegments || part.state == FusedState::kGiven) return this->store_end();
    if (part.state == FusedState::kWhole) {
      if (a.final_state.base) store_to(a.final_state, state_slot(a.final_state, span.sequence));
      return;
    }
    float* base = part.state == FusedState::kZero         ? a.B
                  : part.state == FusedState::kTransition ? a.M
                                                          : fused.starts;
    const int64_t n = part.segment + (part.state == FusedState::kFirst ? 1 : 0);
    const int64_t matrix = ptx::opaque((n * a.shape.HV + head) * (kK * kK));
    this->for_each_state(base + matrix, kK, 1, [](float x, float& to) { to = x; });
  }
  /// After a piece of a transition that may stop early.
  __device__ void look(const Part& part, Looks& looks) {
    if (unit_of(fused, fused.num_in_line + share_number() / a.shape.HV).span.end > part.span.end) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i)
        sum = fmaf(state[i / 4][i % 4], state[i / 4][i % 4], sum);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      looks.put(part.piece, column / 16, sum);
    }
    if (column == 0 && lane == 0) fused.alive[part.segment * a.shape.HV + head] = part.span.end;
  }
  __device__ static int to_runs(int64_t tokens) {
    return static_cast<int>(min(tokens / kRun, int64_t{1} << 30));
  }
  /// The sequences of a share never go back where there are checkpoints.
  __device__ void find_checkpoint(Stops& stops) const {
    const int64_t every = a.checkpoint_every;
    if (!a.map.cu_seqlens) {
      stops.before = span.sequence * (a.map.num_tokens / every);
    } else {
      int64_t more = 0;
      for (int64_t n = stops.counted + lane; n < span.sequence; n += 32)
        more += (a.map.cu_seqlens[n + 1] - a.map.cu_seqlens[n]) / every;
      for (int step = 16; step > 0; step /= 2) more += __shfl_xor_sync(0xffffffff, more, step);
      stops.before += more;
      stops.counted = span.sequence;
    }
    const int64_t done = span.begin - sequence_span(a.map, span.sequence).begin;
    stops.checkpoint = stops.before + done / every;
    stops.to_checkpoint = to_runs(every - done % every);
  }
  /// Not where the last run lacks tokens.
  __device__ void store_checkpoint(Stops& stops) {
    const int64_t done = span.begin + static_cast<int64_t>(stops.num_runs - stops.left) * kRun;
    if (done <= span.end) store_to(a.checkpoints, state_slot(a.checkpoints, stops.checkpoint++));
    stops.to_checkpoint = to_runs(a.checkpoint_every);
  }
  /// Before the first part, after the last run of one, or after a run that a checkpoint is due
  /// after. Runs until the next stop; 0: all is done.
  __device__ int stop(Course& course, Stops& shared, Looks& looks) {
    Stops stops = shared;
    if (stops.in_part) {
      take(course.part);
      stops.left -= stops.until;
      if (a.checkpoints.base && (stops.to_checkpoint -= stops.until) == 0) store_checkpoint(stops);
    }
    while (stops.left == 0) {  // an empty sequence has no runs
      const bool piece = kSegments && stops.in_part && course.part.piece != Part::kNoPiece;
      if (piece)
        look(course.part, looks);
      else if (stops.in_part)
        end(course.part);
      if (!next_part<kSegments>(fused, course, looks)) {
        if (piece) end(course.part);
        return 0;
      }
      begin(course.part, stops);
    }
    stops.until = a.checkpoints.base ? min(stops.left, stops.to_checkpoint) : stops.left;
    __syncwarp();
    if (lane == 0) shared = stops;
    __syncwarp();
    return stops.until;
  }

  /// The state between two shares, a lane its own: [shares, halves of V, accumulators, threads].
  __device__ float* handed(int64_t share) const {
    return fused.handed + (share * kHalves + ptx::cluster_rank()) * (kTiles * 4 * 128) +
           threadIdx.x;
  }
  /// Of a warp's state.
  __device__ uint64_t* flag(int64_t share) const {
    return fused.handed_flags + (share * kHalves + ptx::cluster_rank()) * 4 + threadIdx.x / 32;
  }
  __device__ void hand_on() const {
    const int64_t to = share_number() - 1;
    float* at = handed(to);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) at[i * 128] = state[i / 4][i % 4];
    __syncwarp();
    if (lane == 0) ptx::raise_flag(flag(to), fused.key);
  }
  __device__ void take_over() {
    const int64_t from = share_number();
    ptx::wait_for_flag(flag(from), fused.key);
    __syncwarp();
    if (lane == 0) *flag(from) = 0;
    const float* at = handed(from);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) state[i / 4][i % 4] = at[i * 128];
  }

  /// Stages in turn, part after part. Votes and the barrier show the compiler that a warp stays
  /// together: descriptors are in uniform registers.
  __device__ void run_all(Ring& ring, Course& course, int warp) {
    const int rank = ptx::cluster_rank();
    const uint32_t stages = ptx::shared_address(ring.stages), values = ptx::shared_address(ring.v);
    transition = false;
    tile_column = warp * 16;
    column = rank * kVTile + tile_column;
    if (lane == 0) ring.stops[warp] = {};
    __syncwarp();
    const ptx::RemoteBarriers peer_done(ring.peer_done, 1 - rank);
    const int theirs = lane == 0 ? 1 - rank : kHalves;  // stages: one lane tells their maker
    for (unsigned run = 0;;) {
      int until = stop(course, ring.stops[warp], ring.looks);
      ptx::named_sync<128>(1);
      if (until == 0) return;
      ptx::renew(state, gridDim.z - 1);
      const Never never(until);
      for (; __any_sync(0xffffffff, until > 0); ++run, --until) {
        const auto i = static_cast<int>(run % kStages);
        const auto parity = static_cast<int>(run / kStages % 2);
        ptx::mbarrier_wait(ring.full[i], parity);
        run_one(never, stages + i * static_cast<uint32_t>(sizeof(Stage)),
                values + i * static_cast<uint32_t>(sizeof(ring.v[0])));
        ptx::mbarrier_arrive(ring.done[i]);
        if (i % kHalves == theirs) peer_done.arrive(i);
      }
    }
  }
};

}  // namespace kda::cuda::sm90::fused
