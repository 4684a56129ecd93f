// SPDX-License-Identifier: Apache-2.0
// Rows of a head in shared memory: those of the tail, oldest first, then those of the tokens. A
// warp makes keys and decays of a row from what lies in memory.
#pragma once

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
  __device__ float* qk() const { return shared + layout.qk(); }

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
#pragma unroll 1
      for (int i = warp; i < sure(); i += warps) {
        copy(a.tail_k, tail_at(a.tail_k, unit.q_head, i), k(i));
        copy_gates(a.tail_g, tail_at(a.tail_g, unit.head, i), decay(i));
        copy(a.tail_v_new, tail_at(a.tail_v_new, unit.head, i), v_new(i));
      }
#pragma unroll 1
      for (int t = warp; t < count; t += warps) {
        copy(a.k, token_at(a.k, unit.q_head, t), k(sure() + t));
        copy_gates(a.g, token_at(a.g, unit.head, t), decay(sure() + t));
        copy(a.q, token_at(a.q, unit.q_head, t), q(t));
      }
      if (a.gate.gate_mode != GateMode::kLog && warp + 1 == warps) copy_parameters();
      ptx::cp_async_commit();
    }
  }

  /// Keys, decays and v_new of all rows. The block meets before, in dense kernels, and behind.
  __device__ void make() {
    if constexpr (kDense) ptx::cp_async_wait<0>(), __syncthreads();
    float bias[kCount] = {}, rate = 0;
    if (a.gate.gate_mode != GateMode::kLog) rate = read_parameters(bias);
#pragma unroll 1
    for (int i = warp; i < sure() + count; i += warps) {
      const int t = i - sure();
      float x[kCount], g[kCount], y[kCount];
      if (t < 0) {
        read(a.tail_k, tail_at(a.tail_k, unit.q_head, i), k(i), x);
        read_gates(a.tail_g, tail_at(a.tail_g, unit.head, i), decay(i), g);
      } else {
        read(a.k, token_at(a.k, unit.q_head, t), k(i), x);
        read_gates(a.g, token_at(a.g, unit.head, t), decay(i), g);
        read(a.q, token_at(a.q, unit.q_head, t), q(t), y);
      }
      __syncwarp();  // numbers take the place of what was read
      normalise(x);
      write(k(i), x);
      write_decays(decay(i), g, bias, rate);
      if (t >= 0) {
        normalise(y);
        write(q(t), y);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum = fmaf(x[j], y[j], sum);
        sum = sum_over(sum, 1, 32);
        if (lane == 0) qk()[t] = sum;
      } else if (!kDense) {
        read_v_new(i);
      }
    }
    __syncthreads();
  }

  /// Rows of k and g of the tokens, as they came in. All rows of the tail have been read.
  __device__ void append() {
    const bool shares_keys = a.shape.H != a.shape.HV;
#pragma unroll 1
    for (int t = warp; t < count; t += warps) {
      if (!shares_keys)
        move(a.k, token_at(a.k, unit.q_head, t), a.tail_k,
             tail_at(a.tail_k, unit.q_head, sure() + t), a.shape.K);
      move(a.g, token_at(a.g, unit.head, t), a.tail_g, tail_at(a.tail_g, unit.head, sure() + t),
           gate_step(a) == 0 ? 1 : a.shape.K);
    }
  }

 private:
  __device__ static SharedRow<kCount>& row_of(float* row) {
    return *reinterpret_cast<SharedRow<kCount>*>(row);
  }
  __device__ static void copy(const RowView& view, int64_t at, float* row) {
    row_of(row).load(view, at, kK);
  }
  /// One gate a head may begin in the middle of a word: the whole word comes.
  __device__ void copy_gates(const RowView& view, int64_t at, float* row) const {
    if (gate_step(a) != 0) return copy(view, at, row);
    const int two_a_word = view.type != Element::kFloat32;
    if (lane == 0)
      ptx::cp_async<4>(ptx::shared_address(row),
                       static_cast<const uint32_t*>(view.base) + (at >> two_a_word));
  }
  __device__ static RowView floats(const float* base) {
    return {const_cast<float*>(base), 0, 0, 0, Element::kFloat32, true};
  }
  __device__ float* bias_row() const { return shared + layout.bias(); }
  __device__ float* A_log_row() const { return shared + layout.A_log(); }
  __device__ void copy_parameters() const {
    if (a.gate.dt_bias) copy(floats(a.gate.dt_bias), unit.head * a.gate.stride_dt, bias_row());
    if (a.gate.A_log && lane == 0)
      ptx::cp_async<4>(ptx::shared_address(A_log_row()),
                       a.gate.A_log + unit.head * a.gate.stride_A);
  }

  /// Returns the rate.
  __device__ float read_parameters(float (&bias)[kCount]) const {
    if (a.gate.dt_bias)
      read(floats(a.gate.dt_bias), unit.head * a.gate.stride_dt, bias_row(), bias);
    float A_log = 0;
    if (a.gate.A_log) A_log = kDense ? *A_log_row() : a.gate.A_log[unit.head * a.gate.stride_A];
    return expf(A_log);
  }
  __device__ void read(const RowView& view, int64_t at, float* row, float (&x)[kCount]) const {
    if constexpr (kDense) {
      row_of(row).convert(view.type, x);
    } else {
      LaneRow<kCount> raw;
      raw.load(view, at, a.shape.K);
      raw.convert(view.type, x);
    }
  }
  __device__ void read_gates(const RowView& view, int64_t at, float* row,
                             float (&g)[kCount]) const {
    if (gate_step(a) != 0) return read(view, at, row, g);
    uint32_t bits;
    if constexpr (kDense)
      bits = load_bits(row, view.type, view.type == Element::kFloat32 ? 0 : at & 1);
    else
      bits = load_bits(view.base, view.type, at);
#pragma unroll
    for (int j = 0; j < kCount; ++j) g[j] = float_of(bits, view.type);
  }
  __device__ void read_v_new(int i) const {
    const auto* from =
        static_cast<const float*>(a.tail_v_new.base) + tail_at(a.tail_v_new, unit.head, i);
    for (int c = lane; c < a.shape.V; c += 32) v_new(i)[c] = from[c];
  }

  __device__ void normalise(float (&x)[kCount]) const {
    if (!a.gate.l2norm) return;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum = fmaf(x[j], x[j], sum);
    const float scale = 1.0f / sqrtf(sum_over(sum, 1, 32) + 1e-6f);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] *= scale;
  }
  __device__ void write(float* row, const float (&x)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) row[lane + 32 * j] = x[j];
  }
  __device__ void write_decays(float* row, float (&g)[kCount], const float (&bias)[kCount],
                               float rate) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      g[j] = kDense || lane + 32 * j < a.shape.K
                 ? exp2f(log2_decay_exact(a.gate, g[j], bias[j], rate))
                 : 0.0f;
    write(row, g);
  }

  __device__ static void move(const RowView& from, int64_t from_at, const RowView& to,
                              int64_t to_at, int size) {
    LaneRow<kCount> raw;
    raw.load(from, from_at, size);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int c = lane + 32 * j;
      if (c >= size) continue;
      if (to.type == Element::kFloat32)
        static_cast<uint32_t*>(to.base)[to_at + c] = raw.bits[j];
      else
        static_cast<uint16_t*>(to.base)[to_at + c] = static_cast<uint16_t>(raw.bits[j]);
    }
  }
};

}  // namespace kda::cuda::tail
