// SPDX-License-Identifier: Apache-2.0
// A chunk of 16 tokens of one value head in shared memory, and what a block does with it and with
// its tile of a state. A thread has kRows rows and 4 columns of a tile, in registers.
#pragma once

#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/tile/head_gates.hpp"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::backward {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = kBackwardTokens;
template <int kK>
constexpr int kRowFloats = backward_row(kK);

template <int kK, int kBV>
struct Tile {
  static constexpr int kFloats = kK * kBV;
  static constexpr int kColumnThreads = kBV / 4;
  static constexpr int kRows = kK * kColumnThreads / kThreads;
  static_assert(kRows % 4 == 0 && kColumnThreads <= 16);

  static __device__ __forceinline__ int column() {
    return static_cast<int>(threadIdx.x) % kColumnThreads * 4;
  }
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x) / kColumnThreads * kRows;
  }
};

/// [16, kBV]; rows 16 bytes apart in the banks.
template <int kBV>
using TokenTile = float[kTokens][kBV + 4];

/// Rows of a chunk, transformed.
template <int kK>
struct alignas(16) Channels {
  float q[kTokens][kK];  ///< normalised and scaled; zero past the last token
  float k[kTokens][kK];
  float a[kTokens][kK];  ///< decays; 1 past the last token
};

template <int kK, int kBV>
struct Chunk : Channels<kK> {
  float part[kWarps][kTokens][kBV];  ///< sums of a warp's rows
  float N[kTokens][kTokens];         ///< k_i . k_j decay(j, i), j < i
  float A[kTokens][kTokens];         ///< q_i . k_j decay(j, i), j <= i
  float beta[kTokens];
  float decay[kK];  ///< of the chunk, less 1 where `keep` is set: no digits are lost near 1
  bool keep[kK];

  /// a - 1, until the first sum over rows.
  __device__ float* decay_less_1(int token) { return &part[0][0][0] + token * kK; }
  static_assert(kK <= kWarps * kBV);
};

struct Unit {
  int64_t sequence = 0, head = 0, q_head = 0, tile = 0;
  int64_t begin = 0, length = 0;  ///< of the sequence; flattened tokens
  int64_t low = 0, high = 0;      ///< the window
  int64_t first = 0, last = 0;    ///< its chunks of the sequence: first .. last - 1
  int64_t chunks = 0;             ///< of the sequence

  __device__ int64_t token(int64_t chunk) const { return begin + chunk * kTokens; }
  __device__ int count(int64_t chunk) const {
    return static_cast<int>(min(int64_t{kTokens}, length - chunk * kTokens));
  }
  __device__ bool starts_here() const { return begin >= low && begin < high; }
};

template <class Args>
__device__ inline Unit unit_of(const Args& a, int64_t window) {
  const auto tiles = static_cast<unsigned>(a.sizes.tiles);
  const auto HV = static_cast<unsigned>(a.shape.HV);
  Unit unit;
  unit.tile = blockIdx.x % tiles;
  unit.head = blockIdx.x / tiles % HV;
  unit.q_head = q_head_of(a, unit.head, HV);
  unit.sequence = blockIdx.x / tiles / HV;
  const TokenRange tokens = sequence_range(a.map, unit.sequence);
  unit.begin = tokens.begin;
  unit.length = tokens.end - tokens.begin;
  unit.chunks = (unit.length + kTokens - 1) / kTokens;
  unit.low = window * a.sizes.window;
  // The last window also has the empty sequences behind the last token.
  unit.high = window + 1 == a.sizes.windows ? INT64_MAX : unit.low + a.sizes.window;
  const auto chunks_before = [&](int64_t token) {
    return token <= unit.begin ? 0 : min(unit.chunks, (token - unit.begin - 1) / kTokens + 1);
  };
  unit.first = chunks_before(unit.low);
  unit.last = chunks_before(unit.high);
  return unit;
}

/// This thread's part of a state of the workspace.
template <int kK, int kBV>
__device__ __forceinline__ float4* tile_at(const BackwardArgs& a, float* states, int64_t slot,
                                           const Unit& unit) {
  const int64_t tile = (slot * a.shape.HV + unit.head) * a.sizes.tiles + unit.tile;
  return reinterpret_cast<float4*>(states + tile * Tile<kK, kBV>::kFloats) + threadIdx.x;
}

template <int kRows>
__device__ __forceinline__ void load_tile(const float4* from, float (&S)[kRows][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float4 x = from[r * kThreads];
    S[r][0] = x.x, S[r][1] = x.y, S[r][2] = x.z, S[r][3] = x.w;
  }
}

template <int kRows>
__device__ __forceinline__ void store_tile(const float (&S)[kRows][4], float4* to) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    to[r * kThreads] = make_float4(S[r][0], S[r][1], S[r][2], S[r][3]);
}

/// Visits this thread's elements of a caller's state: visit(r, c, offset).
template <int kK, int kBV, class Visit>
__device__ __forceinline__ void for_each_element(const BackwardArgs& a, const StateView& view,
                                                 int64_t slot, const Unit& unit, Visit&& visit) {
  const int row0 = Tile<kK, kBV>::row();
  const int column0 = static_cast<int>(unit.tile) * kBV + Tile<kK, kBV>::column();
#pragma unroll
  for (int r = 0; r < Tile<kK, kBV>::kRows; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (row0 + r < a.shape.K && column0 + c < a.shape.V)
        visit(r, c, state_offset(view, slot, unit.head, row0 + r, column0 + c));
}

/// A state of the caller's; zero for slot -1.
template <int kK, int kBV>
__device__ __forceinline__ void read_state(const BackwardArgs& a, const StateView& view,
                                           int64_t slot, const Unit& unit,
                                           float (&S)[Tile<kK, kBV>::kRows][4]) {
#pragma unroll
  for (int r = 0; r < Tile<kK, kBV>::kRows; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) S[r][c] = 0;
  if (slot < 0) return;
  for_each_element<kK, kBV>(a, view, slot, unit, [&](int r, int c, int64_t at) {
    S[r][c] = view.bf16 ? load_state<true>(view.base, at) : load_state<false>(view.base, at);
  });
}

template <int kCount>
__device__ __forceinline__ void load_row(const RowView& view, int64_t at, int size,
                                         float (&x)[kCount], int step = 1) {
  LaneRow<kCount> row;
  row.load(view, at, size, step);
  row.convert(view.type, x);
}

__device__ __forceinline__ float rate_of(const GateView& gate, int64_t head) {
  return gate.A_log ? expf(gate.A_log[head * gate.stride_A]) : 1.0f;
}

__device__ __forceinline__ float load_beta(const BackwardArgs& a, const Unit& unit, int64_t token) {
  const int64_t at = row_offset(a.beta, a.map, unit.sequence, token, unit.head);
  return beta_value(a.gate, float_of(load_bits(a.beta.base, a.beta.type, at), a.beta.type));
}

/// Rows of a chunk, two tokens a warp; without kQueries q is left out. less_1: [16, kK] a - 1, or
/// null.
template <bool kQueries, int kK, class Args>
__device__ __forceinline__ void load_channels(const Args& a, const Unit& unit, int64_t token,
                                              int count, Channels<kK>& chunk, float* less_1) {
  constexpr int kCount = kK / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float rate = rate_of(a.gate, unit.head);
  for (int i = warp; i < kTokens; i += kWarps) {
    float q[kCount] = {}, k[kCount] = {}, g[kCount] = {};
    const bool there = i < count;
    if (there) {
      const auto offset = [&](const RowView& view, int64_t head) {
        return row_offset(view, a.map, unit.sequence, token + i, head);
      };
      if constexpr (kQueries) load_row(a.q, offset(a.q, unit.q_head), a.shape.K, q);
      load_row(a.k, offset(a.k, unit.q_head), a.shape.K, k);
      load_row(a.g, offset(a.g, unit.head), a.shape.K, g, gate_step(a));
    }
    float q_scale = a.gate.scale, k_scale = 1;
    if (a.gate.l2norm) {
      float qq = 0, kk = 0;
#pragma unroll
      for (int n = 0; n < kCount; ++n) qq += q[n] * q[n], kk += k[n] * k[n];
      if constexpr (kQueries) q_scale *= 1.0f / sqrtf(sum_over(qq, 1, 32) + 1e-6f);
      k_scale = 1.0f / sqrtf(sum_over(kk, 1, 32) + 1e-6f);
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int d = lane + 32 * n;
      if constexpr (kQueries) chunk.q[i][d] = q[n] * q_scale;
      chunk.k[i][d] = k[n] * k_scale;
      float decay = 1, decay_less_1 = 0;
      if (there && d < a.shape.K) {
        const float bias = a.gate.dt_bias ? a.gate.dt_bias[unit.head * a.gate.stride_dt + d] : 0;
        const float log_decay = log_decay_exact(a.gate, g[n], bias, rate);
        decay = expf(log_decay);
        if (less_1) decay_less_1 = expm1f(log_decay);
      }
      chunk.a[i][d] = decay;
      if (less_1) less_1[i * kK + d] = decay_less_1;
    }
  }
}

template <bool kQueries, int kK, int kBV, class Args>
__device__ __forceinline__ void load_chunk(const Args& a, const Unit& unit, int64_t token,
                                           int count, Chunk<kK, kBV>& chunk) {
  load_channels<kQueries, kK>(a, unit, token, count, chunk, chunk.decay_less_1(0));
  const int i = threadIdx.x;
  if (i < kTokens) chunk.beta[i] = i < count ? load_beta(a, unit, token + i) : 0.0f;
}

/// N, A and the decay of the chunk. Sixteen threads have the pairs of one token with later ones.
template <bool kQueries, int kK, int kBV>
__device__ __forceinline__ void prepare_chunk(Chunk<kK, kBV>& chunk) {
  const int j = threadIdx.x / 16, lane = threadIdx.x % 16;
  float keys[kTokens] = {}, queries[kTokens] = {};
#pragma unroll 1
  for (int d = lane; d < kK; d += 16) {
    float key = chunk.k[j][d];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i < j) continue;
      if (i > j) {
        key *= chunk.a[i][d];
        keys[i] = fmaf(key, chunk.k[i][d], keys[i]);
      }
      if constexpr (kQueries) queries[i] = fmaf(key, chunk.q[i][d], queries[i]);
    }
  }
  reduce_scatter<kTokens, 8>(keys);
  chunk.N[lane][j] = keys[0];
  if constexpr (kQueries) {
    reduce_scatter<kTokens, 8>(queries);
    chunk.A[lane][j] = queries[0];
  }
  for (int d = threadIdx.x; d < kK; d += kThreads) {
    float gamma = 1, less_1 = 0;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float x = chunk.decay_less_1(i)[d];
      gamma *= chunk.a[i][d];
      less_1 = fmaf(less_1, x, less_1 + x);
    }
    chunk.keep[d] = gamma > 0.5f;
    chunk.decay[d] = gamma > 0.5f ? less_1 : gamma;
  }
}

/// S <- Gamma S
template <int kRows, int kK, int kBV>
__device__ __forceinline__ void decay_tile(const Chunk<kK, kBV>& chunk, int row0,
                                           float (&S)[kRows][4]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float decay = chunk.decay[row0 + r];
    const bool keep = chunk.keep[row0 + r];
#pragma unroll
    for (int c = 0; c < 4; ++c) S[r][c] = keep ? fmaf(S[r][c], decay, S[r][c]) : S[r][c] * decay;
  }
}

/// Four rows of a token.
template <int kK>
__device__ __forceinline__ void read4(const float (&rows)[kTokens][kK], int token, int row,
                                      float (&x)[4]) {
  const float4 y = *reinterpret_cast<const float4*>(&rows[token][row]);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

/// out[16, kBV] = kgam S, or with kFromEnd kend S: keys decayed from the start of the chunk or to
/// its end. Every thread takes part; `out` is there after a barrier.
template <bool kFromEnd, int kK, int kBV>
__device__ __forceinline__ void read_keys(Chunk<kK, kBV>& chunk,
                                          const float (&S)[Tile<kK, kBV>::kRows][4],
                                          TokenTile<kBV>& out) {
  using T = Tile<kK, kBV>;
  const int row0 = T::row();
  float sums[kTokens][4] = {};
#pragma unroll
  for (int rows = 0; rows < T::kRows; rows += 4) {
    float decay[4] = {1, 1, 1, 1};
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const int i = kFromEnd ? kTokens - 1 - n : n;
      float a[4], k[4];
      read4(chunk.a, i, row0 + rows, a), read4(chunk.k, i, row0 + rows, k);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if constexpr (!kFromEnd) decay[r] *= a[r];
        const float key = k[r] * decay[r];
        if constexpr (kFromEnd) decay[r] *= a[r];
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] = fmaf(key, S[rows + r][c], sums[i][c]);
      }
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[i][c] = sum_over(sums[i][c], T::kColumnThreads, 32);
    if (lane < T::kColumnThreads)
      *reinterpret_cast<float4*>(&chunk.part[warp][i][T::column()]) =
          make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kTokens * kBV; at += kThreads) {
    const int i = at / kBV, c = at % kBV;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += chunk.part[w][i][c];
    out[i][c] = sum;
  }
}

/// A column of a token and tile, in `errors` or `dz`.
template <int kBV>
__device__ __forceinline__ int64_t value_offset(const BackwardArgs& a, const Unit& unit,
                                                int64_t token, int column) {
  return (((token - unit.low) * a.shape.HV + unit.head) * a.sizes.tiles + unit.tile) * kBV + column;
}

/// A token and value head in `rows`.
template <int kK>
__device__ __forceinline__ float* row_at(const BackwardArgs& a, int64_t low, int64_t token,
                                         int64_t head) {
  return a.rows + ((token - low) * a.shape.HV + head) * kRowFloats<kK>;
}

/// A tile of a [.., V] tensor; zero past the last token and column, and without the tensor.
template <int kBV>
__device__ __forceinline__ void load_values(const BackwardArgs& a, const RowView& view,
                                            const Unit& unit, int64_t token, int count,
                                            TokenTile<kBV>& tile) {
  for (int at = threadIdx.x; at < kTokens * kBV; at += kThreads) {
    const int i = at / kBV, c = at % kBV;
    const int64_t column = unit.tile * kBV + c;
    float x = 0;
    if (view.base && i < count && column < a.shape.V)
      x = float_of(load_bits(view.base, view.type,
                             row_offset(view, a.map, unit.sequence, token + i, unit.head) + column),
                   view.type);
    tile[i][c] = x;
  }
}

}  // namespace kda::cuda::backward
