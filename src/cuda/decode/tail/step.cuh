// SPDX-License-Identifier: Apache-2.0
// The kernel of decode with a tail where sequences have one token or none, K = V = 128. Every sum
// has the terms and the order that kernel.cuh gives it, so o and S_0 have the same bits.
//
// A thread has one channel of all rows, and one column of v_new and o; a warp has 32 columns of
// S_0. Rows are copied to shared memory by the warp that has their channels, so none waits for
// another one until there are sums over channels. A step in order, and why there:
//   1. ask for the token, and find the tail; ask for keys, gates and v_new of its rows; ask the L2
//      for S_0 where it stays there until it is read
//   2. newest row first, D runs along as a product, which is k_i D(t, i) at once; __syncthreads
//   3. sums of these rows with k and q, and squares of keys, a few rows a warp
//   4. where a fold is due: the rows that fold take their norms; S_0 is folded, written and met by
//      k D(t, 0) and q D(t, 0) in one pass
//   5. else S_0 meets these two, four patches at a time; __syncthreads
//   6. the scores meet v_new; o; the token's row is appended
#pragma once

#include "cuda/decode/tail/channels.cuh"
#include "cuda/decode/tail/kernel.cuh"

namespace kda::cuda::tail {

constexpr int kStepSide = 4;  // rows that are read side by side

/// A thread has its channel of a token, and its column of v, as they came in.
struct OwnToken {
  uint32_t q = 0, k = 0, g = 0, v = 0;

  __device__ void load(const TailArgs& a, const TokenPlaces& places, int element) {
    const auto bits = [&](const RowView& view, int64_t head, int at) {
      return load_bits(view.base, view.type, places.token_at(view, head, 0) + at);
    };
    k = bits(a.k, places.unit.q_head, element), q = bits(a.q, places.unit.q_head, element);
    g = bits(a.g, places.unit.head, element * gate_step(a));
    v = bits(a.v, places.unit.head, element);
  }
};

KDA_HOST_DEVICE_INLINE ChannelLayout layout_of_step(const TailArgs& a) {
  return step_layout(a.rows, size_of(a.tail_k), size_of(a.tail_g), gate_step(a) == 0);
}

/// A head of a sequence.
struct StepHead : RowPlaces, Channels {
  const int sure, target;  ///< rows in front of the token, and those of them that fold

  __device__ StepHead(const RowPlaces& places, int fold_rows)
      : RowPlaces(places),
        Channels(layout_of_step(places.a)),
        sure(places.start.sure()),
        target(fold_rows) {}

  /// Rows as they came in.
  __device__ float* raw_keys() const { return shared + layout.raw_keys(); }
  /// One gate a head is a word a row, and each warp has its own.
  __device__ float* raw_gates() const {
    return shared + layout.raw_gates() + (gate_step(a) == 0 ? warp * layout.rows : 0);
  }
  /// The factor that normalises the key of a row.
  __device__ float* factors() const { return shared + layout.factors(); }

  /// Asks for this warp's elements of all rows of a tensor of the tail, of `size` bytes each.
  __device__ void copy_own(const RowView& view, int64_t head, int size, float* to) const {
    const int shift = size == 4 ? 3 : 2;  // a row has 8 or 4 vectors of 16 bytes
    const char* base = static_cast<const char*>(view.base);
#pragma unroll 1
    for (int n = lane; n < sure << shift; n += 32) {
      const int row = n >> shift, part = 16 * (n - (row << shift)) + 32 * size * warp;
      ptx::cp_async<16>(ptx::shared_address(to) + row * kChannels * size + part,
                        base + tail_at(view, head, row) * size + part);
    }
  }
  __device__ void copy_rows() const {
    copy_own(a.tail_k, unit.q_head, size_of(a.tail_k), raw_keys());
    if (gate_step(a) != 0) {
      copy_own(a.tail_g, unit.head, size_of(a.tail_g), raw_gates());
    } else {
      for (int row = lane; row < sure; row += 32)
        raw_gates()[row] = load_element(a.tail_g, tail_at(a.tail_g, unit.head, row));
    }
    ptx::cp_async_commit();
    copy_own(a.tail_v_new, unit.head, 4, v_new(0));
    ptx::cp_async_commit();
  }

  // ---- rows as they came in to keys that are decayed

  /// This thread's element of rows from `last` down, none below `first`. Looks at the type once.
  __device__ void read(const float* raw, Element type, int last, int first,
                       float (&x)[kStepSide]) const {
    const auto each = [&](auto&& element) {
#pragma unroll
      for (int j = 0; j < kStepSide; ++j)
        x[j] = element(max(last - j, first) * kChannels + channel);
    };
    if (type == Element::kFloat32)
      each([&](int at) { return raw[at]; });
    else if (type == Element::kBFloat16)
      each([&](int at) { return __uint_as_float(load_bits(raw, Element::kBFloat16, at) << 16); });
    else
      each([&](int at) { return float_of(load_bits(raw, type, at), Element::kFloat16); });
  }
  __device__ void read_gates(int last, int first, float (&x)[kStepSide]) const {
    if (gate_step(a) != 0) return read(raw_gates(), a.g.type, last, first, x);
#pragma unroll
    for (int j = 0; j < kStepSide; ++j) x[j] = raw_gates()[max(last - j, first)];
  }
  /// Keys of rows [first, end) take the decays behind them, which begin with `product`. Returns the
  /// product of all.
  template <GateMode kMode>
  __device__ float decay_keys(int first, int end, float product, float bias, float rate) const {
#pragma unroll 1
    for (int last = end - 1; last >= first; last -= kStepSide) {
      float keys[kStepSide], decays[kStepSide];
      read(raw_keys(), a.k.type, last, first, keys);
      read_gates(last, first, decays);
#pragma unroll
      for (float& x : decays) x = decay_of<kMode>(a.gate, x, bias, rate);
#pragma unroll
      for (int j = 0; j < kStepSide; ++j) {
        if (last - j < first) continue;
        key(last - j)[channel] = keys[j] * product;
        product *= decays[j];
      }
    }
    return product;
  }
  /// Keys decayed up to the token or to where their group folds, and what meets S_0.
  __device__ void make_rows(const OwnToken& token) const {
    const float k = float_of(token.k, a.k.type), q = float_of(token.q, a.q.type);
    const float bias = bias_of(channel), rate = rate_of();
    own_key()[channel] = k, own_query()[channel] = q;
    ptx::cp_async_wait<1>();
    __syncwarp();
    with_gate_mode(a.gate.gate_mode, [&](auto gate_mode) {
      constexpr GateMode kMode = decltype(gate_mode)::value;
      float product = decay_of<kMode>(a.gate, float_of(token.g, a.g.type), bias, rate);
      product = decay_keys<kMode>(target, sure, product, bias, rate);
      with_state(0)[channel] = k * product, with_state(1)[channel] = q * product;
      for_each_group([&](int group, int first, int end) {
        decay(group)[channel] = decay_keys<kMode>(first, end, 1.0f, bias, rate);
      });
    });
  }
  /// visit(group, first, end) of the rows that fold.
  template <class Visit>
  __device__ __forceinline__ void for_each_group(Visit&& visit) const {
#pragma unroll 1
    for (int group = 0, first = 0; first < target; ++group) {
      const int end = fold_end(start, first, target);
      visit(group, first, end);
      first = end;
    }
  }

  // ---- sums over channels

  /// Scores of rows, and what normalises their keys.
  __device__ void make_scores() const {
    float k[4], q[4];
    spread(own_key() + 4 * lane, k), spread(own_query() + 4 * lane, q);
#pragma unroll 1
    for (int at = warp; at < sure; at += 4 * kChannelWarps) {
      float sums[8] = {}, squares[4] = {};
      score(at, sure, k, q, sums, [&](int j, int row) {
        RawVector<4> bits;
        float raw[4];
        bits.load(raw_keys(), a.k.type, row * kChannels + 4 * lane);
        bits.convert(a.k.type, raw);
        add_products(raw, raw, squares[j]);
      });
      reduce_scatter<4, 16>(squares);
      const float of_key = norm_factor(a.gate, squares[0]);
      const int row = scored_row(at);
      if (lane % 4 != 0 || row >= sure) continue;
      store_score(row, sums[0] * of_key);
      if (of_q() == 0) factors()[row] = of_key;
    }
    sum_own(k, q);
  }

  // ---- S_0

  /// Rows are folded into S_0, which is written and met by the token.
  template <class Tile>
  __device__ __forceinline__ void fold(const Tile& tile, const State& state,
                                       float (&sums)[2][4]) const {
    using Patch = typename Tile::Patch;
    tile.rewrite(
        state.from, state.to,
        [&](int j, Patch(&x)[2]) {
          for_each_group([&](int group, int first, int end) {
            tile.fold({key(first), v_new(first), decay(group), end - first, kChannels}, j, x);
          });
        },
        [&](int j, const Patch(&x)[2]) {
          multiply(tile, j, x[0], sums), multiply(tile, j + 1, x[1], sums);
        });
  }
  template <class Tile>
  __device__ void run_state() const {
    const State state = state_of(a, start, target);
    if (state.is_written) {  // the same for all threads
      __syncthreads();
      for (int row = 0; row < target; ++row) key(row)[channel] *= factors()[row];
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    for_each_tile<Tile>(a, unit.head, [&](const Tile& tile, float(&sums)[2][4]) {
      state.is_written ? fold(tile, state, sums) : read_state(tile, state.to, sums);
    });
  }

  // ---- the token

  /// v_new of the thread's column; writes o.
  __device__ float solve(const OwnToken& token) const {
    float with_k = product(0)[channel], with_q = product(1)[channel];
#pragma unroll 4
    for (int row = sure - 1; row >= target; --row) {
      const float2 score = scores()[row];
      const float x = v_new(row)[channel];
      with_k = fmaf(score.x, x, with_k), with_q = fmaf(score.y, x, with_q);
    }
    const float beta = beta_value(a.gate, load_element(a.beta, token_at(a.beta, unit.head, 0)));
    return finish(a, float_of(token.v, a.v.type), beta, with_k, with_q,
                  token_at(a.o, unit.head, 0) + channel);
  }
  /// The token's row. Keys that several value heads share are copied by a kernel behind.
  template <bool kMayBeSplit>
  __device__ void append(const OwnToken& token, float own_v_new) const {
    const auto at = [&](const RowView& view, int64_t head) {
      return tail_at(view, head, sure) + channel;
    };
    static_cast<float*>(a.tail_v_new.base)[at(a.tail_v_new, unit.head)] = own_v_new;
    if (a.shape.H == a.shape.HV) store_bits(a.tail_k, at(a.tail_k, unit.q_head), token.k);
    if (gate_step(a) != 0 || channel == 0) store_bits(a.tail_g, at(a.tail_g, unit.head), token.g);
    if constexpr (kMayBeSplit) {
      if (!a.rest.base) return;
      store_bits(a.tail_v, at(a.tail_v, unit.head), token.v);
      if (channel == 0)
        copy_row(a.beta, token_at(a.beta, unit.head, 0), a.tail_beta, at(a.tail_beta, unit.head), 1,
                 0, 1);
    }
  }
};

template <Access kAccess, bool kPacked>
__global__ void __launch_bounds__(kChannels, 6) step_kernel(const __grid_constant__ TailArgs a) {
  using Columns = Tile<kChannels, kAccess, kPacked>;
  Task task;
  if (!find_tokens(a, &task)) return;
  OwnToken token;
  if (task.count > 0)
    token.load(a, {a, task.unit, task.tokens.begin}, static_cast<int>(threadIdx.x));
  if (!find_tail<Columns::kMayBeSplit>(a, &task)) return;
  const int fold_rows = fold_target(a, task.unit.n, task.start) - task.start.folded;
  // No token reads S_0: a sequence that waits, or whose split state has been folded in front.
  if (task.count == 0 && !writes_state(a, task.start, fold_rows)) return finish_task(a, task);
  const StepHead of({a, task.unit, task.start, task.tokens.begin}, fold_rows);
  of.copy_rows();
  // Not of many blocks: S_0 would not stay in the L2 until it is read.
  if (threadIdx.x == 0 && task.start.source >= 0 && gridDim.x <= 2 * a.ahead)
    prefetch_state<kChannels>(a.initial, task.start.source, task.unit.head);
  of.make_rows(token);
  __syncthreads();
  of.make_scores();
  of.template run_state<Columns>();
  ptx::cp_async_wait<0>();
  __syncthreads();
  if (task.count > 0) of.template append<Columns::kMayBeSplit>(token, of.solve(token));
  finish_task(a, task);
}

}  // namespace kda::cuda::tail
