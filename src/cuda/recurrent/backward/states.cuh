// SPDX-License-Identifier: Apache-2.0
// From left to right: the state before every chunk of a window, and the errors of its tokens
//   E = v - kgam S0 - N (beta E);   S <- Gamma S + kend^T (beta E)
// or, with starts_only, over whole sequences the states before the first chunks of windows.
#pragma once

#include "cuda/recurrent/backward/chunk.cuh"
#include "cuda/tile/metadata.cuh"

namespace kda::cuda::backward {

template <int kK, int kBV>
struct alignas(16) StatesShared {
  Chunk<kK, kBV> chunk;
  TokenTile<kBV> v, read;  ///< v is beta E at last
};

/// E of a column, a thread a column.
template <int kK, int kBV>
__device__ __forceinline__ void solve_errors(const BackwardArgs& a, const Unit& unit, int64_t token,
                                             int count, StatesShared<kK, kBV>& shared) {
  const int c = threadIdx.x;
  if (c >= kBV) return;
  float e[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) e[i] = shared.v[i][c] - shared.read[i][c];
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    const float x = shared.chunk.beta[j] * e[j];
    shared.v[j][c] = x;
#pragma unroll
    for (int i = j + 1; i < kTokens; ++i) e[i] = fmaf(-shared.chunk.N[i][j], x, e[i]);
  }
  if (a.starts_only) return;
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
    if (i < count) a.errors[value_offset<kBV>(a, unit, token + i, c)] = e[i];
}

/// S <- Gamma S + kend^T v_new
template <int kK, int kBV>
__device__ __forceinline__ void advance(const StatesShared<kK, kBV>& shared,
                                        float (&S)[Tile<kK, kBV>::kRows][4]) {
  using T = Tile<kK, kBV>;
  const int row0 = T::row(), column = T::column();
  const Chunk<kK, kBV>& chunk = shared.chunk;
  decay_tile(chunk, row0, S);
  float decay[T::kRows];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) decay[r] = 1;
#pragma unroll
  for (int i = kTokens - 1; i >= 0; --i) {
    const float4 x = *reinterpret_cast<const float4*>(&shared.v[i][column]);
#pragma unroll
    for (int rows = 0; rows < T::kRows; rows += 4) {
      float a[4], k[4];
      read4(chunk.a, i, row0 + rows, a), read4(chunk.k, i, row0 + rows, k);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float(&row)[4] = S[rows + r];
        const float key = k[r] * decay[rows + r];
        decay[rows + r] *= a[r];
        row[0] = fmaf(key, x.x, row[0]), row[1] = fmaf(key, x.y, row[1]);
        row[2] = fmaf(key, x.z, row[2]), row[3] = fmaf(key, x.w, row[3]);
      }
    }
  }
}

template <int kK, int kBV, class Args>
__global__ void __launch_bounds__(kThreads) backward_states_kernel(const __grid_constant__ Args a) {
  using T = Tile<kK, kBV>;
  auto& shared = *reinterpret_cast<StatesShared<kK, kBV>*>(ptx::dynamic_shared());
  if (blockIdx.x == 0 && a.flags) {
    write_metadata_flags({a.flags, a.accumulate_flags, a.map, 1, 0}, a.initial, {}, {});
    __syncthreads();
  }
  Unit unit = unit_of(a, a.index);
  if (a.starts_only) {
    // Up to the last chunk that is the first of a window and not of its sequence.
    if (unit.chunks == 0) return;
    const int64_t low = unit.token(unit.chunks - 1) / a.sizes.window * a.sizes.window;
    if (unit.begin >= low) return;
    unit.first = 0, unit.last = (low - unit.begin - 1) / kTokens + 2;
  }
  if (unit.first >= unit.last) return;
  float S[T::kRows][4];
  if (unit.first == 0)
    read_state<kK, kBV>(a, a.initial, state_slot(a.initial, unit.sequence), unit, S);
  else
    load_tile(tile_at<kK, kBV>(a, a.starts, a.index - 1, unit), S);
  for (int64_t c = unit.first; c < unit.last; ++c) {
    const int64_t token = unit.token(c);
    const int count = unit.count(c);
    if (c > 0 && !a.starts_only)
      store_tile(S, tile_at<kK, kBV>(a, a.states, (token - unit.low) / kTokens, unit));
    if (c > 0 && a.starts_only) {
      const int64_t window = token / a.sizes.window;
      if (window != unit.token(c - 1) / a.sizes.window)
        store_tile(S, tile_at<kK, kBV>(a, a.starts, window - 1, unit));
    }
    __syncthreads();  // the chunk before is done with
    load_chunk<false>(a, unit, token, count, shared.chunk);
    load_values<kBV>(a, a.v, unit, token, count, shared.v);
    __syncthreads();
    prepare_chunk<false>(shared.chunk);
    __syncthreads();  // decay_less_1 is done with
    read_keys<false>(shared.chunk, S, shared.read);
    __syncthreads();
    solve_errors(a, unit, token, count, shared);
    __syncthreads();
    advance(shared, S);
  }
}

}  // namespace kda::cuda::backward
