// SPDX-License-Identifier: Apache-2.0
// The warps that load and store. Tensors of the workspace lie as the products want them and are
// copied whole; rows of the caller's are copied in pieces of 16 bytes.
#pragma once

#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/tokens.cuh"
#include "cuda/staged/backward/grad_sm90/shared.cuh"

namespace kda::cuda::sm90::grad {

/// A thread's pieces of rows of 128 elements: the same piece of every fourth row.
struct Pieces {
  static constexpr int kStep = 4, kCount = kChunk / kStep;
  int row, column;  // the first; elements
  uint32_t at;      // bytes from the start of a pair of tiles
  __device__ explicit Pieces(int thread)
      : row(thread / 16),
        column(thread % 16 * 8),
        at(static_cast<uint32_t>(2 * swizzled(row, thread % 16))) {}
  /// Four rows on, a row's last bits differ in one from those before.
  __device__ uint32_t place(int i) const { return (at ^ i % 2 * 64) + i * kStep * 128; }
};

/// The tokens of the chunk in a tensor; zeros past them, and without the tensor.
__device__ __forceinline__ void copy_rows(const Tile (&to)[kHalves], const RowView& view,
                                          const ChunkTokens& chunk, int head,
                                          const Pieces& pieces) {
  const uint32_t target = ptx::shared_address(to);
  const int rows = view.base ? chunk.count - pieces.row : 0;
  const auto* from = static_cast<const Element16*>(view.base) + chunk_offset(view, chunk, head) +
                     pieces.row * view.stride_t + pieces.column;
#pragma unroll 4
  for (int i = 0; i < Pieces::kCount; ++i, from += Pieces::kStep * view.stride_t)
    ptx::cp_async<16>(target + pieces.place(i), from, i * Pieces::kStep < rows);
}

/// To the L2: a line of 128 bytes a thread at a time.
__device__ __forceinline__ void prefetch_rows(const RowView& view, const ChunkTokens& chunk,
                                              int head, int thread) {
  constexpr int kStep = kCopiers / 2;
  const auto* from = static_cast<const Element16*>(view.base) + chunk_offset(view, chunk, head) +
                     thread / 2 * view.stride_t + thread % 2 * 64;
#pragma unroll 1
  for (int row = thread / 2; row < chunk.count; row += kStep, from += kStep * view.stride_t)
    ptx::prefetch_l2(from);
}

__device__ __forceinline__ float sum_of_squares(uint4 x) {
  float sum = 0;
#pragma unroll
  for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
    const float2 y = ptx::unpack<Element16>(pair);
    sum = fmaf(y.x, y.x, fmaf(y.y, y.y, sum));
  }
  return sum;
}

/// Eight lanes a row; the factors 1 / |x| go to `norms`, 1 without the norm.
__device__ __forceinline__ void find_norms(const FinishedGradArgs& a, const RowView& view,
                                           const ChunkTokens& chunk, int head, int thread,
                                           float (&norms)[kChunk]) {
  constexpr int kStep = kCopiers / 8;
  const auto* from = static_cast<const Element16*>(view.base) + chunk_offset(view, chunk, head) +
                     thread / 8 * view.stride_t + thread % 8 * 8;
#pragma unroll 1
  for (int row = thread / 8; row < kChunk; row += kStep, from += kStep * view.stride_t) {
    float norm = 1;
    if (a.gate.l2norm) {
      uint4 x[2] = {};
      if (row < chunk.count) {
        x[0] = *reinterpret_cast<const uint4*>(from);
        x[1] = *reinterpret_cast<const uint4*>(from + 64);
      }
      norm = rsqrtf(cuda::grad::sum_over_8(sum_of_squares(x[0]) + sum_of_squares(x[1])) + 1e-6f);
    }
    if (thread % 8 == 0) norms[row] = norm;
  }
}

/// A thread has a token and two channels. The norms lie in q_row and k_along until then.
__device__ __forceinline__ void find_numbers(const FinishedGradArgs& a, const ChunkTokens& chunk,
                                             int head, int thread, Numbers& numbers) {
  const GateView& gate = a.gate;
  const bool exists = thread < chunk.count;
  uint32_t bits = 0;
  float bias[2] = {}, A_log = 0;
  if (exists)
    bits = load_bits(a.beta.base, a.beta.type,
                     chunk_offset(a.beta, chunk, head) + thread * a.beta.stride_t);
  if (gate.dt_bias)
    for (int i = 0; i < 2; ++i)
      bias[i] = gate.dt_bias[head * gate.stride_dt + thread + kCopiers * i];
  if (gate.A_log) A_log = gate.A_log[head * gate.stride_A];
  const float raw = float_of(bits, a.beta.type);
  const float beta = exists ? beta_value(gate, raw) : 0;
  const bool plain = gate.beta_mode == BetaMode::kPlain;
  const bool small = plain && exists && !(fabsf(beta) >= cuda::grad::kSmallBeta);
  const bool has_small = __any_sync(~0u, small);
  if (thread % 32 == 0) numbers.has_small[thread / 32] = has_small;
  const float q = numbers.q_row[thread], k = numbers.k_along[thread];
  const float q_row = gate.scale * q, column = beta * k;
  numbers.q_row[thread] = q_row, numbers.q_state[thread] = q_row / cuda::grad::kAnchor;
  numbers.minus_k_row[thread] = -k, numbers.minus_k_state[thread] = -k / cuda::grad::kAnchor;
  numbers.column[thread] = column, numbers.column_state[thread] = column * cuda::grad::kAnchor;
  numbers.q_along[thread] = gate.l2norm ? q * q : 0;
  numbers.k_along[thread] = gate.l2norm ? k * k : 0;
  // Through the sigmoid beta cancels: beta' = beta sigmoid(-raw).
  numbers.dbeta[thread] = plain ? 1 / beta : 1 / (1 + expf(raw));
  for (int i = 0; i < 2; ++i) numbers.bias[thread + kCopiers * i] = bias[i];
  if (thread == 0) numbers.rate = expf(A_log), numbers.count = chunk.count;
}

__device__ __forceinline__ void run_loads(const FinishedGradArgs& a, Shared& s, int thread) {
  const unsigned tiles = existing_tiles(a);
  int turn = 0;
#pragma unroll 1
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(tile));
    const auto head = static_cast<int>(a.shape.heads.remainder(tile));
    ptx::make_opaque(thread);  // addresses are computed again, not spilled
    const Pieces pieces(thread);
    const auto copy_tiles = [&](auto& to, const void* base) {
      ptx::cp_async_bulk(&to, static_cast<const char*>(base) + tile * sizeof(to),
                         static_cast<int>(sizeof(to)), s.values_full);
    };
    if (a.gate.l2norm) {
      prefetch_rows(a.q, chunk, head, thread);
      prefetch_rows(a.k, chunk, head, thread);
    }
    wait_empty(s.d_o_empty, turn);
    copy_rows(s.d_o, a.d_o, chunk, head, pieces);
    wait_empty(s.d_state_empty, turn);
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(s.values_full,
                                     static_cast<int>(2 * sizeof(s.state) + 2 * sizeof(s.errors)));
      copy_tiles(s.d_state, a.dh);
      copy_tiles(s.errors, a.errors);
    }
    wait_empty(s.gates_empty[turn % 2], turn / 2);
    copy_rows(s.gates[turn % 2], a.g, chunk, head, pieces);
    Numbers& numbers = s.numbers[turn % 2];
    find_norms(a, a.q, chunk, head, thread, numbers.q_row);
    find_norms(a, a.k, chunk, head, thread, numbers.k_along);
    __syncwarp();
    find_numbers(a, chunk, head, thread, numbers);
    ptx::mbarrier_arrive(s.rows_full);
    wait_empty(s.state_empty, turn);
    if (thread == 0) {
      copy_tiles(s.state, a.h);
      copy_tiles(s.dz, a.dz);
    }
    ptx::mbarrier_arrive_after_copies(s.values_full);
    wait_empty(s.q_empty, turn);
    copy_rows(s.q, a.q, chunk, head, pieces);
    wait_empty(s.k_empty, turn);
    copy_rows(s.k, a.k, chunk, head, pieces);
    ptx::mbarrier_arrive_after_copies(s.rows_full);
  }
}

/// Rows of the tokens of the chunk.
__device__ __forceinline__ void store_rows(const Tile (&from)[kHalves], const RowView& view,
                                           const ChunkTokens& chunk, int head,
                                           const Pieces& pieces) {
  if (!view.base) return;
  const auto* source = reinterpret_cast<const char*>(from);
  auto* to = static_cast<Element16*>(view.base) + chunk_offset(view, chunk, head) +
             pieces.row * view.stride_t + pieces.column;
  const int rows = chunk.count - pieces.row;
#pragma unroll 1
  for (int first = 0; first < Pieces::kCount; first += 4) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = *reinterpret_cast<const uint4*>(source + pieces.place(first + i));
#pragma unroll
    for (int i = 0; i < 4; ++i, to += Pieces::kStep * view.stride_t)
      if ((first + i) * Pieces::kStep < rows) *reinterpret_cast<uint4*>(to) = x[i];
  }
}

__device__ __forceinline__ void store_beta(const FinishedGradArgs& a, const Shared& s,
                                           const Numbers& numbers, const ChunkTokens& chunk,
                                           int head, int token) {
  if (!a.dbeta.base || token >= chunk.count) return;
  store_element(a.dbeta.base, a.dbeta.type,
                chunk_offset(a.dbeta, chunk, head) + token * a.dbeta.stride_t,
                s.products[token] * numbers.dbeta[token]);
}

__device__ __forceinline__ double* sums_of(const FinishedGradArgs& a, unsigned tile) {
  return a.sums + int64_t{tile} * (kK + 1);
}
__device__ __forceinline__ void store_sums(const FinishedGradArgs& a, const Sums& sums,
                                           unsigned tile, int thread) {
  double* to = sums_of(a, tile);
  for (int i = 0; i < 2; ++i) to[thread + kCopiers * i] = sums.ddt_bias[thread + kCopiers * i];
  if (thread > 0) return;
  double total = 0;
  for (int warp = 0; warp < kWorkerWarps; ++warp) total += static_cast<double>(sums.dA_log[warp]);
  to[kK] = total;
}

__device__ __forceinline__ void run_stores(const FinishedGradArgs& a, Shared& s, int thread) {
  const Pieces pieces(thread);
  const unsigned tiles = existing_tiles(a);
  unsigned tile = blockIdx.x;
  int turn = 0;
#pragma unroll 1
  for (; tile < tiles; tile += gridDim.x, ++turn) {
    const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(tile));
    const auto head = static_cast<int>(a.shape.heads.remainder(tile));
    const Numbers& numbers = s.numbers[turn % 2];
    wait_full(s.out_full, 2 * turn);
    store_beta(a, s, numbers, chunk, head, thread);
    store_rows(s.out, a.dq, chunk, head, pieces);
    ptx::mbarrier_arrive(s.out_empty);
    wait_full(s.out_full, 2 * turn + 1);
    store_rows(s.out, a.dk, chunk, head, pieces);
    ptx::mbarrier_arrive(s.out_empty);
    wait_full(s.gates_done[turn % 2], turn / 2);
    store_rows(s.gates[turn % 2], a.dg, chunk, head, pieces);
    if (a.sums) store_sums(a, s.sums, tile, thread);
    if (thread < kLeftWords) {
      unsigned left = numbers.has_small[thread];
      for (int i = 0; i < kWorkerWarps; ++i) left |= s.out_of_range[turn % 2][i];
      a.left[tile * kLeftWords + thread] = left;
    }
    ptx::mbarrier_arrive(s.gates_empty[turn % 2]);
  }
  for (; tile < a.tiles; tile += gridDim.x) {
    if (thread < kLeftWords) a.left[tile * kLeftWords + thread] = 0;
    for (int d = thread; a.sums && d <= kK; d += kCopiers) sums_of(a, tile)[d] = 0;
  }
}

}  // namespace kda::cuda::sm90::grad
