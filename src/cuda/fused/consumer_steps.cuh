// SPDX-License-Identifier: Apache-2.0
// Steps of a consumer warp that do not depend on who multiplies: factors in registers, errors,
// outputs, sub-chunks with large v, and stops. Loops: fused/consumer.cuh, and with mma.sync
// fused/portable/consumer.cuh.
#pragma once

#include "cuda/fused/checkpoint_offsets.cuh"
#include "cuda/fused/consumer_context.cuh"
#include "cuda/fused/kept.cuh"
#include "cuda/fused/state_scale.cuh"
#include "cuda/fused/state_transfer.cuh"

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
/// Where put_outputs() stores in the place of v.
template <class C>
__device__ __forceinline__ uint32_t outputs_place(const C& c, uint32_t values) {
  if constexpr (C::kHopper) return piece_of(c, values);
  return values + c.lane % 4 * 4 +
         static_cast<uint32_t>(sizeof(Bits)) * swizzled<kSubchunk>(c.lane / 4, c.tile_column / 8);
}
/// Stores pairs of accumulators there, transposed: rows are tokens. Without stmatrix a lane has
/// pairs of four rows, 8 tokens or 8 columns apart.
template <class C>
__device__ __forceinline__ void put_transposed(uint32_t place, const uint32_t (&pairs)[4]) {
  if constexpr (C::kHopper)
    ptx::stmatrix_x4_trans(place, pairs);
  else
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::st_shared((place ^ i % 2 * 16) + i / 2 * 8 * 128, ptx::movmatrix_trans(pairs[i]));
}
/// Stores q_norm (sum + diag error) at `place` in shared memory, and its residual in device memory.
template <class C>
__device__ __forceinline__ void put_outputs(C& c, Outputs outputs, const float (*sum)[4],
                                            const float (&error)[2][4], TokenFactors q_norm,
                                            const TokenFactors& diag, uint32_t place) {
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
  put_transposed<C>(place, pairs);
  if (C::kHasResidual && outputs == Outputs::kWithResidual) {
    *reinterpret_cast<uint32_t*>(c.residual) = residual_of(o);
    c.residual += c.a.residual_step;
  }
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
              TokenFactors(factors + offsetof(Factors, diag), c.lane), outputs_place(c, values));
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
/// Finds the checkpoint of an item's sequence: it may lie elsewhere.
template <class C>
__device__ void find_offset(const C& c, ConsumerState& s) {
  const TokenRange sequence = sequence_range(c.a.map, c.tokens.sequence);
  const int64_t offset = checkpoint_offset(c.a, sequence);
  const int64_t ahead = sequence.begin + offset - c.tokens.begin;
  const bool there = offset > 0 && ahead > 0 && state_slot(c.a.checkpoints, sequence.sequence) >= 0;
  s.checkpoint = sequence.sequence;
  s.to_checkpoint = to_subchunks(there ? ahead : INT64_MAX);
}
/// Finds the first checkpoint of an item. The sequences of a range never go back where there are
/// checkpoints at all multiples.
template <class C>
__device__ void find_checkpoint(const C& c, ConsumerState& s) {
  if (c.a.checkpoint_offsets) return find_offset(c, s);
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
/// The number of the checkpoint that is due; none where the last sub-chunk lacks tokens.
template <class C>
__device__ int64_t next_checkpoint(const C& c, ConsumerState& s) {
  const int64_t done = c.tokens.begin + static_cast<int64_t>(s.num_subchunks - s.left) * kSubchunk;
  s.to_checkpoint = to_subchunks(c.a.checkpoint_every);
  const int64_t number = s.checkpoint++;
  return done <= c.tokens.end ? number : kNowhere;
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
    const WorkItem item = scheduler.item;
    int64_t to = kNowhere;
    bool more = true;
    if (checkpoint) {
      to = next_checkpoint(c, s);
    } else {
      const bool interval = C::kSegments && item.exit_interval != WorkItem::kNoInterval;
      if (s.in_item && interval) put_norm(c, item, norm_check);
      if constexpr (C::kKeeps)
        if (s.in_item) end_kept(c);
      more = next_item<C>(c.a, scheduler, norm_check);
      if (s.in_item && !(interval && more)) to = kAtEnd;
    }
    if (to != kNowhere) leave_state(c, item, to);  // here alone: its code is long
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

}  // namespace kda::cuda::sm90::fused
