// SPDX-License-Identifier: Apache-2.0
// The kernel of a decode with a ring (TailDesc::ring), of a head: one token a sequence.
//
// A thread has one channel of the rows, and one column of v_new and o; a warp has 32 columns of
// S_0. A step in order, and why there:
//   1. ask for the token and for keys and gates of all rows, 16 of them at a time; ask the L2 for
//      S_0 where it stays there until it is read
//   2. newest row first, D runs along as a product, so that k_i D(t, i) lies in shared memory
//      without any thread waiting for another one; __syncthreads
//   3. ask for v_new; sums of these rows with k and q, a few rows a warp
//   4. S_0, four patches at a time, with k D(t, 0) and q D(t, 0); __syncthreads
//   5. the scores meet v_new; o
//   6. a ring that is full, or is told to flush: all rows and the token's own are folded into S_0,
//      which comes from the L2 again. Else the token's row is written
#pragma once

#include "cuda/decode/decode.cuh"
#include "cuda/decode/tail/channels.cuh"
#include "cuda/decode/tail/ring.hpp"

namespace kda::cuda::tail {

/// A thread's element of kRingSide rows that follow each other, oldest first, as they lie in
/// memory.
struct RingColumn {
  uint32_t bits[kRingSide];

  /// Rows from `row` on, of which there are `count`.
  __device__ __forceinline__ void load(const RowView& view, int64_t at, int row, int count) {
    const auto read = [&](const auto* base) {
#pragma unroll
      for (int j = 0; j < kRingSide; ++j)
        bits[j] = j < count ? base[at + (row + j) * view.stride_t] : 0;
    };
    if (view.type == Element::kFloat32)
      read(static_cast<const uint32_t*>(view.base));
    else
      read(static_cast<const uint16_t*>(view.base));
  }
  /// Looks at the type once.
  __device__ __forceinline__ void convert(Element type, float (&x)[kRingSide]) const {
    if (type == Element::kFloat32) {
#pragma unroll
      for (int j = 0; j < kRingSide; ++j) x[j] = __uint_as_float(bits[j]);
    } else if (type == Element::kBFloat16) {
#pragma unroll
      for (int j = 0; j < kRingSide; ++j) x[j] = __uint_as_float(bits[j] << 16);
    } else {
#pragma unroll
      for (int j = 0; j < kRingSide; ++j) x[j] = float_of(bits[j], Element::kFloat16);
    }
  }
};

/// A head of a sequence.
struct RingHead : Channels {
  const RingArgs& a;
  const int64_t n, slot;
  const int head, q_head;
  const int filled;  ///< rows of the ring
  const bool flush;

  __device__ RingHead(const RingArgs& args, int64_t sequence, int64_t of_slot, int of_head)
      : Channels(ring_layout(args.rows)),
        a(args),
        n(sequence),
        slot(of_slot),
        head(of_head),
        q_head(q_head_of(args, of_head)),
        filled(args.positions[sequence]),
        flush(filled == args.rows - 1 || (args.flush && args.flush[sequence] != 0)) {}

  __device__ int64_t ring_at(const RowView& view, int of_head) const {
    return slot * view.stride_b + of_head * view.stride_h + channel;
  }
  __device__ uint32_t token_bits(const RowView& view, int of_head, int element) const {
    return load_bits(view.base, view.type, n * view.stride_b + of_head * view.stride_h + element);
  }

  /// Keys decayed up to the token, and what meets S_0. Returns the token's log decay.
  __device__ float make_rows() const {
    const uint32_t k = token_bits(a.k, q_head, channel), q = token_bits(a.q, q_head, channel),
                   g = token_bits(a.g, head, channel);
    const float bias = a.gate.gate_mode == GateMode::kLog || !a.gate.dt_bias
                           ? 0.0f
                           : a.gate.dt_bias[head * a.gate.stride_dt + channel];
    const float rate = a.gate.A_log ? expf(a.gate.A_log[head * a.gate.stride_A]) : 1.0f;
    RingColumn keys, gates;
    int first = max(filled - kRingSide, 0);
    keys.load(a.tail_k, ring_at(a.tail_k, q_head), first, filled - first);
    gates.load(a.tail_g, ring_at(a.tail_g, head), first, filled - first);
    const float own_k = float_of(k, a.k.type), own_q = float_of(q, a.q.type);
    own_key()[channel] = own_k, own_query()[channel] = own_q;
    const float log_decay = log_decay_exact(a.gate, float_of(g, a.g.type), bias, rate);
    float product = exp2f(log_decay * kLog2e);
#pragma unroll 1
    for (int end = filled; end > 0;) {
      float k_i[kRingSide], g_i[kRingSide];
      keys.convert(a.tail_k.type, k_i), gates.convert(Element::kFloat32, g_i);
#pragma unroll
      for (int j = kRingSide - 1; j >= 0; --j) {
        if (j >= end - first) continue;
        key(first + j)[channel] = k_i[j] * product;
        product *= exp2f(g_i[j] * kLog2e);
      }
      end = first, first = max(end - kRingSide, 0);
      if (end == 0) break;
      keys.load(a.tail_k, ring_at(a.tail_k, q_head), first, end - first);
      gates.load(a.tail_g, ring_at(a.tail_g, head), first, end - first);
    }
    with_state(0)[channel] = own_k * product, with_state(1)[channel] = own_q * product;
    decay(0)[channel] = product;
    return log_decay;
  }

  __device__ void make_scores() const {
    float k[4], q[4];
    spread(own_key() + 4 * lane, k), spread(own_query() + 4 * lane, q);
#pragma unroll 1
    for (int at = warp; at < filled; at += 4 * kChannelWarps) {
      float sums[8] = {};
      score(at, filled, k, q, sums, [](int, int) {});
      const int row = scored_row(at);
      if (lane % 4 == 0 && row < filled) store_score(row, sums[0]);
    }
    sum_own(k, q);
  }

  /// The token's v_new of the thread's column; writes o, and with `flush` v_new of all rows to
  /// shared memory.
  __device__ float solve(RingColumn newest) const {
    float with_k = product(0)[channel], with_q = product(1)[channel];
    int first = max(filled - kRingSide, 0);
#pragma unroll 1
    for (int end = filled; end > 0;) {
      float x[kRingSide];
      newest.convert(a.tail_v_new.type, x);
#pragma unroll
      for (int j = kRingSide - 1; j >= 0; --j) {
        if (j >= end - first) continue;
        const float2 score = scores()[first + j];
        with_k = fmaf(score.x, x[j], with_k), with_q = fmaf(score.y, x[j], with_q);
        if (flush) v_new(first + j)[channel] = x[j];
      }
      end = first, first = max(end - kRingSide, 0);
      if (end > 0) newest.load(a.tail_v_new, ring_at(a.tail_v_new, head), first, end - first);
    }
    const float v = float_of(token_bits(a.v, head, channel), a.v.type);
    const float beta = beta_value(a.gate, float_of(token_bits(a.beta, head, 0), a.beta.type));
    return finish(a, v, beta, with_k, with_q, n * a.o.stride_b + head * a.o.stride_h + channel);
  }

  /// Keys of several value heads are one row, which one of them writes.
  __device__ void append(float log_decay, float own_v_new) const {
    const auto put = [&](const RowView& view, int of_head, float x) {
      store_element(view.base, view.type, ring_at(view, of_head) + filled * view.stride_t, x);
    };
    if (value_head_of(a, q_head, 0) == head)
      put(a.tail_k, q_head, own_key()[channel] * norm_factor(a.gate, own_sums()[0]));
    put(a.tail_g, head, log_decay);
    put(a.tail_v_new, head, own_v_new);
  }

  template <class Columns>
  __device__ void fold(float own_v_new) const {
    key(filled)[channel] = own_key()[channel] * norm_factor(a.gate, own_sums()[0]);
    v_new(filled)[channel] = own_v_new;
    __syncthreads();
    const Folded rows{key(0), v_new(0), decay(0), filled + 1, kChannels};
#pragma unroll 1
    for (int c = 0; c < kWarpColumns; c += Columns::kColumns) {
      const Columns tile(a.initial, a.shape, head, warp * kWarpColumns + c);
      tile.rewrite(slot, slot,
                   [&](int j, typename Columns::Patch(&x)[2]) { tile.fold(rows, j, x); });
    }
  }
};

/// Whether a sequence says that more rows are in front of its token than a ring keeps.
__device__ __forceinline__ bool has_wrong_count(const RingArgs& a, int64_t n) {
  return static_cast<uint32_t>(a.positions[n]) >= static_cast<uint32_t>(a.rows);
}

/// Flags of what only the device knows, by a block that has nothing else to do.
__device__ __noinline__ inline void write_ring_flags(const RingArgs& a) {
  const DecodeArgs& base = a;
  decode::write_flags(base);
  bool wrong = false;
  for (int64_t n = threadIdx.x; n < a.map.num_sequences; n += blockDim.x)
    wrong |= !lacks_slot(a.initial, a.initial.indices[n]) && has_wrong_count(a, n);
  const int any = __syncthreads_or(wrong);
  if (any && threadIdx.x == 0) *a.flags |= kBadTail;
}

template <bool kPacked>
__global__ void __launch_bounds__(kChannels, 5) ring_kernel(const __grid_constant__ RingArgs a) {
  using Columns = Tile<kChannels, Access::kVectorsVK, kPacked>;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const unsigned of_flags = a.flags ? 1 : 0;
  if (blockIdx.x < of_flags) return write_ring_flags(a);
  const unsigned block = blockIdx.x - of_flags;
  const auto head = static_cast<int>(a.shape.heads.remainder(block));
  const int64_t n = a.shape.heads.quotient(block), slot = a.initial.indices[n];
  if (lacks_slot(a.initial, slot) || has_wrong_count(a, n)) {
    if (a.zero_skipped)
      store_element(a.o.base, a.o.type,
                    n * a.o.stride_b + head * a.o.stride_h + static_cast<int>(threadIdx.x), 0.0f);
    return;
  }
  // Not fp32 states of many blocks: they would not stay in the L2 until they are read.
  if (threadIdx.x == 0 && (kPacked || gridDim.x <= 2 * a.ahead))
    prefetch_state<kChannels>(a.initial, slot, head);
  const RingHead of(a, n, slot, head);
  const float log_decay = of.make_rows();
  __syncthreads();
  RingColumn newest;
  const int first = max(of.filled - kRingSide, 0);
  newest.load(a.tail_v_new, of.ring_at(a.tail_v_new, head), first, of.filled - first);
  of.make_scores();
  of.for_each_tile<Columns>(
      a, head, [&](const Columns& tile, float(&sums)[2][4]) { of.read_state(tile, slot, sums); });
  __syncthreads();
  const float v_new = of.solve(newest);
  of.flush ? of.template fold<Columns>(v_new) : of.append(log_decay, v_new);
}

}  // namespace kda::cuda::tail
