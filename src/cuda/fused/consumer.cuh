// SPDX-License-Identifier: Apache-2.0
// A warpgroup holds S^T of 64 columns of V and goes from run to run. This is the serial part: what
// it waits for, everything waits for.
#pragma once

#include "cuda/fused/output_residual.cuh"
#include "cuda/fused/scheduler.cuh"
#include "cuda/fused/shared_storage.cuh"
#include "cuda/fused/state_transfer.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_small.cuh"

namespace kda::cuda::sm90::fused {

/// T: of v and o.
template <int kK, class T, class Operand, bool kSegments>
struct Consumer : States<kK, T, Operand, kSegments> {
  using Base = States<kK, T, Operand, kSegments>;
  using Base::a;
  using Base::column;
  using Base::end;
  using Base::fused;
  using Base::has_room;
  using Base::head;
  using Base::kLarge;
  using Base::kOne;
  using Base::kSteps;
  using Base::kTiles;
  using Base::lane;
  using Base::load_start;
  using Base::look_at_scale;
  using Base::most_of;
  using Base::piece_of;
  using Base::place_in;
  using Base::round_pairs;
  using Base::scale;
  using Base::scale_back;
  using Base::scale_in_place;
  using Base::span;
  using Base::state;
  using Base::store;
  using Base::take_over;
  using Base::take_room;
  using Base::tile_column;
  using Base::transition;
  using Base::unit;
  using Base::value_of;
  using typename Base::Place;
  using Tiles = fused::Tiles<kK>;
  using Factors = fused::Factors<kK>;
  static constexpr int kBlocks = fused::kBlocks<kK>;
  using Looks = fused::Looks<kBlocks>;

  __device__ explicit Consumer(const FusedPrefillArgs& args) : Base(args) {}

  // ---- outputs of segments, with operands in fp16 ----------------------------------------------

  static constexpr bool kFine = kSegments && kHalf<Operand>;
  static constexpr bool kRests = kFine && std::is_same_v<T, __nv_bfloat16>;
  /// In bf16; those that will be corrected leave at `rest_at` what that lacks (fp16 has as many
  /// digits as that); Qt is fp16, times a power of two. Each has a loop of its own: as questions in
  /// one loop they cost 4 to 10%.
  enum class Outputs { kRounded, kWithRest, kQt };
  char* rest_at = nullptr;

  __device__ Outputs outputs_of(const Part& part) const {
    if (part.state == FusedState::kTransition) return Outputs::kQt;
    const bool with_rest = kRests && part.state == FusedState::kZero && fused.residual;
    return with_rest ? Outputs::kWithRest : Outputs::kRounded;
  }
  __device__ void find_rest(const Part& part) {
    if (outputs_of(part) != Outputs::kWithRest) return;
    rest_at = reinterpret_cast<char*>(fused.residual + column / 16 * kRestLanes + lane +
                                      rest_place<kK>(a.shape, part.segment, span.begin, head));
  }

  /// TokenFactors of this lane's tokens: 2j, 2j + 1 of each 8.
  struct TokenFactors {
    float2 x[2];
    __device__ __forceinline__ TokenFactors(uint32_t at, int lane) {
      const float4 four = ptx::ld_shared_v4(at + lane % 4 * 16);
      x[0] = {four.x, four.y}, x[1] = {four.z, four.w};
    }
  };
  __device__ __forceinline__ static void multiply(float (*x)[4], const TokenFactors& factor) {
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
    ptx::wgmma_n32_k_major<Operand, false>(pq, rounded[0], rows);
#pragma unroll
    for (int i = 1; i < kSteps; ++i)
      ptx::wgmma_n32_k_major<Operand, true>(pq, rounded[i],
                                            ptx::next_columns<2 * kRun>(rows, i * 16));
    ptx::wgmma_commit();
  }

  /// A square of a stage as B operand of 16 tokens.
  __device__ __forceinline__ void load_square(uint32_t at, uint32_t (&x)[4]) const {
    ptx::ldmatrix_x4(x, at + square_place(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2);
  }
  template <class Item = Operand>
  __device__ __forceinline__ static void add_product(float (*d)[4], const uint32_t (&x)[4],
                                                     const uint32_t (&square)[4]) {
    ptx::mma_16816<Item>(d[0], x, square[0], square[1]);
    ptx::mma_16816<Item>(d[1], x, square[2], square[3]);
  }

  /// Conditions of compiler_fence(): never true, each one different, else the compiler drops all
  /// fences but the first. Votes: where lanes could differ, descriptors would leave uniform
  /// registers.
  struct Never {
    bool after_products, after_wait, after_errors, after_outputs, after_update;
    __device__ __forceinline__ explicit Never(int runs)
        : after_products(__any_sync(0xffffffff, runs == -1)),
          after_wait(__any_sync(0xffffffff, runs == -2)),
          after_errors(__any_sync(0xffffffff, runs == -3)),
          after_outputs(__any_sync(0xffffffff, runs == -5)),
          after_update(__any_sync(0xffffffff, runs == -6)) {}
  };

  /// A half of this lane's.
  template <int kWhich>
  __device__ __forceinline__ void load_gammas(uint32_t at, float4 (&gamma)[kTiles / 2]) const {
    constexpr int kCount = kTiles / 4;
#pragma unroll
    for (int i = kWhich * kCount; i < (kWhich + 1) * kCount; ++i)
      gamma[i] = ptx::ld_shared_v4(at + offsetof(Factors, gamma) + lane % 4 * kGammaStride<kK> * 4 +
                                   i * 16);
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

  // ---- a run -----------------------------------------------------------------------------------

  /// v - k_norm P.
  __device__ __forceinline__ void subtract(const uint32_t (&v)[4], const float (*P)[4],
                                           const TokenFactors& k_norm, float (&error)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 upper = value_of(v[2 * n]), lower = value_of(v[2 * n + 1]);
      const float2 norm = k_norm.x[n];
      error[n][0] = upper.x - norm.x * P[n][0];
      error[n][1] = upper.y - norm.y * P[n][1];
      error[n][2] = lower.x - norm.x * P[n][2];
      error[n][3] = lower.y - norm.y * P[n][3];
    }
  }
  /// q_norm (sum + diag error).
  __device__ __forceinline__ void put_outputs(Outputs outputs, const float (*sum)[4],
                                              const float (&error)[2][4], TokenFactors q_norm,
                                              const TokenFactors& diag, uint32_t piece) {
    if constexpr (kHalf<Operand>)
#pragma unroll
      for (float2& x : q_norm.x) {
        const float factor =
            scale_back(kFine && outputs == Outputs::kQt ? fused.Qt_scale_bits : kOne);
        x.x *= factor, x.y *= factor;
      }
    float o[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      o[n][0] = sum[n][0] + diag.x[n].x * error[n][0];
      o[n][1] = sum[n][1] + diag.x[n].y * error[n][1];
      o[n][2] = sum[n][2] + diag.x[n].x * error[n][2];
      o[n][3] = sum[n][3] + diag.x[n].y * error[n][3];
    }
    multiply(o, q_norm);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = o[i / 2][i % 2 * 2], y = o[i / 2][i % 2 * 2 + 1];
      pairs[i] = kFine && outputs == Outputs::kQt ? ptx::pack<Operand>(x, y) : ptx::pack<T>(x, y);
    }
    ptx::stmatrix_x4_trans(piece, pairs);
    if (kRests && outputs == Outputs::kWithRest) {
      *reinterpret_cast<uint32_t*>(rest_at) = rest_of(o);
      rest_at += fused.residual_step;
    }
  }

  /// `at`: tiles of a stage; `factors`: its others; `values`: v, then o in its place. P and Q times
  /// kAnchor are rows' products, pq.
  ///   E = T' (v - k_norm P);  vn = beta E;  o = q_norm (Q + Aqk vn + diag vn);
  ///   S = Diag(gamma) S + kg^T vn
  /// Four warps load at the same time: what loads while the rows are multiplied is no more than the
  /// products take, the rest comes where warps wait for something else. False, in fp16: there is no
  /// room for another run, or v is large.
  __device__ __forceinline__ bool run_one(Outputs outputs, const Never& never, uint32_t at,
                                          uint32_t factors, uint32_t values, uint32_t (&v)[4],
                                          float (&pq)[4][4]) {
    const uint32_t piece = piece_of(values);
    uint32_t inverse[4], Aqk[4];
    ptx::ldmatrix_x4_trans(v, piece);
    load_square(factors + offsetof(Factors, inverse), inverse);
    const TokenFactors k_norm(factors + offsetof(Factors, k_norm), lane);

    if constexpr (kHalf<Operand>) scale_in_place(v);
    float error[2][4];
    multiply_rows(ptx::tile_descriptor<2 * kRun>(at + offsetof(Tiles, rows)), pq);
    ptx::compiler_fence(never.after_products);
    float4 gamma[kTiles / 2];
    load_gammas<0>(factors, gamma);
    load_square(factors + offsetof(Factors, Aqk), Aqk);
    const TokenFactors k_beta(factors + offsetof(Factors, k_beta), lane);

    ptx::wgmma_wait<0>();
    ptx::fence_operands(pq);
    ptx::compiler_fence(never.after_wait);
    load_gammas<1>(factors, gamma);
    const TokenFactors q_norm(factors + offsetof(Factors, q_norm), lane),
        diag(factors + offsetof(Factors, diag), lane);
    subtract(v, pq, k_norm, error);
    uint32_t z[4], vn[4];
    [[maybe_unused]] uint32_t low[4];
    round_errors(error, z);
    add_product(error, z, inverse);
    ptx::compiler_fence(never.after_errors);
    decay(gamma);
    multiply(error, k_beta);
    round_errors(error, vn);
    add_product(&pq[2], vn, Aqk);  // before products that keep the tensor cores busy
    ptx::compiler_fence(never.after_outputs);
    if constexpr (!kHalf<Operand>)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* exact = error[i / 2] + i % 2 * 2;
        const float2 kept = ptx::unpack<Operand>(vn[i]);
        low[i] = ptx::pack<Operand>(exact[0] - kept.x, exact[1] - kept.y);
      }
    ptx::fence_operands(state);
    ptx::wgmma_fence();
    const uint64_t kg = ptx::tile_descriptor<kRun>(at + offsetof(Tiles, kg));
    ptx::wgmma_16_mn_major<Operand>(state, vn, kg);
    if constexpr (!kHalf<Operand>) ptx::wgmma_16_mn_major<Operand>(state, low, kg);
    ptx::wgmma_commit();
    if (kRests && outputs == Outputs::kWithRest) ptx::compiler_fence(never.after_update);

    put_outputs(outputs, &pq[2], error, q_norm, diag, piece);
    const bool more = !kHalf<Operand> || take_room(most_of(v));
    ptx::wgmma_wait<0>();
    ptx::fence_operands(state);
    return more;
  }

  // ---- runs with large v, in fp16 --------------------------------------------------------------

  using Wide = __nv_bfloat16;  // of what fp16 does not hold
  __device__ static bool fits(float x) { return fabsf(x) <= 65504; }
  __device__ __forceinline__ static void round_errors(const float (&error)[2][4],
                                                      uint32_t (&x)[4]) {
    if constexpr (kHalf<Operand>)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = ptx::cvt_satfinite_f16x2(error[i / 2][i % 2 * 2], error[i / 2][i % 2 * 2 + 1]);
    else
      round_pairs(error[0], error[1], x);
  }
  /// What `rounded`, errors as run_one() multiplied them, lacks of `exact`: nothing where they fit.
  __device__ static void find_rest(const float (&exact)[2][4], const float (&error)[2][4],
                                   const uint32_t (&rounded)[4], uint32_t (&rest)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 kept = ptx::unpack<Operand>(rounded[i]);
      const auto lacks = [&](int j, float x) {
        return exact[i / 2][j] == error[i / 2][j] && fits(error[i / 2][j]) ? 0.0f
                                                                           : exact[i / 2][j] - x;
      };
      rest[i] = ptx::pack<Wide>(lacks(i % 2 * 2, kept.x), lacks(i % 2 * 2 + 1, kept.y));
    }
  }
  /// d += rest square, in bf16.
  __device__ static void add_rest(float (*d)[4], const uint32_t (&rest)[4],
                                  const uint32_t (&square)[4]) {
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = ptx::unpack<Operand>(square[i]);
      rounded[i] = ptx::pack<Wide>(x.x, x.y);
    }
    add_product<Wide>(d, rest, rounded);
  }
  /// After run_one(), which took the largest finite numbers for larger errors. Tokens before those
  /// keep their bits. `pq`: as run_one() left it.
  __device__ void mend_large(Outputs outputs, uint32_t at, uint32_t factors, uint32_t values,
                             const uint32_t (&v)[4], float (&pq)[4][4]) {
    float error[2][4], exact[2][4];
    uint32_t square[4], rounded[4], rest[4];
    subtract(v, pq, TokenFactors(factors + offsetof(Factors, k_norm), lane), error);
    round_errors(error, rounded);
    find_rest(error, error, rounded, rest);
    load_square(factors + offsetof(Factors, inverse), square);
    add_product(error, rounded, square);
#pragma unroll
    for (int i = 0; i < 8; ++i) exact[i / 4][i % 4] = error[i / 4][i % 4];
    add_rest(exact, rest, square);

    const TokenFactors k_beta(factors + offsetof(Factors, k_beta), lane);
    multiply(error, k_beta);
    multiply(exact, k_beta);
    round_errors(error, rounded);
    find_rest(exact, error, rounded, rest);
    load_square(factors + offsetof(Factors, Aqk), square);
    add_rest(&pq[2], rest, square);
    if (kRests && outputs == Outputs::kWithRest) rest_at -= fused.residual_step;
    put_outputs(outputs, &pq[2], exact, TokenFactors(factors + offsetof(Factors, q_norm), lane),
                TokenFactors(factors + offsetof(Factors, diag), lane), piece_of(values));
    const int token = lane % 16;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const int piece = n + lane / 16;
      ptx::ldmatrix_x4_trans(square, at + offsetof(Tiles, kg) + piece / 8 * kRun * 128 +
                                         token * 128 + ((piece ^ token) & 7) * 16);
      add_rest(&state[n], rest, square);
    }
    scale.room = 0;
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
    stops.num_runs = stops.left = runs_of<kBlocks>(part);
    if (a.checkpoints.base) find_checkpoint(stops);
    if (kSegments && part.piece > 0) return;  // the state goes on
    if constexpr (kRests) find_rest(part);
    scale = {};
    if (part.taken_over)
      take_over();
    else
      load_start(part);
  }
  /// After a piece of a transition that may stop early.
  __device__ void look(const Part& part, Looks& looks) {
    if (unit_of(fused, fused.num_scheduled + share_number<kBlocks>() / a.shape.HV).span.end >
        part.span.end) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i)
        sum = fmaf(state[i / 4][i % 4], state[i / 4][i % 4], sum);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      looks.put(part.piece, column / 16, sum * scale_back() * scale_back());
      // No v takes room here: without a look of its own it would end in fp16's least numbers.
      if (kHalf<Operand> && sum < 0x1p-10f) scale.room = 0;
    }
    if (column == 0 && lane == 0)
      fused.exit_tokens[part.segment * a.shape.HV + head] = part.span.end;
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
  /// The next checkpoint's place; none where the last run lacks tokens.
  __device__ Place next_checkpoint(Stops& stops) const {
    const int64_t done = span.begin + static_cast<int64_t>(stops.num_runs - stops.left) * kRun;
    stops.to_checkpoint = to_runs(a.checkpoint_every);
    return done <= span.end ? place_in(a.checkpoints, stops.checkpoint++) : Place{};
  }
  /// Before the first part, after the last run of one, or after a run that a checkpoint is due
  /// after. Runs until the next stop; 0: all is done.
  __device__ int stop(Course& course, Stops& shared, Looks& looks) {
    Stops stops = shared;
    bool checkpoint = false;
    if (stops.in_part) {
      take(course.part);
      stops.left -= stops.until;
      checkpoint = a.checkpoints.base && (stops.to_checkpoint -= stops.until) == 0;
    }
    while (checkpoint || stops.left == 0) {  // an empty sequence has no runs
      Place place;
      bool more = true;
      if (checkpoint) {
        place = next_checkpoint(stops);
      } else {
        const Part part = course.part;
        const bool piece = kSegments && part.piece != Part::kNoPiece;
        if (stops.in_part && piece) look(part, looks);
        more = next_part<kSegments>(fused, course, looks);
        if (stops.in_part && !(piece && more)) place = end(part);
      }
      store(place);  // here alone: its code is long
      if (!more) return 0;
      if (!checkpoint) begin(course.part, stops);
      checkpoint = false;
    }
    stops.until = a.checkpoints.base ? min(stops.left, stops.to_checkpoint) : stops.left;
    __syncwarp();
    if (lane == 0) shared = stops;
    __syncwarp();
    return stops.until;
  }

  /// Stages in turn, part after part. Votes and the barrier show the compiler that a warp stays
  /// together: descriptors are in uniform registers. So a loop is left at its condition alone.
  template <class Ring>
  __device__ void run_all(Ring& ring, Course& course, int warp) {
    const int rank = ptx::cluster_rank();
    const uint32_t tiles = ptx::shared_address(ring.tiles),
                   factors = ptx::shared_address(ring.factors),
                   values = ptx::shared_address(ring.v);
    transition = false;
    tile_column = warp * 16;
    column = rank * kVTile + tile_column;
    if (lane == 0) ring.stops[warp] = {};
    __syncwarp();
    const ptx::RemoteBarriers peer_done(ring.peer_done, kBlocks - 1 - rank);
    const int theirs = lane == 0 ? 1 - rank : kBlocks;  // stages: one lane tells their maker
    const auto tiles_of = [&](int i) { return tiles + i * static_cast<uint32_t>(sizeof(Tiles)); };
    const auto factors_of = [&](int i) {
      return factors + i * static_cast<uint32_t>(sizeof(Factors));
    };
    const auto values_of = [&](int i) {
      return values + i * static_cast<uint32_t>(sizeof(ring.v[0]));
    };
    const auto wait = [&](unsigned run) {
      ptx::mbarrier_wait(ring.full[run % kStages], static_cast<int>(run / kStages % 2));
    };
    const auto release = [&](int i) {
      ptx::mbarrier_arrive(ring.done[i]);
      if (kBlocks > 1 && i % kBlocks == theirs) peer_done.arrive(i);
    };
    for (unsigned run = 0;;) {
      int until = stop(course, ring.stops[warp], ring.looks);
      ptx::bar_sync<128>(1);
      if (until == 0) return;
      const Outputs outputs = outputs_of(course.part);
      do {
        if (!has_room())
          look_at_scale(piece_of(values_of(static_cast<int>(run % kStages))), [&] { wait(run); });
        ptx::rename_registers(state, gridDim.z - 1);
        uint32_t v[4];
        float pq[4][4];
        const auto go_on = [&](Outputs constant) {
          const Never never(until);
          for (bool more = true; more; ++run, --until) {
            const auto i = static_cast<int>(run % kStages);
            wait(run);
            more = run_one(constant, never, tiles_of(i), factors_of(i), values_of(i), v, pq);
            more = !__any_sync(0xffffffff, !more || until <= 1);
            if (more) release(i);
          }
        };
        if (!kFine || outputs == Outputs::kRounded)
          go_on(Outputs::kRounded);
        else if (kRests && outputs == Outputs::kWithRest)
          go_on(Outputs::kWithRest);
        else
          go_on(Outputs::kQt);
        const auto i = static_cast<int>((run - 1) % kStages);
        if (kHalf<Operand> && __any_sync(0xffffffff, !(most_of(v) < kLarge)))
          mend_large(outputs, tiles_of(i), factors_of(i), values_of(i), v, pq);
        release(i);
      } while (kHalf<Operand> && __any_sync(0xffffffff, until > 0));
    }
  }
};

}  // namespace kda::cuda::sm90::fused
