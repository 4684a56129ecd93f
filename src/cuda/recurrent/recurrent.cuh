// SPDX-License-Identifier: Apache-2.0
// The kernel of recurrent.cu and, with other arguments, of head_gates.cu.
#pragma once

#include "cuda/launch/launch.cuh"
#include "cuda/recurrent/recurrent.hpp"
#include "cuda/tile/metadata.cuh"
#include "cuda/tile/state_io.cuh"
#include "cuda/tile/token.cuh"

namespace kda::cuda::recurrent {
namespace {  // each source that launches it has kernels of its own

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = kWarps;  // tokens prepared at once, one a warp

/// Tile of kK x kBV state elements: 4 neighbouring columns and kRows rows a thread.
template <int kK, int kBV>
struct Layout {
  static constexpr int kColumnThreads = kBV / 4;
  static constexpr int kRowThreads = kThreads / kColumnThreads;
  static constexpr int kRows = kK / kRowThreads;
};

template <int kK, int kBV>
struct alignas(16) Shared {
  Token<kK> tokens[kBatch];
  float v[kBatch][kBV], beta[kBatch];
  float read[2][Layout<kK, kBV>::kRowThreads][kBV];    // partial S^T k, by parity of the token
  float output[2][Layout<kK, kBV>::kRowThreads][kBV];  // partial S^T q
};

struct Unit {
  TokenRange tokens;
  int64_t index = 0, head = 0, q_head = 0;
  int column = 0;   // first column of the tile
  int columns = 0;  // V, or K for the columns of M
  bool transition = false;
};

template <int kBV, class Args>
__device__ __forceinline__ Unit unit_of(const Args& a) {
  // 32-bit divisions, as in q_head_of().
  const unsigned v_tiles = (a.shape.V + kBV - 1) / kBV;
  const unsigned tiles = v_tiles + (a.M.base ? (a.shape.K + kBV - 1) / kBV : 0);
  const auto HV = static_cast<unsigned>(a.shape.HV);
  Unit unit;
  unsigned tile = blockIdx.x % tiles;
  unit.head = blockIdx.x / tiles % HV;
  unit.q_head = q_head_of(a, unit.head, HV);
  unit.index = blockIdx.x / tiles / HV;
  unit.tokens = range_of(a.map, unit.index);
  unit.transition = tile >= v_tiles;
  if (unit.transition) tile -= v_tiles;
  unit.column = static_cast<int>(tile) * kBV;
  unit.columns = unit.transition ? a.shape.K : a.shape.V;
  return unit;
}

/// Visits the vectors (or elements) of this thread's part of the tile: visit(r, c, offset).
template <Access kAccess, int kRows, class Visit>
__device__ __forceinline__ void for_each_piece(const StateView& view, int64_t slot, int64_t head,
                                               int row0, int column0, int K, int columns,
                                               Visit&& visit) {
  constexpr int kRowStep = kAccess == Access::kVectorsVK ? 4 : 1;
  constexpr int kColumnStep = kAccess == Access::kVectorsKV ? 4 : 1;
  int64_t at = state_offset(view, slot, head, row0, column0);
  const int64_t row_step = view.vk ? 1 : view.stride_row;
  const int64_t column_step = view.vk ? view.stride_row : 1;
#pragma unroll
  for (int r = 0; r < kRows; r += kRowStep)
#pragma unroll
    for (int c = 0; c < 4; c += kColumnStep)
      if (row0 + r < K && column0 + c < columns) visit(r, c, at + r * row_step + c * column_step);
}

template <Access kAccess, bool kBf16, int kRows>
__device__ __forceinline__ void load_tile(const StateView& view, int64_t slot, int64_t head,
                                          int row0, int column0, int K, int columns,
                                          float (&S)[kRows][4]) {
  for_each_piece<kAccess, kRows>(
      view, slot, head, row0, column0, K, columns, [&](int r, int c, int64_t at) {
        if constexpr (kAccess == Access::kScalar) {
          S[r][c] = load_state<kBf16>(view.base, at);
        } else {
          const float4 x = load4<kBf16>(view.base, at);
          if constexpr (kAccess == Access::kVectorsKV)
            S[r][0] = x.x, S[r][1] = x.y, S[r][2] = x.z, S[r][3] = x.w;
          else
            S[r][c] = x.x, S[r + 1][c] = x.y, S[r + 2][c] = x.z, S[r + 3][c] = x.w;
        }
      });
}

template <Access kAccess, int kRows>
__device__ __forceinline__ void store_tile(const StateView& view, int64_t slot, int64_t head,
                                           int row0, int column0, int K, int columns,
                                           const float (&S)[kRows][4]) {
  for_each_piece<kAccess, kRows>(
      view, slot, head, row0, column0, K, columns, [&](int r, int c, int64_t at) {
        if constexpr (kAccess == Access::kScalar)
          store_state(view, at, S[r][c]);
        else if constexpr (kAccess == Access::kVectorsKV)
          store4(view, at, make_float4(S[r][0], S[r][1], S[r][2], S[r][3]));
        else
          store4(view, at, make_float4(S[r][c], S[r + 1][c], S[r + 2][c], S[r + 3][c]));
      });
}

/// A token's inputs as a warp holds them.
template <int kK, int kBV>
struct RawToken {
  RawQK<kK> qk;
  RawGates<kK> gates;
  RawValues<kBV / 32> values;
};

/// Warp w asks for token w of a batch of `count`.
template <int kK, int kBV, class Args>
__device__ __forceinline__ void load_token(const Args& a, const Unit& unit, int64_t first,
                                           int64_t count, RawToken<kK, kBV>& raw) {
  const int warp = threadIdx.x / 32;
  if (warp >= count) return;
  const int64_t n = unit.tokens.sequence, token = first + warp;
  raw.qk.load(a, n, token, unit.q_head);
  raw.gates.load(a, n, token, unit.head);
  // The columns of M have values 0.
  raw.values.load(a, n, token, unit.head, unit.column,
                  unit.transition ? 0 : unit.columns - unit.column);
}

/// Stores what load_token() has asked for to shared memory.
template <int kK, int kBV>
__device__ __forceinline__ void prepare_token(const RecurrentArgs& a, int64_t count,
                                              const RawToken<kK, kBV>& raw,
                                              Shared<kK, kBV>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= count) return;
  raw.qk.prepare(a, shared.tokens[warp]);
  raw.gates.prepare(a, shared.tokens[warp]);
  float v[kBV / 32];
  raw.values.v.convert(a.v.type, v);
#pragma unroll
  for (int i = 0; i < kBV / 32; ++i) shared.v[warp][lane + 32 * i] = v[i];
  if (lane == 0) shared.beta[warp] = raw.values.beta_of(a);
}

/// S' = decay S;  r = S'^T k;  vn = beta (v - r);  o = scale (S'^T q + (q.k) vn);  S = S' + k vn^T
template <int kK, int kBV>
__device__ __forceinline__ void step(const RecurrentArgs& a, const Unit& unit, int64_t token,
                                     int slot, int parity, Shared<kK, kBV>& shared,
                                     float (&S)[Layout<kK, kBV>::kRows][4]) {
  using L = Layout<kK, kBV>;
  const int tx = threadIdx.x % L::kColumnThreads, ty = threadIdx.x / L::kColumnThreads;
  const int row0 = ty * L::kRows;
  const int column = unit.column + tx * 4;
  const bool outputs = !a.M.base;
  const Token<kK>& x = shared.tokens[slot];
  float read[4] = {}, out[4] = {};
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const float decay = x.decay[row0 + r], k = x.k[row0 + r], q = x.q[row0 + r];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      S[r][c] *= decay;
      read[c] = fmaf(S[r][c], k, read[c]);
      out[c] = fmaf(S[r][c], q, out[c]);
    }
  }
  *reinterpret_cast<float4*>(&shared.read[parity][ty][tx * 4]) =
      make_float4(read[0], read[1], read[2], read[3]);
  if (outputs)
    *reinterpret_cast<float4*>(&shared.output[parity][ty][tx * 4]) =
        make_float4(out[0], out[1], out[2], out[3]);
  __syncthreads();
  float sum[4] = {}, o[4] = {};
#pragma unroll
  for (int y = 0; y < L::kRowThreads; ++y) {
    const float4 part = *reinterpret_cast<const float4*>(&shared.read[parity][y][tx * 4]);
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
  const float beta = shared.beta[slot];
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] = beta * (shared.v[slot][tx * 4 + c] - sum[c]);  // v_new
  if (outputs && ty == 0) {
#pragma unroll
    for (int y = 0; y < L::kRowThreads; ++y) {
      const float4 part = *reinterpret_cast<const float4*>(&shared.output[parity][y][tx * 4]);
      o[0] += part.x, o[1] += part.y, o[2] += part.z, o[3] += part.w;
    }
    const int64_t at = row_offset(a.o, a.map, unit.tokens.sequence, token, unit.head) + column;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (column + c < unit.columns)
        store_element(a.o.base, a.o.type, at + c, a.gate.scale * fmaf(x.qk, sum[c], o[c]));
  }
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const float k = x.k[row0 + r];
#pragma unroll
    for (int c = 0; c < 4; ++c) S[r][c] = fmaf(k, sum[c], S[r][c]);
  }
}

template <int kK, int kBV, Access kAccess, class Args>
__global__ void __launch_bounds__(kThreads, 2) recurrent_kernel(const __grid_constant__ Args a) {
  using L = Layout<kK, kBV>;
  __shared__ Shared<kK, kBV> shared;
  if (blockIdx.x == 0 && a.flags) {
    const int64_t checkpoints =
        a.checkpoints.base ? checkpoints_before(a.map, a.checkpoint_every, a.map.num_sequences) : 0;
    write_metadata_flags({a.flags, a.accumulate_flags, a.map, 1, checkpoints}, a.initial,
                         a.final_state, a.checkpoints);
    __syncthreads();
  }
  const Unit unit = unit_of<kBV>(a);
  const int64_t n = unit.tokens.sequence;
  const int row0 = static_cast<int>(threadIdx.x) / L::kColumnThreads * L::kRows;
  const int column0 = unit.column + static_cast<int>(threadIdx.x) % L::kColumnThreads * 4;
  const int K = a.shape.K;
  const bool last = unit.tokens.end == sequence_range(a.map, n).end;
  if (a.M.base && a.skip_last && last) return;

  // The first tokens before the state: what they take part in waits for both.
  RawToken<kK, kBV> raw;
  load_token(a, unit, unit.tokens.begin, min(int64_t{kBatch}, unit.tokens.end - unit.tokens.begin),
             raw);
  float S[L::kRows][4] = {};
  const StateView& start_view = a.states_in.base ? a.states_in : a.initial;
  const int64_t start = a.states_in.base ? unit.index : a.M.base ? -1 : state_slot(a.initial, n);
  if (start >= 0) {
    if (start_view.bf16)
      load_tile<kAccess, true>(start_view, start, unit.head, row0, column0, K, unit.columns, S);
    else
      load_tile<kAccess, false>(start_view, start, unit.head, row0, column0, K, unit.columns, S);
  }
  if (unit.transition)
#pragma unroll
    for (int r = 0; r < L::kRows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) S[r][c] = row0 + r == column0 + c ? 1.0f : 0.0f;

  int64_t checkpoint = 0, sequence_begin = 0;
  if (a.checkpoints.base) {
    sequence_begin = sequence_range(a.map, n).begin;
    checkpoint = checkpoints_before(a.map, a.checkpoint_every, n) +
                 (unit.tokens.begin - sequence_begin) / a.checkpoint_every;
  }
  int parity = 0;
  for (int64_t first = unit.tokens.begin; first < unit.tokens.end; first += kBatch) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kBatch), unit.tokens.end - first));
    __syncthreads();  // the tokens before are done with
    prepare_token(a, count, raw, shared);
    __syncthreads();
    load_token(a, unit, first + count, min(int64_t{kBatch}, unit.tokens.end - first - count), raw);
    for (int i = 0; i < count; ++i, parity ^= 1) {
      step<kK, kBV>(a, unit, first + i, i, parity, shared, S);
      const int64_t done = first + i + 1;
      if (!a.checkpoints.base || (done - sequence_begin) % a.checkpoint_every != 0) continue;
      const int64_t slot = state_slot(a.checkpoints, checkpoint++);
      if (slot >= 0)
        store_tile<kAccess, L::kRows>(a.checkpoints, slot, unit.head, row0, column0, K,
                                      unit.columns, S);
    }
  }

  const StateView& target = !a.M.base ? a.final_state : unit.transition ? a.M : a.B;
  const int64_t slot = a.M.base ? unit.index : last ? state_slot(a.final_state, n) : -1;
  if (slot >= 0)
    store_tile<kAccess, L::kRows>(target, slot, unit.head, row0, column0, K, unit.columns, S);
}

/// Launches `kernel`, which has blocks of kBV columns.
template <int kBV, class Args>
Status launch(void (*kernel)(Args), const Args& args, const Launch& where) {
  const auto tiles = [](int64_t columns) { return (columns + kBV - 1) / kBV; };
  const int64_t spans = args.map.segments ? args.map.num_segments : args.map.num_sequences;
  const int64_t blocks =
      spans * args.shape.HV * (tiles(args.shape.V) + (args.M.base ? tiles(args.shape.K) : 0));
  return launch_kernel("recurrent", kernel, blocks, kThreads, 0, where, args);
}

}  // namespace
}  // namespace kda::cuda::recurrent
