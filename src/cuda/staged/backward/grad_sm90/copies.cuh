// SPDX-License-Identifier: Apache-2.0
// The warps that load and store. Tensors of the workspace lie as the products want them and are
// copied whole; rows of the caller's are copied in pieces of 16 bytes.
#pragma once

#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/tokens.cuh"
#include "cuda/staged/backward/grad_sm90/shared.cuh"

namespace kda::cuda::sm90::grad {

/// A chunk, and a value head or two: the last of an odd number is alone.
template <int kHeads>
struct Task {
  unsigned tile;  // of the chunk and first value head
  ChunkTokens chunk;
  int head;
  __device__ Task(const Args& a, unsigned index) : Task(a, index, of_chunk(a)) {}
  /// Whether the first (0) or second is there.
  __device__ bool has(const Args& a, int i) const { return kHeads == 1 || head + i < a.shape.HV; }

 private:
  __device__ static const Divisor& of_chunk(const Args& a) {
    return kHeads == 2 ? a.pairs : a.shape.heads;
  }
  __device__ Task(const Args& a, unsigned index, const Divisor& of_each)
      : tile(index),
        chunk(chunk_tokens(a.map, of_each.quotient(index))),
        head(kHeads * static_cast<int>(of_each.remainder(index))) {
    if (kHeads == 2) tile = of_each.quotient(index) * static_cast<unsigned>(a.shape.HV) + head;
  }
};

/// A thread's pieces of rows of 128 elements, or of rows of 64 of two value heads: the same piece
/// of every fourth row.
template <int kHeads>
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
  __device__ int head() const { return kHeads == 2 ? column / 64 : 0; }
  /// The offset of the first row from the chunk's tokens of the first value head on.
  __device__ int64_t from(const RowView& view) const {
    const int64_t rows = row * view.stride_t;
    return kHeads == 2 ? rows + head() * view.stride_h + column % 64 : rows + column;
  }
  __device__ int count(const Args& a, const Task<kHeads>& task) const {
    return task.has(a, head()) ? task.chunk.count - row : 0;
  }
};

/// The tokens of the chunk in a tensor; zeros past them, and without the tensor.
template <int kHeads>
__device__ __forceinline__ void copy_rows(const Args& a, const Tile (&to)[kHalves],
                                          const RowView& view, const Task<kHeads>& task, int head,
                                          const Pieces<kHeads>& pieces) {
  constexpr int kStep = Pieces<kHeads>::kStep;
  const uint32_t target = ptx::shared_address(to);
  const int rows = view.base ? pieces.count(a, task) : 0;
  const auto* from = static_cast<const Element16*>(view.base) +
                     chunk_offset(view, task.chunk, head) + pieces.from(view);
#pragma unroll 4
  for (int i = 0; i < Pieces<kHeads>::kCount; ++i, from += kStep * view.stride_t)
    ptx::cp_async<16>(target + pieces.place(i), from, i * kStep < rows);
}

/// A thread has two channels, and of each value head a token; they are on their way while it waits.
template <int kHeads, GradGates kGates>
struct RawNumbers {
  uint32_t beta[kHeads] = {}, g[kHeads] = {};  // g: one gate a head
  float bias[2] = {}, A_log[kHeads] = {};
  __device__ RawNumbers(const Args& a, const Task<kHeads>& task, int thread) {
    const GateView& gate = a.gate;
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
      if (thread < task.chunk.count && task.has(a, i)) beta[i] = bits_of(a.beta, task, i, thread);
    if constexpr (kGates == GradGates::kHead)
#pragma unroll
      for (int i = 0; i < kHeads; ++i)
        if (thread < task.chunk.count && task.has(a, i)) g[i] = bits_of(a.g, task, i, thread);
    if (gate.dt_bias)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (task.has(a, i))
          bias[i] = kHeads == 2 ? gate.dt_bias[(task.head + i) * gate.stride_dt + thread]
                                : gate.dt_bias[task.head * gate.stride_dt + thread + kCopiers * i];
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
      if (gate.A_log && task.has(a, i)) A_log[i] = gate.A_log[(task.head + i) * gate.stride_A];
  }

 private:
  __device__ static __forceinline__ uint32_t bits_of(const RowView& view, const Task<kHeads>& task,
                                                     int i, int token) {
    return load_bits(view.base, view.type,
                     chunk_offset(view, task.chunk, task.head + i) + token * view.stride_t);
  }
};

/// Numbers of gates that are in no tile.
template <int kHeads, GradGates kGates>
__device__ __forceinline__ void store_gate_numbers(const Args& a, const Task<kHeads>& task,
                                                   int thread,
                                                   const RawNumbers<kHeads, kGates>& raw,
                                                   GateNumbers<kHeads, kGates>& numbers) {
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if constexpr (kGates == GradGates::kHead) {
      numbers.gate[i][thread] = float_of(raw.g[i], a.g.type);
    } else if (thread == 0) {
      numbers.g_first[i] = chunk_offset(a.g, task.chunk, task.head + i);
      numbers.dg_first[i] = chunk_offset(a.dg, task.chunk, task.head + i);
      numbers.rows[i] = task.has(a, i) ? task.chunk.count : 0;
    }
  }
}

template <int kHeads, GradGates kGates>
__device__ __forceinline__ void store_numbers(const Args& a, const Task<kHeads>& task, int thread,
                                              const RawNumbers<kHeads, kGates>& raw,
                                              Numbers<kHeads, kGates>& numbers) {
  const GateView& gate = a.gate;
  const bool plain = gate.beta_mode == BetaMode::kPlain;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const bool exists = thread < task.chunk.count && task.has(a, i);
    const float raw_beta = float_of(raw.beta[i], a.beta.type);
    const float beta = exists ? beta_value(gate, raw_beta) : 0;
    const bool small = plain && exists && !(fabsf(beta) >= cuda::grad::kSmallBeta);
    const bool has_small = __any_sync(~0u, small);
    if (thread % 32 == 0) numbers.has_small[i][thread / 32] = has_small;
    numbers.beta[i][thread] = beta;
    // Through the sigmoid beta cancels: beta' = beta sigmoid(-raw).
    numbers.dbeta[i][thread] = plain ? 1 / beta : 1 / (1 + expf(raw_beta));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) numbers.bias[thread + kCopiers * i] = raw.bias[i];
  if constexpr (kGates != GradGates::kTiles) store_gate_numbers(a, task, thread, raw, numbers);
  if (thread > 0) return;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) numbers.rate[i] = expf(raw.A_log[i]);
  numbers.count = task.chunk.count;
}

template <Heads kHeads, GradGates kGates, class T>
__device__ __forceinline__ int q_head_of(const Args& a, const T& task) {
  if constexpr (kHeads != Heads::kGrouped) return task.head;
  if constexpr (kGates != GradGates::kTiles) return cuda::q_head_of(a, task.head);
  return static_cast<int>(a.shape.group.quotient(static_cast<unsigned>(task.head)));
}

/// Rows of gates, to the L2: a thread has a token.
template <int kHeads>
__device__ __forceinline__ void prefetch_gates(const Args& a, const Task<kHeads>& task,
                                               int thread) {
  if (thread >= task.chunk.count) return;
  const int size = a.g.type == Element::kFloat32 ? 4 : 2;
  const int bytes = (a.gate_step == 0 ? 1 : kK / kHeads) * size;
#pragma unroll
  for (int i = 0; i < kHeads && task.has(a, i); ++i) {
    const char* row = static_cast<const char*>(a.g.base) +
                      (chunk_offset(a.g, task.chunk, task.head + i) + thread * a.g.stride_t) * size;
    for (int byte = 0; byte < bytes; byte += 128) ptx::prefetch_l2(row + byte);
  }
}

/// Powers of two of fp16 operands: a lane has those of 16 columns of V of one kind.
template <class Scales>
__device__ __forceinline__ void store_scales(float back, int lane, Scales& scales) {
  float top = back;
#pragma unroll
  for (int i = 1; i < kScaledColumns; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  const int kind = lane / kScaledColumns;
  // Powers of two from top down. Zeros have 0, and need none.
  const unsigned below = back == 0 ? 0 : (__float_as_uint(top) - __float_as_uint(back)) >> 23;
  const float level = below < 64 ? __uint_as_float((127 - below) << 23) : 0.0f;
  scales.level[kind][lane % kScaledColumns] = ptx::pack<__half>(level, level);
  unsigned most = below;
#pragma unroll
  for (int i = 1; i < kScaledColumns; i *= 2) most |= __shfl_xor_sync(~0u, most, i);
  if (lane % kScaledColumns > 0) return;
  scales.back[kind] = top, scales.differ[kind] = most > 0;
}

template <Heads kHeads, GradGates kGates, class T>
__device__ __forceinline__ void run_loads(const Args& a, SharedOf<kHeads, kGates, T>& s,
                                          int thread) {
  constexpr int kCount = kCountOf<kHeads>;
  constexpr bool kWide = SharedOf<kHeads, kGates, T>::kWide;
  const unsigned tasks = existing_tasks<kHeads>(a);
#pragma unroll 1
  for (Turns<kHeads> turns(a); turns.task < tasks; turns.advance(a)) {
    const int turn = turns.count;
    ptx::make_opaque(thread);  // addresses are computed again, not spilled
    const Task<kCount> task(a, tile_of<kHeads, kGates>(a, turns.task));
    const int q_head = q_head_of<kHeads, kGates>(a, task);
    const RawNumbers<kCount, kGates> raw(a, task, thread);
    float back = 0;
    if constexpr (kWide)
      if (thread < 32)
        back = a.scales[int64_t{task.tile} * (kOperandKinds * kScaledColumns) + thread];
    if constexpr (kGates == GradGates::kRows) prefetch_gates(a, task, thread);
    const Pieces<kCount> pieces(thread);
    // Tiles of a pair lie behind each other. A value head that is alone leaves the second half.
    const int parts = task.has(a, kCount - 1) ? 1 : 2;
    const auto copy_tiles = [&](auto& to, const void* base) {
      ptx::cp_async_bulk(&to, static_cast<const char*>(base) + task.tile * (sizeof(to) / kCount),
                         static_cast<int>(sizeof(to)) / parts, s.values_full);
    };
    wait_empty(s.d_o_empty, turn);
    copy_rows(a, s.d_o, a.d_o, task, task.head, pieces);
    wait_empty(s.gates_empty[turn % 2], turn / 2);
    if constexpr (kGates == GradGates::kTiles)
      copy_rows(a, s.gates.of_turn[turn % 2], a.g, task, task.head, pieces);
    store_numbers(a, task, thread, raw, s.numbers[turn % 2]);
    if constexpr (kWide)
      if (thread < 32) store_scales(back, thread, s.of_elements.scales[turn % 2]);
    ptx::mbarrier_arrive(s.numbers_full);
    wait_empty(s.d_state_empty, turn);
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(
          s.values_full, static_cast<int>(2 * sizeof(s.state) + 2 * sizeof(s.errors)) / parts);
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
    copy_rows(a, s.q, a.q, task, q_head, pieces);
    wait_empty(s.k_empty, turn);
    copy_rows(a, s.k, a.k, task, q_head, pieces);
    ptx::mbarrier_arrive_after_copies(s.rows_full);
  }
}

/// Rows of the tokens of the chunk; convert(16 bytes) is what is stored.
template <int kHeads, class Convert>
__device__ __forceinline__ void store_rows(const Args& a, const Tile (&from)[kHalves],
                                           const RowView& view, const Task<kHeads>& task, int head,
                                           const Pieces<kHeads>& pieces, Convert&& convert) {
  if (!view.base) return;
  constexpr int kStep = Pieces<kHeads>::kStep;
  const auto* source = reinterpret_cast<const char*>(from);
  auto* to =
      static_cast<Element16*>(view.base) + chunk_offset(view, task.chunk, head) + pieces.from(view);
  const int rows = pieces.count(a, task);
#pragma unroll 1
  for (int first = 0; first < Pieces<kHeads>::kCount; first += 4) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = *reinterpret_cast<const uint4*>(source + pieces.place(first + i));
#pragma unroll
    for (int i = 0; i < 4; ++i, to += kStep * view.stride_t)
      if ((first + i) * kStep < rows) *reinterpret_cast<uint4*>(to) = convert(x[i]);
  }
}
template <int kHeads>
__device__ __forceinline__ void store_rows(const Args& a, const Tile (&from)[kHalves],
                                           const RowView& view, const Task<kHeads>& task, int head,
                                           const Pieces<kHeads>& pieces) {
  store_rows(a, from, view, task, head, pieces, [](uint4 x) { return x; });
}
__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float factor) {
  const float2 x = ptx::unpack<__half>(pair);
  return ptx::pack<__half>(x.x * factor, x.y * factor);
}
/// dZ, which is dv. In fp16 it is held times a power of two.
template <int kHeads, class S>
__device__ __forceinline__ void store_values(const Args& a, S& s, int turn,
                                             const Task<kHeads>& task,
                                             const Pieces<kHeads>& pieces) {
  if constexpr (S::kWide) {
    wait_full(s.of_elements.scaled, turn);
    const float back = s.of_elements.scales[turn % 2].back[kOfDz];
    store_rows(a, s.dz, a.dv, task, task.head, pieces, [&](uint4 x) {
      return uint4{scale_pair(x.x, back), scale_pair(x.y, back), scale_pair(x.z, back),
                   scale_pair(x.w, back)};
    });
  } else {
    store_rows(a, s.dz, a.dv, task, task.head, pieces);
  }
}

template <int kHeads, GradGates kGates, class T>
__device__ __forceinline__ void store_beta(const Args& a, const Shared<kHeads, kGates, T>& s,
                                           const Numbers<kHeads, kGates>& numbers,
                                           const Task<kHeads>& task, int token) {
  if (!a.dbeta.base || token >= task.chunk.count) return;
#pragma unroll
  for (int i = 0; i < kHeads; ++i)
    if (task.has(a, i))
      store_element(a.dbeta.base, a.dbeta.type,
                    chunk_offset(a.dbeta, task.chunk, task.head + i) + token * a.dbeta.stride_t,
                    s.products[i][token] * numbers.dbeta[i][token]);
}

template <int kHeads>
__device__ __forceinline__ double* sums_of(const Args& a, unsigned tile) {
  return a.sums + int64_t{tile} * (kK / kHeads + 1);
}
template <int kHeads>
__device__ __forceinline__ void store_sums(const Args& a, const Sums& sums,
                                           const Task<kHeads>& task, int thread) {
  constexpr int kWarps = kComputeWarps / kHeads;
  for (int i = 0; i < 2; ++i)
    if (task.has(a, i)) {
      double* to = kHeads == 2 ? sums_of<2>(a, task.tile + i) + thread
                               : sums_of<1>(a, task.tile) + thread + kCopiers * i;
      *to = sums.ddt_bias[thread + kCopiers * i];
    }
  if (thread > 0) return;
  for (int i = 0; i < kHeads && task.has(a, i); ++i) {
    double total = 0;
    for (int warp = 0; warp < kWarps; ++warp)
      total += static_cast<double>(sums.dA_log[kWarps * i + warp]);
    sums_of<kHeads>(a, task.tile + i)[kK / kHeads] = total;
  }
}

/// dg of one gate a head: the sums of the warps, in order.
template <int kHeads, class T>
__device__ __forceinline__ void store_head_gates(const Args& a,
                                                 const Shared<kHeads, GradGates::kHead, T>& s,
                                                 const Task<kHeads>& task, int token) {
  if (!a.dg.base || token >= task.chunk.count) return;
  constexpr int kWarps = kComputeWarps / kHeads;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += s.gates.dg[token][kWarps * i + warp];
    if (task.has(a, i))
      store_element(a.dg.base, a.dg.type,
                    chunk_offset(a.dg, task.chunk, task.head + i) + token * a.dg.stride_t, sum);
  }
}

template <Heads kHeads, GradGates kGates, class T>
__device__ __forceinline__ void run_stores(const Args& a, SharedOf<kHeads, kGates, T>& s,
                                           int thread) {
  constexpr int kCount = kCountOf<kHeads>, kWarps = kComputeWarps / kCount;
  const Pieces<kCount> pieces(thread);
  const unsigned tasks = existing_tasks<kHeads>(a);
  Turns<kHeads> turns(a);
#pragma unroll 1
  for (; turns.task < tasks; turns.advance(a)) {
    const int turn = turns.count;
    const Task<kCount> task(a, tile_of<kHeads, kGates>(a, turns.task));
    const int q_head = q_head_of<kHeads, kGates>(a, task);
    const bool finishes = !turns.has_later(a);  // dq and dk
    const Numbers<kCount, kGates>& numbers = s.numbers[turn % 2];
    wait_full(s.values_full, turn);
    store_values(a, s, turn, task, pieces);
    ptx::mbarrier_arrive(s.state_empty);
    wait_full(s.out_full, 0);  // two in each turn
    store_beta(a, s, numbers, task, thread);
    if (finishes) store_rows(a, s.out, a.dq, task, q_head, pieces);
    ptx::mbarrier_arrive(s.out_empty);
    wait_full(s.out_full, 1);
    if (finishes) store_rows(a, s.out, a.dk, task, q_head, pieces);
    ptx::mbarrier_arrive(s.out_empty);
    wait_full(s.gates_done[turn % 2], turn / 2);
    if constexpr (kGates == GradGates::kTiles)
      store_rows(a, s.gates.of_turn[turn % 2], a.dg, task, task.head, pieces);
    if constexpr (kGates == GradGates::kHead) store_head_gates(a, s, task, thread);
    if (a.sums) store_sums(a, s.sums, task, thread);
    if (const int head = thread / kFallbackWords; head < kCount && task.has(a, head)) {
      unsigned fallback = numbers.has_small[head][thread % kFallbackWords];
      for (int i = 0; i < kWarps; ++i) fallback |= s.out_of_range[turn % 2][kWarps * head + i];
      a.fallback[task.tile * kFallbackWords + thread] = fallback;
    }
    ptx::mbarrier_arrive(s.gates_empty[turn % 2]);
  }
  for (; turns.task < all_tasks<kHeads>(a); turns.advance(a)) {
    const Task<kCount> task(a, turns.task);
    for (int i = 0; i < kCount && task.has(a, i); ++i) {
      const unsigned tile = task.tile + i;
      if (thread < kFallbackWords) a.fallback[tile * kFallbackWords + thread] = 0;
      for (int d = thread; a.sums && d <= kK / kCount; d += kCopiers)
        sums_of<kCount>(a, tile)[d] = 0;
    }
  }
}

}  // namespace kda::cuda::sm90::grad
