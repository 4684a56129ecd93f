// SPDX-License-Identifier: Apache-2.0
// Rows of a head in shared memory: those of the tail, oldest first, then those of the tokens. A
// warp makes keys and decays of a row from what lies in memory.
#pragma once

#include "cuda/decode/tail/copy_row.cuh"
#include "cuda/decode/tail/layout.hpp"
#include "cuda/decode/tail/sequence.cuh"

namespace kda::cuda::tail {

/// kDense: K = V = kK, and rows are of whole words, which are copied to where their numbers will
/// be: load() only asks for them, make() waits. Else make() loads.
template <int kK, bool kDense>
struct Rows {
  static constexpr int kKeys = kK;
  static constexpr bool kIsDense = kDense;
  static constexpr int kCount = kK / 32;  // elements of a lane

  const TailArgs& a;
  const Unit& unit;
  const Start& start;
  const int64_t begin;  ///< first token
  const int count;
  const int lane, warp, warps;
  const Layout layout;
  float* const shared;

  __device__ Rows(const TailArgs& args, const Unit& of, const Start& at, int64_t first_token,
                  int num_tokens)
      : a(args),
        unit(of),
        start(at),
        begin(first_token),
        count(num_tokens),
        lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        layout(Layout::of(args.rows, args.most_tokens, kK, kDense ? kK : args.shape.V)),
        shared(reinterpret_cast<float*>(ptx::dynamic_shared())) {}

  __device__ int columns() const { return kDense ? kK : layout.columns; }
  __device__ int sure() const { return start.sure(); }
  __device__ float* k(int i) const { return shared + i * kK; }
  __device__ float* decay(int i) const { return shared + layout.decays() + i * kK; }
  __device__ float* v_new(int i) const { return shared + layout.v_new() + i * columns(); }
  __device__ float* q(int token) const { return shared + layout.q() + token * kK; }
  __device__ float* v(int token) const { return shared + layout.v() + token * columns(); }
  __device__ float* qk() const { return shared + layout.qk(); }
  __device__ float* beta() const { return shared + layout.beta(); }
  /// The row that each token follows.
  __device__ int* before() const { return reinterpret_cast<int*>(shared + layout.before()); }

  /// First element of the row of index i in a tensor of the tail.
  __device__ int64_t tail_at(const RowView& view, int64_t head, int i) const {
    const auto row = static_cast<uint32_t>(start.folded + i) % static_cast<uint32_t>(a.rows);
    return start.slot * view.stride_b + row * view.stride_t + head * view.stride_h;
  }
  __device__ int64_t token_at(const RowView& view, int64_t head, int token) const {
    return row_offset(view, a.map, unit.row, begin + token, head);
  }

  __device__ void load() {
    if constexpr (kDense) {
      load_tail();
      load_tokens();
      if (a.gate.gate_mode != GateMode::kLog && warp + 1 == warps) load_parameters();
      ptx::cp_async_commit();
    }
  }

  /// The block meets before, in dense kernels, and behind.
  __device__ void make() {
    if constexpr (kDense) ptx::cp_async_wait<0>(), __syncthreads();
    const float rate = a.gate.A_log ? expf(read_element(a_log(), head_at_A(), a_log_word())) : 1.0f;
#pragma unroll 1
    for (int i = warp; i < sure() + count; i += warps) {
      const int t = i - sure();
      float x[kCount];
      if (t < 0)
        read(a.tail_k, tail_at(a.tail_k, unit.q_head, i), k(i), a.shape.K, x);
      else
        read(a.k, token_at(a.k, unit.q_head, t), k(i), a.shape.K, x);
      normalise(x);
      write(k(i), x);
      make_decays(i, rate);
      if (t >= 0)
        make_token(t, x);
      else if (!kDense)
        copy_values(a.tail_v_new, tail_at(a.tail_v_new, unit.head, i), v_new(i));
    }
    __syncthreads();
  }

  /// Rows of k and g of the tokens, as they came in. All rows of the tail have been read.
  __device__ void append() {
    const bool shares_keys = a.shape.H != a.shape.HV;
#pragma unroll 1
    for (int t = warp; t < 2 * count; t += warps) {
      if (t < count) {
        append_row(a.g, token_at(a.g, unit.head, t), a.tail_g,
                   tail_at(a.tail_g, unit.head, sure() + t), gate_step(a) == 0 ? 1 : a.shape.K);
      } else if (!shares_keys) {
        append_row(a.k, token_at(a.k, unit.q_head, t - count), a.tail_k,
                   tail_at(a.tail_k, unit.q_head, sure() + t - count), a.shape.K);
      }
    }
  }

 private:
  // ---- on their way to shared memory

  /// This thread's part of the rows of the tail, 16 bytes at a time.
  __device__ void copy_tail(const RowView& view, int64_t head, float* rows) const {
    const int bytes = size_of(view);
    const int shift = (kK == 64 ? 3 : 4) + (bytes == 4 ? 1 : 0);  // of vectors of a row
    const char* base = static_cast<const char*>(view.base) +
                       (start.slot * view.stride_b + head * view.stride_h) * bytes;
    const int first =
        static_cast<int>(static_cast<uint32_t>(start.folded) % static_cast<uint32_t>(a.rows));
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x); j < sure() << shift;
         j += static_cast<int>(blockDim.x)) {
      const int i = j >> shift, vector = j - (i << shift);
      const int row = first + i < a.rows ? first + i : first + i - a.rows;
      ptx::cp_async<16>(ptx::shared_address(rows + i * kK + 4 * vector),
                        base + row * view.stride_t * bytes + 16 * vector);
    }
  }
  __device__ void load_tail() const {
    copy_tail(a.tail_k, unit.q_head, k(0));
    copy_tail(a.tail_v_new, unit.head, v_new(0));
    if (gate_step(a) != 0) return copy_tail(a.tail_g, unit.head, decay(0));
    for (int i = static_cast<int>(threadIdx.x); i < sure(); i += static_cast<int>(blockDim.x))
      copy_element(a.tail_g, tail_at(a.tail_g, unit.head, i), decay(i));
  }

  __device__ void copy(const RowView& view, int64_t at, float* row) const {
    const int bytes = size_of(view);
    if (lane < kK * bytes / 16)
      ptx::cp_async<16>(ptx::shared_address(row + 4 * lane),
                        static_cast<const char*>(view.base) + at * bytes + 16 * lane);
  }
  /// The word that has an element, which may begin in its middle.
  __device__ static uintptr_t address_of(const RowView& view, int64_t at) {
    return reinterpret_cast<uintptr_t>(view.base) + static_cast<uintptr_t>(at * size_of(view));
  }
  __device__ static void copy_element(const RowView& view, int64_t at, float* word) {
    ptx::cp_async<4>(ptx::shared_address(word),
                     reinterpret_cast<const void*>(address_of(view, at) & ~uintptr_t{3}));
  }
  __device__ void load_tokens() const {
#pragma unroll 1
    for (int j = warp; j < 4 * count; j += warps) {
      const int t = j / 4;
      if (j % 4 == 0) copy(a.k, token_at(a.k, unit.q_head, t), k(sure() + t));
      if (j % 4 == 1) copy(a.q, token_at(a.q, unit.q_head, t), q(t));
      if (j % 4 == 2) copy(a.v, token_at(a.v, unit.head, t), v(t));
      if (j % 4 != 3) continue;
      if (gate_step(a) != 0) copy(a.g, token_at(a.g, unit.head, t), decay(sure() + t));
      if (lane != 0) continue;
      if (gate_step(a) == 0) copy_element(a.g, token_at(a.g, unit.head, t), decay(sure() + t));
      copy_element(a.beta, token_at(a.beta, unit.head, t), beta() + t);
    }
  }

  __device__ static RowView floats(const float* base) {
    return {const_cast<float*>(base), 0, 0, 0, Element::kFloat32, true};
  }
  __device__ RowView a_log() const { return floats(a.gate.A_log); }
  __device__ int64_t head_at_A() const { return unit.head * a.gate.stride_A; }
  __device__ float* bias_row() const { return shared + layout.bias(); }
  __device__ float* a_log_word() const { return shared + layout.a_log(); }
  __device__ void load_parameters() const {
    if (a.gate.dt_bias)
      reinterpret_cast<SharedRow<kCount>*>(bias_row())
          ->load(floats(a.gate.dt_bias), unit.head * a.gate.stride_dt, kK);
    if (a.gate.A_log && lane == 0) copy_element(a_log(), head_at_A(), a_log_word());
  }

  // ---- from what was read to numbers in its place

  __device__ float read_element(const RowView& view, int64_t at, const float* word) const {
    if constexpr (!kDense) return float_of(load_bits(view.base, view.type, at), view.type);
    const uint32_t bits = __float_as_uint(*word);
    if (view.type == Element::kFloat32) return __uint_as_float(bits);
    return float_of(address_of(view, at) & 2 ? bits >> 16 : bits & 0xffff, view.type);
  }

  /// Elements kCount lane + j of a row; 0 past `size`.
  __device__ void read(const RowView& view, int64_t at, const float* row, int size,
                       float (&x)[kCount]) const {
    if constexpr (!kDense) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int c = kCount * lane + j;
        x[j] = c < size ? float_of(load_bits(view.base, view.type, at + c), view.type) : 0.0f;
      }
    } else if (view.type == Element::kFloat32) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = row[kCount * lane + j];
    } else {
      const auto* words = reinterpret_cast<const uint32_t*>(row) + kCount / 2 * lane;
#pragma unroll
      for (int j = 0; j < kCount; j += 2) {
        const uint32_t pair = words[j / 2];
        x[j] = float_of(pair & 0xffff, view.type), x[j + 1] = float_of(pair >> 16, view.type);
      }
    }
    __syncwarp();  // numbers take its place
  }
  __device__ void copy_values(const RowView& view, int64_t at, float* row) const {
    for (int c = lane; c < a.shape.V; c += 32)
      row[c] = float_of(load_bits(view.base, view.type, at + c), view.type);
  }

  __device__ void normalise(float (&x)[kCount]) const {
    if (!a.gate.l2norm) return;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum = fmaf(x[j], x[j], sum);
    const float scale = rsqrtf(sum_over(sum, 1, 32) + 1e-6f);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] *= scale;
  }
  __device__ void write(float* row, const float (&x)[kCount]) const {
    float* to = row + kCount * lane;
    if constexpr (kCount == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; j += 4)
        *reinterpret_cast<float4*>(to + j) = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
    }
  }

  __device__ void make_decays(int i, float rate) const {
    const int t = i - sure();
    const RowView& view = t < 0 ? a.tail_g : a.g;
    const int64_t at = t < 0 ? tail_at(view, unit.head, i) : token_at(view, unit.head, t);
    float g[kCount];
    if (gate_step(a) != 0) {
      read(view, at, decay(i), a.shape.K, g);
    } else {
      const float gate = read_element(view, at, decay(i));
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kCount; ++j) g[j] = gate;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int c = kCount * lane + j;
      const bool is_there = kDense || c < a.shape.K;
      float bias = 0;
      if (a.gate.dt_bias && is_there)
        bias = kDense ? bias_row()[c] : a.gate.dt_bias[unit.head * a.gate.stride_dt + c];
      g[j] = is_there ? exp2f(log2_decay_exact(a.gate, g[j], bias, rate)) : 0.0f;
    }
    write(decay(i), g);
  }

  /// q, v, beta and q . k of a token, whose key is `key`.
  __device__ void make_token(int t, const float (&key)[kCount]) const {
    float x[kCount];
    read(a.q, token_at(a.q, unit.q_head, t), q(t), a.shape.K, x);
    normalise(x);
    write(q(t), x);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum = fmaf(x[j], key[j], sum);
    sum = sum_over(sum, 1, 32);
    if constexpr (kDense) {
      read(a.v, token_at(a.v, unit.head, t), v(t), a.shape.V, x);
      write(v(t), x);
    } else {
      copy_values(a.v, token_at(a.v, unit.head, t), v(t));
    }
    if (lane == 0)
      before()[t] =
          sure() + (a.parents && t > 0 ? a.parents[unit.n * a.parent_columns + t] : t - 1);
    const float raw = read_element(a.beta, token_at(a.beta, unit.head, t), beta() + t);
    __syncwarp();
    if (lane == 0) qk()[t] = sum, beta()[t] = beta_value(a.gate, raw);
  }

  __device__ void append_row(const RowView& from, int64_t from_at, const RowView& to, int64_t to_at,
                             int size) const {
    if (kDense && size == kK)
      copy_vectors(from, from_at, to, to_at, kK, lane, 32);
    else
      copy_row(from, from_at, to, to_at, size, lane, 32);
  }
};

}  // namespace kda::cuda::tail
