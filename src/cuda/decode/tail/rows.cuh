// SPDX-License-Identifier: Apache-2.0
// Rows of a head in shared memory: those of the tail, oldest first, then those of the tokens. In
// dense kernels a warp makes keys and decays of whole rows, in others those of a part of the
// channels of every row.
#pragma once

#include "cuda/decode/tail/copy_row.cuh"
#include "cuda/decode/tail/layout.hpp"
#include "cuda/decode/tail/sequence.cuh"
#include "cuda/decode/tail/tile.cuh"

namespace kda::cuda::tail {

/// Neighbouring elements of a row as they lie in memory: those of 16 bits two a word.
template <int kCount>
struct RawVector {
  alignas(kCount >= 4 ? 16 : 8) uint32_t words[kCount];

  __device__ __forceinline__ void load(const RowView& view, int64_t at) {
    load(view.base, view.type, at);
  }
  __device__ __forceinline__ void load(const void* base, Element type, int64_t at) {
    if (type == Element::kFloat32)
      move<kCount>(static_cast<const uint32_t*>(base) + at, words);
    else
      move<kCount / 2>(static_cast<const uint16_t*>(base) + at, words);
  }
  __device__ __forceinline__ void store(const RowView& view, int64_t at) const {
    if (view.type == Element::kFloat32)
      move<kCount>(words, static_cast<uint32_t*>(view.base) + at);
    else
      move<kCount / 2>(words, static_cast<uint16_t*>(view.base) + at);
  }
  /// Looks at the type once.
  __device__ __forceinline__ void convert(Element type, float (&x)[kCount]) const {
    if (type == Element::kFloat32) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) x[c] = __uint_as_float(words[c]);
    } else if (type == Element::kBFloat16) {
#pragma unroll
      for (int c = 0; c < kCount; ++c)
        x[c] = __uint_as_float(c % 2 ? words[c / 2] & 0xffff0000u : words[c / 2] << 16);
    } else {
#pragma unroll
      for (int c = 0; c < kCount; ++c)
        x[c] = float_of(words[c / 2] >> 16 * (c % 2) & 0xffffu, Element::kFloat16);
    }
  }

 private:
  template <int kWords>
  __device__ static void move(const void* from, void* to) {
    using Words =
        std::conditional_t<kWords == 4, uint4, std::conditional_t<kWords == 2, uint2, uint32_t>>;
    if constexpr (kWords > 4)
      move<4>(from, to),
          move<kWords - 4>(static_cast<const uint4*>(from) + 1, static_cast<uint4*>(to) + 1);
    else
      *static_cast<Words*>(to) = *static_cast<const Words*>(from);
  }
};

__device__ __forceinline__ float load_element(const RowView& view, int64_t at) {
  return float_of(load_bits(view.base, view.type, at), view.type);
}
__device__ __forceinline__ void store_bits(const RowView& view, int64_t at, uint32_t bits) {
  if (view.type == Element::kFloat32)
    static_cast<uint32_t*>(view.base)[at] = bits;
  else
    static_cast<uint16_t*>(view.base)[at] = static_cast<uint16_t>(bits);
}

/// visit(mode) with the gate mode as a constant.
template <class Visit>
__device__ __forceinline__ void with_gate_mode(GateMode mode, Visit&& visit) {
  switch (mode) {
    case GateMode::kLog: return visit(std::integral_constant<GateMode, GateMode::kLog>());
    case GateMode::kSoftplus: return visit(std::integral_constant<GateMode, GateMode::kSoftplus>());
    case GateMode::kBounded: return visit(std::integral_constant<GateMode, GateMode::kBounded>());
  }
}
template <GateMode kMode>
__device__ __forceinline__ float decay_of(const GateView& of, float raw, float bias, float rate) {
  if constexpr (kMode == GateMode::kBounded)  // a division has a branch, which others wait for
    return exp2f(of.lower_bound * ptx::rcp(1.0f + expf(-rate * (raw + bias))) * kLog2e);
  GateView gate = of;
  gate.gate_mode = kMode;
  return exp2f(log2_decay_exact(gate, raw, bias, rate));
}

/// Where tokens of a head lie in memory.
struct TokenPlaces {
  const TailArgs& a;
  const Unit& unit;
  const int batch_row, first_token;  ///< of the batch, and in that row

  __device__ TokenPlaces(const TailArgs& args, const Unit& of, int64_t first)
      : a(args),
        unit(of),
        batch_row(args.map.cu_seqlens ? 0 : static_cast<int>(of.row)),
        first_token(
            static_cast<int>(args.map.cu_seqlens ? first : first - of.row * args.map.num_tokens)) {}

  __device__ int64_t token_at(const RowView& view, int64_t head, int token) const {
    return batch_row * view.stride_b + (first_token + token) * view.stride_t +
           static_cast<int>(head) * view.stride_h;
  }
};

/// Where the rows of its tail lie beside its tokens.
struct RowPlaces : TokenPlaces {
  const Start& start;
  const int first_row;  ///< of the tail in its tensors

  __device__ RowPlaces(const TailArgs& args, const Unit& of, const Start& at, int64_t first)
      : TokenPlaces(args, of, first),
        start(at),
        first_row(
            static_cast<int>(static_cast<uint32_t>(at.folded) % static_cast<uint32_t>(args.rows))) {
  }

  /// The row of index i, of the sure ones or of the tokens: no more than twice R from the first.
  __device__ int row_of(int i) const {
    int row = first_row + i;
    if (row >= a.rows) row -= a.rows;
    return row >= a.rows ? row - a.rows : row;
  }
  /// First element of the row of index i in a tensor of the tail.
  __device__ int64_t tail_at(const RowView& view, int64_t head, int i) const {
    return start.slot * view.stride_b + row_of(i) * view.stride_t + head * view.stride_h;
  }

  __device__ float rate_of() const {
    return a.gate.A_log ? expf(a.gate.A_log[unit.head * a.gate.stride_A]) : 1.0f;
  }
  __device__ float bias_of(int channel) const {
    if (a.gate.gate_mode == GateMode::kLog || !a.gate.dt_bias || channel >= a.shape.K) return 0;
    return a.gate.dt_bias[unit.head * a.gate.stride_dt + channel * bias_step(a)];
  }
};

/// kDense: K = V = kK, and rows of whole vectors. Those of values and queries lie in shared memory
/// as they came in. load() only asks for rows, make() waits, and the block meets behind it. All
/// keys and gates are then on their way, where their floats will be, each to the warp that makes
/// it. kApart: Layout::products_apart.
template <int kK, bool kDense, bool kApart = true>
struct Rows : RowPlaces {
  static constexpr int kKeys = kK;
  static constexpr bool kIsDense = kDense;
  static constexpr int kGroup = 4;      // rows that are made side by side
  static constexpr int kOwn = kK / 32;  // channels of a lane where a warp has whole rows
  using Own = RawVector<kOwn>;

  const int count;  ///< of tokens
  const int lane, warp, warps;
  const Layout layout;
  float* const shared;

  __device__ Rows(const TailArgs& args, const Unit& of, const Start& at, int64_t first,
                  int num_tokens)
      : RowPlaces(args, of, at, first),
        count(num_tokens),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        layout(Layout::of(args.most_sure, args.most_tokens, kDense ? kK : channels_of(args.shape.K),
                          kDense ? kK : args.shape.V, kApart)),
        shared(reinterpret_cast<float*>(ptx::dynamic_shared())) {}

  /// Floats of a row of channels.
  __device__ int keys() const { return kDense ? kK : layout.keys; }
  __device__ int parts() const { return keys() / kPart; }
  __device__ int columns() const { return kDense ? kK : layout.columns; }
  __device__ int sure() const { return start.sure(); }
  __device__ float* k(int i) const { return shared + i * keys(); }
  __device__ float* decay(int i) const { return shared + layout.decays() + i * keys(); }
  __device__ float* v_new(int i) const { return shared + layout.v_new() + i * columns(); }
  /// The row that each token follows, of a tree.
  __device__ int* before() const { return reinterpret_cast<int*>(shared + layout.before()); }
  /// k D(t, 0) and q D(t, 0) of a token of the batch.
  __device__ float* with_state(int in_batch, bool of_q) const {
    return shared + layout.with_state() + (2 * in_batch + (of_q ? 1 : 0)) * keys();
  }
  /// S_0^T of that, a number a column. Where it has no room of its own it takes that of v_new,
  /// which is made of it, and of q, which has been read. The batch begins at `token`.
  __device__ float* product(int token, int in_batch, bool of_q) const {
    if constexpr (!kApart)
      return of_q ? shared + layout.q() + (token + in_batch) * kK
                  : v_new(sure() + token + in_batch);
    return shared + layout.products() + (2 * in_batch + (of_q ? 1 : 0)) * columns();
  }
  /// Scores of a token of the batch with the rows in front of it, newest first, of k and of q.
  __device__ float2* scores(int in_batch) const {
    return reinterpret_cast<float2*>(shared + layout.scores()) +
           in_batch * (layout.rows + layout.rows % 2);
  }
  /// q . q and q . k of a token.
  __device__ float2* of_q(int token) const {
    return reinterpret_cast<float2*>(shared + layout.of_q()) + token;
  }

  /// Whether the lane has channels of a row that lies in shared memory.
  __device__ bool has_own() const { return kDense || kOwn * lane < layout.keys; }
  /// The lane's channels of a row of keys or decays.
  __device__ void read_own(const float* row, float (&x)[kOwn]) const {
    if (!has_own()) {
#pragma unroll
      for (float& y : x) y = 0;
      return;
    }
#pragma unroll
    for (int c = 0; c < kOwn; c += kOwn == 2 ? 2 : 4) {
      if constexpr (kOwn == 2) {
        const float2 two = *reinterpret_cast<const float2*>(row + kOwn * lane);
        x[0] = two.x, x[1] = two.y;
      } else {
        const float4 four = *reinterpret_cast<const float4*>(row + kOwn * lane + c);
        x[c] = four.x, x[c + 1] = four.y, x[c + 2] = four.z, x[c + 3] = four.w;
      }
    }
  }
  __device__ void write_own(const float (&x)[kOwn], float* row) const {
    if (!has_own()) return;
    float* to = row + kOwn * lane;
#pragma unroll
    for (int c = 0; c < kOwn; c += kOwn == 2 ? 2 : 4) {
      if constexpr (kOwn == 2)
        *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
      else
        *reinterpret_cast<float4*>(to + c) = make_float4(x[c], x[c + 1], x[c + 2], x[c + 3]);
    }
  }
  /// The lane's channels of q of a token; 0 past K.
  __device__ void read_query(int token, float (&x)[kOwn]) const {
    if constexpr (kDense) {
      Own raw;
      raw.load(shared + layout.q() + token * kK, a.q.type, kOwn * lane);
      raw.convert(a.q.type, x);
    } else {
      const int64_t at = token_at(a.q, unit.q_head, token);
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        const int channel = kOwn * lane + c;
        x[c] = channel < a.shape.K ? float_of(load_bits(a.q.base, a.q.type, at + channel), a.q.type)
                                   : 0.0f;
      }
    }
  }
  /// A value of a token as it came in.
  __device__ uint32_t value_bits(int token, int column) const {
    if constexpr (kDense)
      return load_bits(shared + layout.v() + token * kK, a.v.type, column);
    else
      return load_bits(a.v.base, a.v.type, token_at(a.v, unit.head, token) + column);
  }
  __device__ float value(int token, int column) const {
    return float_of(value_bits(token, column), a.v.type);
  }
  __device__ float beta(int token) const {
    return beta_value(a.gate, kDense ? shared[layout.beta() + token]
                                     : load_element(a.beta, token_at(a.beta, unit.head, token)));
  }
  /// The factor that normalises the key of row i.
  __device__ float key_factor(int i) const {
    float sum = squares(0)[i];
#pragma unroll
    for (int part = 1; !kDense && part < parts(); ++part) sum += squares(part)[i];
    return norm_factor(a.gate, sum);
  }
  /// The factor that normalises q of a token, and q . k of what was not normalised.
  __device__ float2 query_factors(int token) const {
    const float2 sums = *of_q(token);
    return {norm_factor(a.gate, sums.x), sums.y};
  }

  /// Asks for v_new and the tokens.
  __device__ void load() {
    if constexpr (kDense) {
      copy_rows();
      ptx::cp_async_commit();
      copy_v_new();
      load_tokens();
      ptx::cp_async_commit();
    }
  }

  /// Keys, as they came in, and decays. Appends the tokens' rows.
  __device__ void make() {
    const float rate = rate_of();
    if constexpr (kDense) {
      make_whole_rows(rate);
      ptx::cp_async_wait<0>();
      __syncthreads();
      append_whole_rows();
    } else {
#pragma unroll 1
      for (int part = warp; part < parts(); part += warps) {
        const float bias = bias_of(part * kPart + lane);
#pragma unroll 1
        for (int at = 0; at < sure() + count; at += kGroup) make_group(part, at, bias, rate);
      }
      load_v_new();
      __syncthreads();
    }
  }

  /// One gate a head, and beta beside split states, which all warps have read.
  template <bool kMayBeSplit>
  __device__ void append_of_heads() const {
    if (gate_step(a) == 0) append_element(a.g, a.tail_g);
    if constexpr (kMayBeSplit)
      if (a.rest.base) append_element(a.beta, a.tail_beta);
  }

  // ---- of split states

  /// Appends the column's value of a token.
  __device__ void append_value(int token, int column) const {
    store_bits(a.tail_v, tail_at(a.tail_v, unit.head, sure() + token) + column,
               value_bits(token, column));
  }

 private:
  __device__ void append_element(const RowView& tokens, const RowView& tail) const {
    for (int t = static_cast<int>(threadIdx.x); t < count; t += static_cast<int>(blockDim.x))
      copy_row(tokens, token_at(tokens, unit.head, t), tail, tail_at(tail, unit.head, sure() + t),
               1, 0, 1);
  }

  __device__ float* squares(int part) const {
    return shared + layout.squares() + part * layout.rows;
  }

  // ---- on their way to shared memory

  /// v_new of the tail, 16 bytes at a time.
  __device__ void copy_v_new() const {
    constexpr int kVectors = kK / 4;  // of a row
    const float* base = static_cast<const float*>(a.tail_v_new.base) +
                        start.slot * a.tail_v_new.stride_b + unit.head * a.tail_v_new.stride_h;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < sure() * kVectors;
         n += static_cast<int>(blockDim.x)) {
      const int i = n / kVectors, vector = n % kVectors;
      ptx::cp_async<16>(ptx::shared_address(v_new(i) + 4 * vector),
                        base + row_of(i) * a.tail_v_new.stride_t + 4 * vector);
    }
  }

  /// A row of a token, as it lies in memory, by a warp.
  __device__ void copy(const RowView& view, int64_t at, float* row) const {
    const int size = size_of(view);
    if (lane * 16 < kK * size)
      ptx::cp_async<16>(ptx::shared_address(row + 4 * lane),
                        static_cast<const char*>(view.base) + at * size + 16 * lane);
  }
  __device__ void load_tokens() const {
#pragma unroll 1
    for (int t = warp; t < count; t += warps) {
      copy(a.q, token_at(a.q, unit.q_head, t), shared + layout.q() + t * kK);
      copy(a.v, token_at(a.v, unit.head, t), shared + layout.v() + t * kK);
    }
    for (int t = static_cast<int>(threadIdx.x); t < count; t += static_cast<int>(blockDim.x))
      shared[layout.beta() + t] = load_element(a.beta, token_at(a.beta, unit.head, t));
  }

  // ---- whole rows, of a dense kernel

  __device__ int64_t row_at(const RowView& tail, const RowView& tokens, int64_t head, int i) const {
    return i < sure() ? tail_at(tail, head, i) : token_at(tokens, head, i - sure());
  }
  /// Rows of this warp as they came in.
  __device__ void copy_rows() const {
#pragma unroll 1
    for (int i = warp; i < sure() + count; i += warps) {
      const bool is_token = i >= sure();
      const RowView &key = is_token ? a.k : a.tail_k, &gate = is_token ? a.g : a.tail_g;
      copy(key, row_at(a.tail_k, a.k, unit.q_head, i), k(i));
      if (gate_step(a) != 0) copy(gate, row_at(a.tail_g, a.g, unit.head, i), decay(i));
    }
    if (gate_step(a) != 0) return;
    for (int i = warp + warps * lane; i < sure() + count; i += 32 * warps) *decay(i) = head_gate(i);
  }
  __device__ void make_whole_row(int i, const float (&bias)[kOwn], float rate) const {
    Own key, gate;
    float head_gate = 0;
    key.load(k(i), a.k.type, kOwn * lane);
    if (gate_step(a) != 0)
      gate.load(decay(i), a.g.type, kOwn * lane);
    else
      head_gate = *decay(i);
    __syncwarp();  // floats take their place
    float x[kOwn], sum = 0;
    key.convert(a.k.type, x);
    write_own(x, k(i));
#pragma unroll
    for (const float y : x) sum = fmaf(y, y, sum);
    if (gate_step(a) != 0) {
      gate.convert(a.g.type, x);
    } else {
#pragma unroll
      for (float& y : x) y = head_gate;
    }
    make_decays(x, bias, rate);
    write_own(x, decay(i));
    if (!a.gate.l2norm) return;
    reduce_scatter<1, 16>(&sum);
    if (lane == 0) squares(0)[i] = sum;
  }
  __device__ void make_whole_rows(float rate) const {
    float bias[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) bias[c] = bias_of(kOwn * lane + c);
    ptx::cp_async_wait<1>();
    __syncwarp();
#pragma unroll 1
    for (int i = warp; i < sure() + count; i += warps) make_whole_row(i, bias, rate);
  }
  /// Behind a barrier: a row may take the place of one of the tail. Keys that several value heads
  /// share are copied by a kernel behind.
  __device__ void append_whole_rows() const {
#pragma unroll 1
    for (int t = warp; t < count; t += warps) {
      Own key, gate;
      const bool has_key = a.shape.H == a.shape.HV, has_gates = gate_step(a) != 0;
      if (has_key) key.load(a.k, token_at(a.k, unit.q_head, t) + kOwn * lane);
      if (has_gates) gate.load(a.g, token_at(a.g, unit.head, t) + kOwn * lane);
      const int i = sure() + t;
      if (has_key) key.store(a.tail_k, tail_at(a.tail_k, unit.q_head, i) + kOwn * lane);
      if (has_gates) gate.store(a.tail_g, tail_at(a.tail_g, unit.head, i) + kOwn * lane);
    }
  }

  // ---- from what was read to numbers in its place

  /// This lane's element of a part of a row of the tail or of a token; 0 past `size`.
  __device__ uint32_t bits_at(const RowView& view, int64_t at, int part, int size) const {
    const int channel = part * kPart + lane;
    return channel < size ? load_bits(view.base, view.type, at + channel) : 0;
  }
  /// Reads rows [at, at + kGroup), past the last one that one, and looks at their type once.
  __device__ void read_group(const RowView& tail, const RowView& tokens, int64_t head, int part,
                             int at, uint32_t (&bits)[kGroup]) const {
    const int last = sure() + count - 1;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int i = min(at + j, last);
      bits[j] = i < sure() ? bits_at(tail, tail_at(tail, head, i), part, a.shape.K)
                           : bits_at(tokens, token_at(tokens, head, i - sure()), part, a.shape.K);
    }
  }
  __device__ float head_gate(int i) const {
    return load_element(i < sure() ? a.tail_g : a.g, row_at(a.tail_g, a.g, unit.head, i));
  }

  /// Looks at the type once.
  __device__ static void floats_of(const uint32_t (&bits)[kGroup], Element type,
                                   float (&x)[kGroup]) {
    if (type == Element::kBFloat16) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) x[j] = float_of(bits[j], Element::kBFloat16);
    } else {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) x[j] = float_of(bits[j], type);
    }
  }

  template <int kCount>
  __device__ void make_decays(float (&x)[kCount], const float (&bias)[kCount], float rate) const {
    with_gate_mode(a.gate.gate_mode, [&](auto mode) {
#pragma unroll
      for (int c = 0; c < kCount; ++c)
        x[c] = decay_of<decltype(mode)::value>(a.gate, x[c], bias[c], rate);
    });
  }

  /// Rows [at, at + kGroup). Past the last row that one is made again, and not written.
  __device__ void make_group(int part, int at, float bias, float rate) const {
    const int end = sure() + count, channel = part * kPart + lane;
    const bool head_gates = gate_step(a) == 0;
    uint32_t key_bits[kGroup], gate_bits[kGroup];
    float keys[kGroup], gates[kGroup], sums[kGroup];
    read_group(a.tail_k, a.k, unit.q_head, part, at, key_bits);
    if (head_gates) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) gates[j] = head_gate(min(at + j, end - 1));
    } else {
      read_group(a.tail_g, a.g, unit.head, part, at, gate_bits);
    }
    floats_of(key_bits, a.k.type, keys);
    if (!head_gates) floats_of(gate_bits, a.g.type, gates);
    const float biases[kGroup] = {bias, bias, bias, bias};
    make_decays(gates, biases, rate);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      sums[j] = keys[j] * keys[j];
      const int i = min(at + j, end - 1);
      k(i)[channel] = keys[j];
      decay(i)[channel] = channel < a.shape.K ? gates[j] : 0.0f;
    }
    if (at + kGroup > sure() && channel < a.shape.K) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (at + j >= sure() && at + j < end)
          append(at + j, channel, key_bits[j], head_gates ? 0 : gate_bits[j]);
    }
    if (!a.gate.l2norm) return;
    reduce_scatter<kGroup, 16>(sums);
    const int row = at + lane / (32 / kGroup);
    if (lane % (32 / kGroup) == 0 && row < end) squares(part)[row] = sums[0];
  }

  /// Keys that several value heads share are copied by a kernel behind.
  __device__ void append(int i, int channel, uint32_t key, uint32_t gate) const {
    if (gate_step(a) != 0) store_bits(a.tail_g, tail_at(a.tail_g, unit.head, i) + channel, gate);
    if (a.shape.H == a.shape.HV)
      store_bits(a.tail_k, tail_at(a.tail_k, unit.q_head, i) + channel, key);
  }

  /// All warps read it behind a barrier.
  __device__ void load_v_new() const {
    for (int i = warp; i < sure(); i += warps) {
      const float* from =
          static_cast<const float*>(a.tail_v_new.base) + tail_at(a.tail_v_new, unit.head, i);
      for (int c = lane; c < a.shape.V; c += 32) v_new(i)[c] = from[c];
    }
  }
};

}  // namespace kda::cuda::tail
