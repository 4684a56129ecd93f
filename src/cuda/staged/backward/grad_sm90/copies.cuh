// SPDX-License-Identifier: Apache-2.0
// The warps that load and store. Tensors of the workspace lie as the products want them and are
// copied whole; rows of the caller's are copied in pieces of 16 bytes.
#pragma once

#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/tokens.cuh"
#include "cuda/staged/backward/grad_sm90/shared.cuh"

namespace kda::cuda::sm90::grad {

/// A chunk and value head of those that the block takes.
struct Task {
  unsigned tile;
  ChunkTokens chunk;
  int head;
  __device__ Task(const FinishedGradArgs& a, unsigned index)
      : tile(index),
        chunk(chunk_tokens(a.map, a.shape.heads.quotient(index))),
        head(static_cast<int>(a.shape.heads.remainder(index))) {}
};

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
                                          const Task& task, int head, const Pieces& pieces) {
  const uint32_t target = ptx::shared_address(to);
  const int rows = view.base ? task.chunk.count - pieces.row : 0;
  const auto* from = static_cast<const Element16*>(view.base) +
                     chunk_offset(view, task.chunk, head) + pieces.row * view.stride_t +
                     pieces.column;
#pragma unroll 4
  for (int i = 0; i < Pieces::kCount; ++i, from += Pieces::kStep * view.stride_t)
    ptx::cp_async<16>(target + pieces.place(i), from, i * Pieces::kStep < rows);
}

/// A thread has a token and two channels; they are on their way while it waits.
struct RawNumbers {
  uint32_t beta = 0;
  float bias[2] = {}, A_log = 0;
  __device__ RawNumbers(const FinishedGradArgs& a, const Task& task, int thread) {
    const GateView& gate = a.gate;
    if (thread < task.chunk.count)
      beta = load_bits(a.beta.base, a.beta.type,
                       chunk_offset(a.beta, task.chunk, task.head) + thread * a.beta.stride_t);
    if (gate.dt_bias)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        bias[i] = gate.dt_bias[task.head * gate.stride_dt + thread + kCopiers * i];
    if (gate.A_log) A_log = gate.A_log[task.head * gate.stride_A];
  }
};

__device__ __forceinline__ void store_numbers(const FinishedGradArgs& a, const Task& task,
                                              int thread, const RawNumbers& raw, Numbers& numbers) {
  const GateView& gate = a.gate;
  const bool exists = thread < task.chunk.count;
  const float raw_beta = float_of(raw.beta, a.beta.type);
  const float beta = exists ? beta_value(gate, raw_beta) : 0;
  const bool plain = gate.beta_mode == BetaMode::kPlain;
  const bool small = plain && exists && !(fabsf(beta) >= cuda::grad::kSmallBeta);
  const bool has_small = __any_sync(~0u, small);
  if (thread % 32 == 0) numbers.has_small[thread / 32] = has_small;
  numbers.beta[thread] = beta;
  // Through the sigmoid beta cancels: beta' = beta sigmoid(-raw).
  numbers.dbeta[thread] = plain ? 1 / beta : 1 / (1 + expf(raw_beta));
#pragma unroll
  for (int i = 0; i < 2; ++i) numbers.bias[thread + kCopiers * i] = raw.bias[i];
  if (thread == 0) numbers.rate = expf(raw.A_log), numbers.count = task.chunk.count;
}

template <bool kGrouped>
__device__ __forceinline__ int q_head_of(const FinishedGradArgs& a, const Task& task) {
  if constexpr (!kGrouped) return task.head;
  return static_cast<int>(a.shape.group.quotient(static_cast<unsigned>(task.head)));
}

template <bool kGrouped>
__device__ __forceinline__ void run_loads(const FinishedGradArgs& a, Shared& s, int thread) {
  const unsigned tiles = existing_tiles(a);
#pragma unroll 1
  for (Turns<kGrouped> turns(a); turns.tile < tiles; turns.advance(a)) {
    const int turn = turns.count;
    const unsigned tile = turns.tile;
    ptx::make_opaque(thread);  // addresses are computed again, not spilled
    const Task task(a, tile);
    const int q_head = q_head_of<kGrouped>(a, task);
    const RawNumbers raw(a, task, thread);
    const Pieces pieces(thread);
    const auto copy_tiles = [&](auto& to, const void* base) {
      ptx::cp_async_bulk(&to, static_cast<const char*>(base) + tile * sizeof(to),
                         static_cast<int>(sizeof(to)), s.values_full);
    };
    wait_empty(s.d_o_empty, turn);
    copy_rows(s.d_o, a.d_o, task, task.head, pieces);
    wait_empty(s.gates_empty[turn % 2], turn / 2);
    copy_rows(s.gates[turn % 2], a.g, task, task.head, pieces);
    store_numbers(a, task, thread, raw, s.numbers[turn % 2]);
    ptx::mbarrier_arrive(s.rows_full);
    wait_empty(s.d_state_empty, turn);
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(s.values_full,
                                     static_cast<int>(2 * sizeof(s.state) + 2 * sizeof(s.errors)));
      copy_tiles(s.d_state, a.dh);
      copy_tiles(s.errors, a.errors);
    }
    wait_empty(s.state_empty, turn);
    if (thread == 0) {
      copy_tiles(s.state, a.h);
      copy_tiles(s.dz, a.dz);
    }
    ptx::mbarrier_arrive_after_copies(s.values_full);
    wait_empty(s.q_empty, turn);
    copy_rows(s.q, a.q, task, q_head, pieces);
    wait_empty(s.k_empty, turn);
    copy_rows(s.k, a.k, task, q_head, pieces);
    ptx::mbarrier_arrive_after_copies(s.rows_full);
  }
}

/// Rows of the tokens of the chunk.
__device__ __forceinline__ void store_rows(const Tile (&from)[kHalves], const RowView& view,
                                           const Task& task, int head, const Pieces& pieces) {
  if (!view.base) return;
  const auto* source = reinterpret_cast<const char*>(from);
  auto* to = static_cast<Element16*>(view.base) + chunk_offset(view, task.chunk, head) +
             pieces.row * view.stride_t + pieces.column;
  const int rows = task.chunk.count - pieces.row;
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
                                           const Numbers& numbers, const Task& task, int token) {
  if (!a.dbeta.base || token >= task.chunk.count) return;
  store_element(a.dbeta.base, a.dbeta.type,
                chunk_offset(a.dbeta, task.chunk, task.head) + token * a.dbeta.stride_t,
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

template <bool kGrouped>
__device__ __forceinline__ void run_stores(const FinishedGradArgs& a, Shared& s, int thread) {
  const Pieces pieces(thread);
  const unsigned tiles = existing_tiles(a);
  Turns<kGrouped> turns(a);
#pragma unroll 1
  for (; turns.tile < tiles; turns.advance(a)) {
    const int turn = turns.count;
    const unsigned tile = turns.tile;
    const Task task(a, tile);
    const int q_head = q_head_of<kGrouped>(a, task);
    const bool finishes = !turns.has_later(a);  // dq and dk
    const Numbers& numbers = s.numbers[turn % 2];
    wait_full(s.out_full, 0);  // two in each turn
    store_beta(a, s, numbers, task, thread);
    if (finishes) store_rows(s.out, a.dq, task, q_head, pieces);
    ptx::mbarrier_arrive(s.out_empty);
    wait_full(s.out_full, 1);
    if (finishes) store_rows(s.out, a.dk, task, q_head, pieces);
    ptx::mbarrier_arrive(s.out_empty);
    wait_full(s.gates_done[turn % 2], turn / 2);
    store_rows(s.gates[turn % 2], a.dg, task, task.head, pieces);
    if (a.sums) store_sums(a, s.sums, tile, thread);
    if (thread < kLeftWords) {
      unsigned left = numbers.has_small[thread];
      for (int i = 0; i < kWorkerWarps; ++i) left |= s.out_of_range[turn % 2][i];
      a.left[tile * kLeftWords + thread] = left;
    }
    ptx::mbarrier_arrive(s.gates_empty[turn % 2]);
  }
  for (; turns.tile < a.tiles; turns.advance(a)) {
    if (thread < kLeftWords) a.left[turns.tile * kLeftWords + thread] = 0;
    for (int d = thread; a.sums && d <= kK; d += kCopiers) sums_of(a, turns.tile)[d] = 0;
  }
}

}  // namespace kda::cuda::sm90::grad
