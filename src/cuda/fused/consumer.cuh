// SPDX-License-Identifier: Apache-2.0
// The loop of the consumer warpgroup, from top to bottom. It holds S^T of 64 columns of V and goes
// from sub-chunk to sub-chunk. This is the serial part: what it waits for, everything waits for.
#pragma once

#include "cuda/fused/consumer_context.cuh"
#include "cuda/fused/kept.cuh"
#include "cuda/fused/state_scale.cuh"
#include "cuda/fused/state_transfer.cuh"
#include "cuda/ptx/wgmma_small.cuh"

namespace kda::cuda::sm90::fused {

/// Named barriers of the block: 0 is __syncthreads().
enum NamedBarrier : int { kBlockBarrier, kConsumerGroup };

// ---- factors in registers

/// Factors of this lane's tokens: 2j, 2j + 1 of each 8.
struct TokenFactors {
  float2 x[2];
  __device__ __forceinline__ TokenFactors(uint32_t at, int lane) {
    const float4 four = ptx::ld_shared_v4(at + lane % 4 * 16);
    x[0] = {four.x, four.y}, x[1] = {four.z, four.w};
  }
};
__device__ __forceinline__ void multiply(float (*x)[4], const TokenFactors& factor) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    x[n][0] *= factor.x[n].x, x[n][1] *= factor.x[n].y;
    x[n][2] *= factor.x[n].x, x[n][3] *= factor.x[n].y;
  }
}
/// Loads a square of a stage as B operand of 16 tokens.
template <class C>
__device__ __forceinline__ void load_square(const C& c, uint32_t at, uint32_t (&x)[4]) {
  ptx::ldmatrix_x4(x, at + square_place(c.lane % 8 + c.lane / 16 * 8, c.lane / 8 % 2 * 8) * 2);
}
/// Loads one half (kWhich) of this lane's gammas.
template <int kWhich, class C>
__device__ __forceinline__ void load_gammas(const C& c, uint32_t at,
                                            float4 (&gamma)[C::kTiles / 2]) {
  constexpr int kCount = C::kTiles / 4;
#pragma unroll
  for (int i = kWhich * kCount; i < (kWhich + 1) * kCount; ++i)
    gamma[i] = ptx::ld_shared_v4(at + offsetof(Factors<C::kK>, gamma) +
                                 c.lane % 4 * kGammaStride<C::kK> * 4 + i * 16);
}
template <class C>
__device__ __forceinline__ void decay_state(C& c, const float4 (&gamma)[C::kTiles / 2]) {
#pragma unroll
  for (int n = 0; n < C::kTiles; n += 2) {
    const float4 x = gamma[n / 2];
    c.state[n][0] *= x.x, c.state[n][1] *= x.y, c.state[n][2] *= x.x, c.state[n][3] *= x.y;
    c.state[n + 1][0] *= x.z, c.state[n + 1][1] *= x.w;
    c.state[n + 1][2] *= x.z, c.state[n + 1][3] *= x.w;
  }
}

// ---- products

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
template <class Item>
__device__ __forceinline__ void add_product(float (*d)[4], const uint32_t (&x)[4],
                                            const uint32_t (&square)[4]) {
  ptx::mma_16816<Item>(d[0], x, square[0], square[1]);
  ptx::mma_16816<Item>(d[1], x, square[2], square[3]);
}
/// error = v - k_norm P.
template <class C>
__device__ __forceinline__ void subtract(const C& c, const uint32_t (&v)[4], const float (*P)[4],
                                         const TokenFactors& k_norm, float (&error)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 upper = value_of(c, v[2 * n]), lower = value_of(c, v[2 * n + 1]);
    const float2 norm = k_norm.x[n];
    error[n][0] = upper.x - norm.x * P[n][0];
    error[n][1] = upper.y - norm.y * P[n][1];
    error[n][2] = lower.x - norm.x * P[n][2];
    error[n][3] = lower.y - norm.y * P[n][3];
  }
}
/// Errors as operands; in fp16 the largest finite numbers stand for larger ones.
template <class Operand>
__device__ __forceinline__ void round_errors(const float (&error)[2][4], uint32_t (&x)[4]) {
  if constexpr (kFp16<Operand>)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = ptx::cvt_satfinite_f16x2(error[i / 2][i % 2 * 2], error[i / 2][i % 2 * 2 + 1]);
  else
    chain::round_pairs<Operand>(error[0], error[1], x);
}

// ---- outputs

template <class C>
__device__ Outputs outputs_of(const C& c, const WorkItem& item) {
  if (item.state == FusedState::kTransition) return Outputs::kQt;
  const bool with_residual = C::kHasResidual && item.state == FusedState::kZero && c.a.residual;
  return with_residual ? Outputs::kWithResidual : Outputs::kRounded;
}
template <class C>
__device__ void begin_residual(C& c, const WorkItem& item) {
  if (outputs_of(c, item) != Outputs::kWithResidual) return;
  c.residual = reinterpret_cast<char*>(
      c.a.residual + c.column / 16 * kResidualLanes + c.lane +
      residual_place<C::kK>(c.a.shape, item.segment, c.tokens.begin, c.head));
}
/// Stores q_norm (sum + diag error) at `piece` in shared memory, and its residual in device memory.
template <class C>
__device__ __forceinline__ void put_outputs(C& c, Outputs outputs, const float (*sum)[4],
                                            const float (&error)[2][4], TokenFactors q_norm,
                                            const TokenFactors& diag, uint32_t piece) {
  using Operand = typename C::Operand;
  using T = typename C::T;
  if constexpr (kFp16<Operand>)
#pragma unroll
    for (float2& x : q_norm.x) {
      const float factor =
          scale_back(c, C::kHasQt && outputs == Outputs::kQt ? c.a.Qt_scale_bits : kBitsOfOne);
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
    pairs[i] = C::kHasQt && outputs == Outputs::kQt ? ptx::pack<Operand>(x, y) : ptx::pack<T>(x, y);
  }
  ptx::stmatrix_x4_trans(piece, pairs);
  if (C::kHasResidual && outputs == Outputs::kWithResidual) {
    *reinterpret_cast<uint32_t*>(c.residual) = residual_of(o);
    c.residual += c.a.residual_step;
  }
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

// ---- sub-chunks with large v, in fp16

/// The type of what fp16 does not hold.
using Wide = __nv_bfloat16;
/// Returns what `rounded`, errors as consume_subchunk() multiplied them, lacks of `exact`: nothing
/// where errors fit fp16.
template <class Operand>
__device__ void find_lacking(const float (&exact)[2][4], const float (&error)[2][4],
                             const uint32_t (&rounded)[4], uint32_t (&lacking)[4]) {
  constexpr float kMostFp16 = 65504;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 kept = ptx::unpack<Operand>(rounded[i]);
    const auto lacks = [&](int j, float x) {
      const bool fits = exact[i / 2][j] == error[i / 2][j] && fabsf(error[i / 2][j]) <= kMostFp16;
      return fits ? 0.0f : exact[i / 2][j] - x;
    };
    lacking[i] = ptx::pack<Wide>(lacks(i % 2 * 2, kept.x), lacks(i % 2 * 2 + 1, kept.y));
  }
}
/// d += lacking square, in bf16.
template <class Operand>
__device__ void add_lacking(float (*d)[4], const uint32_t (&lacking)[4],
                            const uint32_t (&square)[4]) {
  uint32_t rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = ptx::unpack<Operand>(square[i]);
    rounded[i] = ptx::pack<Wide>(x.x, x.y);
  }
  add_product<Wide>(d, lacking, rounded);
}
/// Adds what consume_subchunk() left out where it took the largest finite numbers for larger
/// errors. Tokens before those keep their bits. `pq`: as consume_subchunk() left it.
template <class C>
__device__ void repair_overflow(C& c, Outputs outputs, uint32_t at, uint32_t factors,
                                uint32_t values, const uint32_t (&v)[4], float (&pq)[4][4]) {
  using Operand = typename C::Operand;
  using Tiles = fused::Tiles<C::kK>;
  using Factors = fused::Factors<C::kK>;
  float error[2][4], exact[2][4];
  uint32_t square[4], rounded[4], lacking[4];
  subtract(c, v, pq, TokenFactors(factors + offsetof(Factors, k_norm), c.lane), error);
  round_errors<Operand>(error, rounded);
  find_lacking<Operand>(error, error, rounded, lacking);
  load_square(c, factors + offsetof(Factors, inverse), square);
  add_product<Operand>(error, rounded, square);
#pragma unroll
  for (int i = 0; i < 8; ++i) exact[i / 4][i % 4] = error[i / 4][i % 4];
  add_lacking<Operand>(exact, lacking, square);
  if constexpr (C::kKeeps) keep_errors_again(c, piece_of(c, values), exact);

  const TokenFactors k_beta(factors + offsetof(Factors, k_beta), c.lane);
  multiply(error, k_beta);
  multiply(exact, k_beta);
  round_errors<Operand>(error, rounded);
  find_lacking<Operand>(exact, error, rounded, lacking);
  load_square(c, factors + offsetof(Factors, Aqk), square);
  add_lacking<Operand>(&pq[2], lacking, square);
  if (C::kHasResidual && outputs == Outputs::kWithResidual) c.residual -= c.a.residual_step;
  put_outputs(c, outputs, &pq[2], exact, TokenFactors(factors + offsetof(Factors, q_norm), c.lane),
              TokenFactors(factors + offsetof(Factors, diag), c.lane), piece_of(c, values));
  const int token = c.lane % 16;
#pragma unroll
  for (int n = 0; n < C::kTiles; n += 2) {
    const int piece = n + c.lane / 16;
    ptx::ldmatrix_x4_trans(square, at + offsetof(Tiles, kg) + piece / 8 * kSubchunk * 128 +
                                       token * 128 + ((piece ^ token) & 7) * 16);
    add_lacking<Operand>(&c.state[n], lacking, square);
  }
  c.scale.headroom = 0;
}

// ---- items and checkpoints

__device__ inline int to_subchunks(int64_t tokens) {
  return static_cast<int>(min(tokens / kSubchunk, int64_t{1} << 30));
}
/// Finds the first checkpoint of an item. The sequences of a range never go back where there are
/// checkpoints.
template <class C>
__device__ void find_checkpoint(const C& c, ConsumerState& s) {
  const int64_t every = c.a.checkpoint_every;
  if (!c.a.map.cu_seqlens) {
    s.before = c.tokens.sequence * (c.a.map.num_tokens / every);
  } else {
    int64_t more = 0;
    for (int64_t n = s.counted + c.lane; n < c.tokens.sequence; n += 32)
      more += (c.a.map.cu_seqlens[n + 1] - c.a.map.cu_seqlens[n]) / every;
    for (int step = 16; step > 0; step /= 2) more += __shfl_xor_sync(0xffffffff, more, step);
    s.before += more;
    s.counted = c.tokens.sequence;
  }
  const int64_t done = c.tokens.begin - sequence_range(c.a.map, c.tokens.sequence).begin;
  s.checkpoint = s.before + done / every;
  s.to_checkpoint = to_subchunks(every - done % every);
}
/// The next checkpoint's place; none where the last sub-chunk lacks tokens.
template <class C>
__device__ StatePlace next_checkpoint(const C& c, ConsumerState& s) {
  const int64_t done = c.tokens.begin + static_cast<int64_t>(s.num_subchunks - s.left) * kSubchunk;
  s.to_checkpoint = to_subchunks(c.a.checkpoint_every);
  return done <= c.tokens.end ? place_in(c, c.a.checkpoints, s.checkpoint++) : StatePlace{};
}
template <class C>
__device__ void begin_item(C& c, const WorkItem& item, ConsumerState& s) {
  c.take(item);
  s.in_item = true;
  s.num_subchunks = s.left = subchunks_of<C::kBlocks>(item);
  if (c.a.checkpoints.base) find_checkpoint(c, s);
  if constexpr (C::kKeeps) begin_kept(c);
  if (C::kSegments && item.exit_interval > 0) return;  // the state goes on
  if constexpr (C::kHasResidual) begin_residual(c, item);
  c.scale = {};
  if (item.takes_state)
    take_handoff(c);
  else
    load_start(c, item);
}
/// Tells all blocks the norm of this warp's part of M, after an exit interval.
template <class C>
__device__ void put_norm(C& c, const WorkItem& item, NormCheck<C::kBlocks>& norm_check) {
  const int64_t unit = num_units<true>(c.a).scheduled + range_number<C::kBlocks>() / c.a.shape.HV;
  if (unit_of(c.a, unit).tokens.end > item.tokens.end) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < C::kTiles * 4; ++i)
      sum = fmaf(c.state[i / 4][i % 4], c.state[i / 4][i % 4], sum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    norm_check.put(item.exit_interval, c.column / 16, sum * scale_back(c) * scale_back(c));
    // v is 0 here and consumes the least headroom: without a rescale of its own a shrinking M would
    // end in fp16's least numbers.
    if (kFp16<typename C::Operand> && sum < 0x1p-10f) c.scale.headroom = 0;
  }
  if (c.column == 0 && c.lane == 0)
    c.a.exit_tokens[item.segment * c.a.shape.HV + c.head] = item.tokens.end;
}
/// A stop: before the first item, after the last sub-chunk of one, or after a sub-chunk that a
/// checkpoint is due after. Returns the sub-chunks until the next stop; 0: all is done.
template <class C>
__device__ int stop(C& c, SchedulerState& scheduler, ConsumerState& shared,
                    NormCheck<C::kBlocks>& norm_check) {
  ConsumerState s = shared;
  bool checkpoint = false;
  if (s.in_item) {
    c.take(scheduler.item);
    s.left -= s.until;
    checkpoint = c.a.checkpoints.base && (s.to_checkpoint -= s.until) == 0;
  }
  while (checkpoint || s.left == 0) {  // an empty sequence has no sub-chunks
    StatePlace place;
    bool more = true;
    if (checkpoint) {
      place = next_checkpoint(c, s);
    } else {
      const WorkItem item = scheduler.item;
      const bool interval = C::kSegments && item.exit_interval != WorkItem::kNoInterval;
      if (s.in_item && interval) put_norm(c, item, norm_check);
      if constexpr (C::kKeeps)
        if (s.in_item) end_kept(c);
      more = next_item<C::kSegments>(c.a, scheduler, norm_check);
      if (s.in_item && !(interval && more)) place = end_item(c, item);
    }
    store_state_to(c, place);  // here alone: its code is long
    if (!more) return 0;
    if (!checkpoint) begin_item(c, scheduler.item, s);
    checkpoint = false;
  }
  s.until = c.a.checkpoints.base ? min(s.left, s.to_checkpoint) : s.left;
  __syncwarp();
  if (c.lane == 0) shared = s;
  __syncwarp();
  return s.until;
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
