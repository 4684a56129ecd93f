// SPDX-License-Identifier: Apache-2.0
// From right to left over the chunks of a window, for some columns of V:
//   dv_new = kend dS + A^T d_o - N^T dZ    dZ = beta dv_new
//   dS <- Gamma dS + qgam^T d_o - kgam^T dZ
// and what these columns add to the gradients by q (scaled), k (normalised), log decay and step.
#pragma once

#include "cuda/backward/chunk.cuh"

namespace kda::cuda::backward {

template <int kK, int kBV>
struct alignas(16) ReverseShared {
  Chunk<kK, kBV> chunk;
  TokenTile<kBV> d_o, v_new, dz;    ///< dz is kend dS at first
  float P[kTokens][kTokens];        ///< d_o_i . v_new_j
  float R[kTokens][kTokens];        ///< -dZ_i . v_new_j
  float d_beta[kBV / 32][kTokens];  ///< of the columns of a warp
  float boundary[kK];               ///< rowsum(S0 dS)
};

/// The same place of two tokens is as far apart as this.
template <int kK>
__device__ __forceinline__ int64_t row_stride(const BackwardArgs& a) {
  return a.shape.HV * a.sizes.tiles * kRowFloats<kK>;
}

/// dZ of a column by backward substitution, a thread a column.
template <int kK, int kBV>
__device__ __forceinline__ void solve_back(const BackwardArgs& a, const Unit& unit, int64_t token,
                                           int count, ReverseShared<kK, kBV>& shared) {
  const int c = threadIdx.x;
  if (c >= kBV) return;
  const Chunk<kK, kBV>& chunk = shared.chunk;
  float y[kTokens], d_beta[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) y[i] = shared.dz[i][c];
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    const float x = shared.d_o[j][c];
#pragma unroll
    for (int i = 0; i <= j; ++i) y[i] = fmaf(chunk.A[j][i], x, y[i]);
  }
#pragma unroll
  for (int j = kTokens - 1; j >= 0; --j) {
    float error = 0;
    if (j < count)
      error =
          a.errors[(((token + j - unit.low) * a.shape.HV + unit.head) * a.sizes.tiles + unit.tile) *
                       kBV +
                   c];
    const float dz = chunk.beta[j] * y[j];
    d_beta[j] = y[j] * error;
    shared.v_new[j][c] = chunk.beta[j] * error;
    shared.dz[j][c] = dz;
#pragma unroll
    for (int i = 0; i < j; ++i) y[i] = fmaf(-chunk.N[j][i], dz, y[i]);
    const int64_t column = unit.tile * kBV + c;
    if (a.dv.base && j < count && column < a.shape.V)
      store_element(a.dv.base, a.dv.type,
                    row_offset(a.dv, a.map, unit.sequence, token + j, unit.head) + column, dz);
  }
  reduce_scatter<kTokens, 16>(d_beta);
  const int lane = threadIdx.x % 32;
  if (lane % 2 == 0) shared.d_beta[threadIdx.x / 32][lane / 2] = d_beta[0];
}

/// P and R, a thread a pair; 0 where j > i.
template <int kK, int kBV>
__device__ __forceinline__ void multiply_pairs(ReverseShared<kK, kBV>& shared) {
  const int i = threadIdx.x / kTokens, j = threadIdx.x % kTokens;
  float p = 0, r = 0;
#pragma unroll 4
  for (int c = 0; c < kBV; c += 4) {
    const float4 x = *reinterpret_cast<const float4*>(&shared.v_new[j][c]);
    const float4 y = *reinterpret_cast<const float4*>(&shared.d_o[i][c]);
    const float4 z = *reinterpret_cast<const float4*>(&shared.dz[i][c]);
    p = fmaf(x.x, y.x, p), p = fmaf(x.y, y.y, p), p = fmaf(x.z, y.z, p), p = fmaf(x.w, y.w, p);
    r = fmaf(x.x, z.x, r), r = fmaf(x.y, z.y, r), r = fmaf(x.z, z.z, r), r = fmaf(x.w, z.w, r);
  }
  shared.P[i][j] = j <= i ? p : 0;
  shared.R[i][j] = j < i ? -r : 0;
}

/// rows[16, kK] = sign tile S^T, for the tokens that there are.
template <int kK, int kBV>
__device__ __forceinline__ void multiply_rows(const TokenTile<kBV>& tile,
                                              const float (&S)[Tile<kK, kBV>::kRows][4], float sign,
                                              int count, float* rows, int64_t stride) {
  using T = Tile<kK, kBV>;
  constexpr int kEach = kTokens / T::kColumnThreads;  // tokens that a thread is left with
  const int row0 = T::row(), column = T::column();
#pragma unroll
  for (int first = 0; first < T::kRows; first += 4) {
    float sums[4][kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(&tile[i][column]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float(&row)[4] = S[first + r];
        sums[r][i] = fmaf(x.x, row[0], fmaf(x.y, row[1], fmaf(x.z, row[2], x.w * row[3])));
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
template <int kK, int kBV>
__device__ __forceinline__ void multiply_boundary(const float (&S)[Tile<kK, kBV>::kRows][4],
                                                  const float (&dS)[Tile<kK, kBV>::kRows][4],
                                                  ReverseShared<kK, kBV>& shared) {
  using T = Tile<kK, kBV>;
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) sum = fmaf(S[r][c], dS[r][c], sum);
    sum = sum_over(sum, 1, T::kColumnThreads);
    if (T::column() == 0) shared.boundary[T::row() + r] = sum;
  }
}

/// dS <- Gamma dS + qgam^T d_o - kgam^T dZ
template <int kK, int kBV>
__device__ __forceinline__ void step_back(const ReverseShared<kK, kBV>& shared,
                                          float (&dS)[Tile<kK, kBV>::kRows][4]) {
  using T = Tile<kK, kBV>;
  const int row0 = T::row(), column = T::column();
  const Chunk<kK, kBV>& chunk = shared.chunk;
  decay_tile(chunk, row0, dS);
  float decay[T::kRows];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) decay[r] = 1;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(&shared.d_o[i][column]);
    const float4 z = *reinterpret_cast<const float4*>(&shared.dz[i][column]);
#pragma unroll
    for (int rows = 0; rows < T::kRows; rows += 4) {
      float a[4], q[4], k[4];
      read4(chunk.a, i, row0 + rows, a);
      read4(chunk.q, i, row0 + rows, q), read4(chunk.k, i, row0 + rows, k);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float(&row)[4] = dS[rows + r];
        decay[rows + r] *= a[r];
        const float query = q[r] * decay[rows + r], key = -k[r] * decay[rows + r];
        row[0] = fmaf(query, x.x, fmaf(key, z.x, row[0]));
        row[1] = fmaf(query, x.y, fmaf(key, z.y, row[1]));
        row[2] = fmaf(query, x.z, fmaf(key, z.z, row[2]));
        row[3] = fmaf(query, x.w, fmaf(key, z.w, row[3]));
      }
    }
  }
}

/// Gradients of one channel of a chunk, tokens as elements.
struct Channel {
  float dq[kTokens], dk[kTokens], dg[kTokens];
  float column[kTokens];  ///< dk as a key that later tokens read
};

/// Pairs of tokens: from U, W, X in `rows` (at channel d) to dq, dk, dg there.
template <int kK, int kBV>
__device__ __forceinline__ void finish_channel(const ReverseShared<kK, kBV>& shared, int d,
                                               int count, float* rows, int64_t stride) {
  const Chunk<kK, kBV>& chunk = shared.chunk;
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

template <int kK, int kBV>
__global__ void __launch_bounds__(kThreads)
    backward_reverse_kernel(const __grid_constant__ BackwardArgs a) {
  using T = Tile<kK, kBV>;
  auto& shared = *reinterpret_cast<ReverseShared<kK, kBV>*>(ptx::dynamic_shared());
  const Unit unit = unit_of(a, a.index);
  const int64_t n = unit.sequence;
  const bool empty_here = unit.length == 0 && unit.starts_here();
  if (unit.first >= unit.last && !empty_here) return;
  float dS[T::kRows][4];
  if (unit.last == unit.chunks)
    read_state<kK, kBV>(a, a.d_final, state_slot(a.d_final, n), unit, dS);
  else
    load_tile(tile_at<kK, kBV>(a, a.carry, (a.index + 1) % 2, unit), dS);
  const int64_t stride = row_stride<kK>(a);
  for (int64_t c = unit.last - 1; c >= unit.first; --c) {
    const int64_t token = unit.token(c);
    const int count = unit.count(c);
    float* rows =
        a.rows + (((token - unit.low) * a.shape.HV + unit.head) * a.sizes.tiles + unit.tile) *
                     kRowFloats<kK>;
    __syncthreads();  // the chunk behind is done with
    load_chunk<true>(a, unit, token, count, shared.chunk);
    load_values<kBV>(a, a.d_o, unit, token, count, shared.d_o);
    __syncthreads();
    prepare_chunk<true>(shared.chunk);
    __syncthreads();  // decay_less_1 is done with
    read_keys<true>(shared.chunk, dS, shared.dz);
    __syncthreads();
    solve_back(a, unit, token, count, shared);
    float S[T::kRows][4];
    if (c == 0)
      read_state<kK, kBV>(a, a.initial, state_slot(a.initial, n), unit, S);
    else
      load_tile(tile_at<kK, kBV>(a, a.states, (token - unit.low) / kTokens, unit), S);
    __syncthreads();
    multiply_pairs(shared);
    multiply_rows<kK, kBV>(shared.d_o, S, 1, count, rows, stride);
    multiply_rows<kK, kBV>(shared.dz, S, -1, count, rows + kK, stride);
    multiply_rows<kK, kBV>(shared.v_new, dS, 1, count, rows + 2 * kK, stride);
    multiply_boundary(S, dS, shared);
    step_back(shared, dS);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < a.shape.K)
      finish_channel(shared, threadIdx.x, count, rows, stride);
    if (static_cast<int>(threadIdx.x) < count) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kBV / 32; ++w) sum += shared.d_beta[w][threadIdx.x];
      rows[threadIdx.x * stride + 3 * kK] = sum;
    }
  }
  if (unit.first > 0) {
    store_tile(dS, tile_at<kK, kBV>(a, a.carry, a.index % 2, unit));
    return;
  }
  if (!a.d_initial.base) return;
  const bool none = state_slot(a.initial, n) < 0;  // no gradient of what is not there
  for_each_element<kK, kBV>(a, a.d_initial, n, unit, [&](int r, int c, int64_t at) {
    store_state(a.d_initial, at, none ? 0 : dS[r][c]);
  });
}

}  // namespace kda::cuda::backward
