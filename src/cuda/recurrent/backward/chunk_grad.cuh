// SPDX-License-Identifier: Apache-2.0
// A chunk of one value head, all columns of V: from S0, dS, E and dZ the gradients of its tokens by
// q (scaled), k (normalised) and log decay. With v_new = beta E:
//   P_ij = d_o_i . v_new_j (j <= i),  R_ij = -dZ_i . v_new_j (j < i)
//   U = d_o S0^T,  W = -dZ S0^T,  X = v_new dS^T,  rowsum(S0 dS)
#pragma once

#include <algorithm>

#include "cuda/recurrent/backward/chunk.cuh"
#include "cuda/recurrent/backward/sequence.cuh"

namespace kda::cuda::backward {

/// Behind it in shared memory: ValueTiles of each tile; when they are done with, Channels.
template <int kK>
struct alignas(16) ChunkGradShared {
  int64_t sequence[kTokens];  ///< of the chunks that begin here; else -1
  float P[kTokens][kTokens];
  float R[kTokens][kTokens];
  float boundary[kK];  ///< rowsum(S0 dS)
};

template <int kBV>
struct ValueTiles {
  TokenTile<kBV> d_o, v_new, dz;
};

template <int kK, int kBV>
constexpr std::size_t chunk_grad_bytes(int64_t tiles) {
  return sizeof(ChunkGradShared<kK>) +
         std::max(sizeof(Channels<kK>), static_cast<std::size_t>(tiles) * sizeof(ValueTiles<kBV>));
}

template <int kBV>
__device__ __forceinline__ void load_value_tiles(const BackwardArgs& a, Unit& unit, int64_t token,
                                                 int count, ValueTiles<kBV>* tiles) {
  for (unit.tile = 0; unit.tile < a.sizes.tiles; ++unit.tile) {
    ValueTiles<kBV>& tile = tiles[unit.tile];
    load_values<kBV>(a, a.d_o, unit, token, count, tile.d_o);
    for (int at = threadIdx.x; at < kTokens * kBV; at += kThreads) {
      const int i = at / kBV, c = at % kBV;
      const int64_t from = value_offset<kBV>(a, unit, token + i, c);
      const bool there = i < count;
      tile.v_new[i][c] = there ? load_beta(a, unit, token + i) * a.errors[from] : 0;
      tile.dz[i][c] = there ? a.dz[from] : 0;
    }
  }
}

/// P and R, a thread a pair; 0 where j > i.
template <int kK, int kBV>
__device__ __forceinline__ void multiply_pairs(const ValueTiles<kBV>* tiles, int64_t num_tiles,
                                               ChunkGradShared<kK>& shared) {
  const int i = threadIdx.x / kTokens, j = threadIdx.x % kTokens;
  float p = 0, r = 0;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
#pragma unroll 4
    for (int c = 0; c < kBV; c += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&tiles[tile].v_new[j][c]);
      const float4 y = *reinterpret_cast<const float4*>(&tiles[tile].d_o[i][c]);
      const float4 z = *reinterpret_cast<const float4*>(&tiles[tile].dz[i][c]);
      p = fmaf(x.x, y.x, p), p = fmaf(x.y, y.y, p), p = fmaf(x.z, y.z, p), p = fmaf(x.w, y.w, p);
      r = fmaf(x.x, z.x, r), r = fmaf(x.y, z.y, r), r = fmaf(x.z, z.z, r), r = fmaf(x.w, z.w, r);
    }
  }
  shared.P[i][j] = j <= i ? p : 0;
  shared.R[i][j] = j < i ? -r : 0;
}

/// Rows and columns of this thread, four rows from `first` on: of a slot of the workspace, or (slot
/// -1) of the caller's state `view_slot` (-1: zero).
template <int kK, int kBV>
__device__ __forceinline__ void load_rows(const BackwardArgs& a, const Unit& unit, float* states,
                                          int64_t slot, const StateView& view, int64_t view_slot,
                                          int first, float (&S)[4][4]) {
  using T = Tile<kK, kBV>;
  if (slot >= 0) {
    load_tile(tile_at<kK, kBV>(a, states, slot, unit) + first * kThreads, S);
    return;
  }
  const int row = T::row() + first, column = static_cast<int>(unit.tile) * kBV + T::column();
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      S[r][c] = 0;
      if (view_slot < 0 || row + r >= a.shape.K || column + c >= a.shape.V) continue;
      const int64_t at = state_offset(view, view_slot, unit.head, row + r, column + c);
      S[r][c] = view.bf16 ? load_state<true>(view.base, at) : load_state<false>(view.base, at);
    }
}

/// rows[16, kK] = sign values S^T, four rows of S at a time, which come from load(tile, first, S).
template <int kK, int kBV, class Values, class Load>
__device__ __forceinline__ void multiply_rows(const BackwardArgs& a, Values&& values, float sign,
                                              int count, float* rows, int64_t stride, Load&& load) {
  using T = Tile<kK, kBV>;
  constexpr int kEach = kTokens / T::kColumnThreads;  // tokens that a thread is left with
  const int row0 = T::row(), column = T::column();
#pragma unroll 1
  for (int first = 0; first < T::kRows; first += 4) {
    float sums[4][kTokens] = {};
#pragma unroll 1
    for (int64_t tile = 0; tile < a.sizes.tiles; ++tile) {
      float S[4][4];
      load(tile, first, S);
      const TokenTile<kBV>& x = values(tile);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const float4 y = *reinterpret_cast<const float4*>(&x[i][column]);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float sum = fmaf(y.w, S[r][3], sums[r][i]);
          sum = fmaf(y.z, S[r][2], sum), sum = fmaf(y.y, S[r][1], sum);
          sums[r][i] = fmaf(y.x, S[r][0], sum);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) reduce_scatter<kTokens, T::kColumnThreads / 2>(sums[r]);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = column / 4 * kEach + e;
      if (i < count)
        *reinterpret_cast<float4*>(rows + i * stride + row0 + first) =
            make_float4(sign * sums[0][e], sign * sums[1][e], sign * sums[2][e], sign * sums[3][e]);
    }
  }
}

/// shared.boundary = rowsum(S0 dS)
template <int kK, int kBV, class Load, class LoadGradient>
__device__ __forceinline__ void multiply_boundary(const BackwardArgs& a,
                                                  ChunkGradShared<kK>& shared, Load&& load,
                                                  LoadGradient&& load_gradient) {
  using T = Tile<kK, kBV>;
#pragma unroll 1
  for (int first = 0; first < T::kRows; first += 4) {
    float sums[4] = {};
#pragma unroll 1
    for (int64_t tile = 0; tile < a.sizes.tiles; ++tile) {
      float S[4][4], dS[4][4];
      load(tile, first, S), load_gradient(tile, first, dS);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[r] = fmaf(S[r][c], dS[r][c], sums[r]);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float sum = sum_over(sums[r], 1, T::kColumnThreads);
      if (T::column() == 0) shared.boundary[T::row() + first + r] = sum;
    }
  }
}

/// Gradients of one channel of a chunk, tokens as elements.
struct Channel {
  float dq[kTokens], dk[kTokens], dg[kTokens];
  float column[kTokens];  ///< dk as a key that later tokens read
};

/// Pairs of tokens: from U, W, X in `rows` (at channel d) to dq, dk, dg there.
template <int kK>
__device__ __forceinline__ void finish_channel(const ChunkGradShared<kK>& shared,
                                               const Channels<kK>& chunk, int d, int count,
                                               float* rows, int64_t stride) {
  Channel x;
  float gamma = 1;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const bool there = i < count;
    gamma *= chunk.a[i][d];
    x.dq[i] = there ? gamma * rows[i * stride + d] : 0;
    x.dk[i] = there ? gamma * rows[i * stride + kK + d] : 0;
    x.column[i] = there ? rows[i * stride + 2 * kK + d] : 0;
  }
  float through = gamma * shared.boundary[d], after = 1;
#pragma unroll
  for (int i = kTokens - 1; i >= 0; --i) {
    through += fmaf(chunk.q[i][d], x.dq[i], chunk.k[i][d] * x.dk[i]);
    x.dg[i] = through;
    x.column[i] *= after;
    after *= chunk.a[i][d];
  }
  float before = 0;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    x.dg[i] += before;
    before = fmaf(chunk.k[i][d], x.column[i], before);
  }
#pragma unroll
  for (int j = 0; j < kTokens - 1; ++j) {
    float decayed[kTokens], key = chunk.k[j][d], later = 0;
#pragma unroll
    for (int i = j + 1; i < kTokens; ++i) decayed[i] = key *= chunk.a[i][d];
#pragma unroll
    for (int i = kTokens - 1; i > j; --i) {
      const float p = shared.P[i][j], r = shared.R[i][j];
      later = fmaf(p, chunk.q[i][d], fmaf(r, chunk.k[i][d], later));
      x.dg[i] = fmaf(decayed[i], later, x.dg[i]);
      x.dq[i] = fmaf(p, decayed[i], x.dq[i]);
      x.dk[i] = fmaf(r, decayed[i], x.dk[i]);
      later *= chunk.a[i][d];
    }
    x.column[j] += later;
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (i >= count) continue;
    const float diagonal = shared.P[i][i];
    rows[i * stride + d] = fmaf(diagonal, chunk.k[i][d], x.dq[i]);
    rows[i * stride + kK + d] = fmaf(diagonal, chunk.q[i][d], x.dk[i] + x.column[i]);
    rows[i * stride + 2 * kK + d] = x.dg[i];
  }
}

template <int kK, int kBV, class Args>
__device__ __forceinline__ void chunk_grad(const Args& a, Unit& unit, int64_t token,
                                           ChunkGradShared<kK>& shared) {
  const int64_t end = unit.begin + unit.length;
  const int count = static_cast<int>(min(int64_t{kTokens}, end - token));
  auto* tiles = reinterpret_cast<ValueTiles<kBV>*>(&shared + 1);
  load_value_tiles(a, unit, token, count, tiles);
  __syncthreads();
  multiply_pairs(tiles, a.sizes.tiles, shared);

  const int64_t slot = token == unit.begin ? -1 : (token - unit.low) / kTokens;
  const int64_t slot_behind = token + count == end ? -1 : (token + kTokens - unit.low) / kTokens;
  const int64_t initial = state_slot(a.initial, unit.sequence);
  const int64_t final_slot = state_slot(a.d_final, unit.sequence);
  const auto load = [&](int64_t tile, int row, float(&S)[4][4]) {
    unit.tile = tile;
    load_rows<kK, kBV>(a, unit, a.states, slot, a.initial, initial, row, S);
  };
  const auto load_gradient = [&](int64_t tile, int row, float(&dS)[4][4]) {
    unit.tile = tile;
    load_rows<kK, kBV>(a, unit, a.d_states, slot_behind, a.d_final, final_slot, row, dS);
  };
  float* rows = row_at<kK>(a, unit.low, token, unit.head);
  const int64_t stride = a.shape.HV * kRowFloats<kK>;
  multiply_rows<kK, kBV>(
      a, [&](int64_t tile) -> const TokenTile<kBV>& { return tiles[tile].d_o; }, 1, count, rows,
      stride, load);
  multiply_rows<kK, kBV>(
      a, [&](int64_t tile) -> const TokenTile<kBV>& { return tiles[tile].dz; }, -1, count,
      rows + kK, stride, load);
  multiply_rows<kK, kBV>(
      a, [&](int64_t tile) -> const TokenTile<kBV>& { return tiles[tile].v_new; }, 1, count,
      rows + 2 * kK, stride, load_gradient);
  multiply_boundary<kK, kBV>(a, shared, load, load_gradient);
  __syncthreads();  // the tiles are done with
  auto& channels = *reinterpret_cast<Channels<kK>*>(&shared + 1);
  load_channels<true, kK>(a, unit, token, count, channels, nullptr);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < a.shape.K)
    finish_channel(shared, channels, threadIdx.x, count, rows, stride);
}

/// A block 16 tokens of the window and a value head: the chunk that begins there, or several short
/// ones.
template <int kK, int kBV, class Args>
__global__ void __launch_bounds__(kThreads)
    backward_chunk_grad_kernel(const __grid_constant__ Args a) {
  auto& shared = *reinterpret_cast<ChunkGradShared<kK>*>(ptx::dynamic_shared());
  const auto HV = static_cast<unsigned>(a.shape.HV);
  Unit unit;
  unit.head = blockIdx.x % HV;
  unit.q_head = q_head_of(a, unit.head, HV);
  unit.low = a.index * a.sizes.window;
  const int64_t token = unit.low + int64_t{blockIdx.x / HV} * kTokens;
  if (threadIdx.x < kTokens) {
    const int64_t t = token + threadIdx.x, n = sequence_at(a, t);
    const bool begins = n >= 0 && (t - sequence_range(a.map, n).begin) % kTokens == 0;
    shared.sequence[threadIdx.x] = begins ? n : -1;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kTokens; ++i) {
    unit.sequence = shared.sequence[i];
    if (unit.sequence < 0) continue;
    const TokenRange tokens = sequence_range(a.map, unit.sequence);
    unit.begin = tokens.begin, unit.length = tokens.end - tokens.begin;
    chunk_grad<kK, kBV>(a, unit, token + i, shared);
    __syncthreads();  // before the next one
  }
}

}  // namespace kda::cuda::backward
