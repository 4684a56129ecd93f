// SPDX-License-Identifier: Apache-2.0
// From right to left over the chunks of a window, for some columns of V:
//   dv_new = kend dS + A^T d_o - N^T dZ    dZ = beta dv_new
//   dS <- Gamma dS + qgam^T d_o - kgam^T dZ
#pragma once

#include "cuda/recurrent/backward/chunk.cuh"

namespace kda::cuda::backward {

template <int kK, int kBV>
struct alignas(16) ReverseShared {
  Chunk<kK, kBV> chunk;
  TokenTile<kBV> d_o, dz;           ///< dz is kend dS at first
  float d_beta[kBV / 32][kTokens];  ///< of the columns of a warp
};

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
    if (j < count) error = a.errors[value_offset<kBV>(a, unit, token + j, c)];
    const float dz = chunk.beta[j] * y[j];
    d_beta[j] = y[j] * error;
    shared.dz[j][c] = dz;
    if (j < count) a.dz[value_offset<kBV>(a, unit, token + j, c)] = dz;
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

template <int kK, int kBV, class Args>
__global__ void __launch_bounds__(kThreads)
    backward_reverse_kernel(const __grid_constant__ Args a) {
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
  for (int64_t c = unit.last - 1; c >= unit.first; --c) {
    const int64_t token = unit.token(c);
    const int count = unit.count(c);
    if (c + 1 < unit.chunks)
      store_tile(dS, tile_at<kK, kBV>(a, a.d_states, (token + kTokens - unit.low) / kTokens, unit));
    __syncthreads();  // the chunk behind is done with
    load_chunk<true>(a, unit, token, count, shared.chunk);
    load_values<kBV>(a, a.d_o, unit, token, count, shared.d_o);
    __syncthreads();
    prepare_chunk<true>(shared.chunk);
    __syncthreads();  // decay_less_1 is done with
    read_keys<true>(shared.chunk, dS, shared.dz);
    __syncthreads();
    solve_back(a, unit, token, count, shared);
    __syncthreads();
    step_back(shared, dS);
    const int i = threadIdx.x;
    if (i < count) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kBV / 32; ++w) sum += shared.d_beta[w][i];
      row_at<kK>(a, unit.low, token + i, unit.head)[3 * kK + unit.tile] = sum;
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
