// SPDX-License-Identifier: Apache-2.0
// Decays, decayed rows and norms of a run. A thread has two channels and all tokens.
#pragma once

#include <type_traits>

#include "cuda/ptx/narrow.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/fused/moves.cuh"

namespace kda::cuda::sm90::fused {

template <class E, int kGateMode, bool kSegments>
struct Rows : Moves<E, kSegments> {
  using Base = Moves<E, kSegments>;
  using Base::a;
  using Base::Base;
  using Base::half;
  using Base::lane;
  using Base::norm_row;
  using Base::own;
  using Base::thread;

  float2 bias;
  /// Of gate mode 2, with its constants: a decay is exp2(1 / (bound - exp2(rate raw + bias))).
  float rate, bound;

  __device__ void begin(const Part& part, int run) {
    Base::begin(part, run);
    const int64_t head = part.head;
    rate = expf(a.gate.A_log ? a.gate.A_log[head * a.gate.stride_A] : 0.0f);
    bias = {0, 0};
    if (a.gate.dt_bias) {
      const float* row = a.gate.dt_bias + head * a.gate.stride_dt + channel();
      bias = {row[0], row[1]};
    }
    bound = 0;
    if (kGateMode == 2) {
      rate *= -kLog2e;
      bound = 1 / (a.gate.lower_bound * kLog2e);
      const float scale = log2f(-bound);
      bias = {fmaf(bias.x, rate, scale), fmaf(bias.y, rate, scale)};
    }
  }

  __device__ int channel() const { return static_cast<int>(thread * 2); }
  __device__ static void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }
  __device__ static bool in_range(float2 x) { return x.x >= kLeast && x.y >= kLeast; }
  __device__ static uint32_t scaled(uint32_t pair, float2 factor) {
    const float2 x = ptx::unpack<T>(pair);
    return ptx::pack<T>(x.x * factor.x, x.y * factor.y);
  }
  using Pairs = uint32_t[kRun];  // of this thread's channels
  __device__ void load_pairs(Pairs& q, Pairs& k) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      q[i] = *reinterpret_cast<const uint32_t*>(&own.raw.q[i][channel() ^ i % 8 * 8]);
      k[i] = *reinterpret_cast<const uint32_t*>(&own.raw.k[i][channel() ^ i % 8 * 8]);
    }
  }

  // ---- decays ----------------------------------------------------------------------------------

  __device__ float decay_of(float raw, float of_channel) const {
    if constexpr (kGateMode == 2)
      return ptx::ex2(ptx::reciprocal(bound - ptx::ex2(fmaf(raw, rate, of_channel))));
    else
      return ptx::ex2(log2_decay_fast<kGateMode>(raw, of_channel, rate));
  }
  __device__ void load_gates(float2 (&gate)[kRun]) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if constexpr (std::is_same_v<E, float>)
        gate[i] = reinterpret_cast<const float2*>(own.raw.g)[i * (kK / 2) + thread];
      else
        gate[i] =
            ptx::unpack<E>(reinterpret_cast<const uint32_t*>(own.raw.g)[i * (kK / 2) + thread]);
    }
  }
  /// In place of raw gates.
  __device__ void make_decays(float2 (&decay)[kRun], int rows) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      decay[i] = {decay_of(decay[i].x, bias.x), decay_of(decay[i].y, bias.y)};
    if (rows < kRun)  // masked after the transform: gate(0) is not 0
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i >= rows) decay[i] = {1, 1};
  }
  /// In place of raw gates: decays since the start of the run, times kAnchor. Gates that come as
  /// logarithms may be positive: the last row may be in range when others are not.
  __device__ void scan_decays(float2 (&factor)[kRun], int rows) const {
    make_decays(factor, rows);
    bool all = true;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor[i], i > 0 ? factor[i - 1] : float2{kAnchor, kAnchor});
      if (kGateMode == 0 || i == kRun - 1) all = all && in_range(factor[i]);
    }
    if (all) return;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (count == i && in_range(factor[i])) count = i + 1;
    atomicMin(&own.anchored, count);
  }

  // ---- decayed rows ----------------------------------------------------------------------------

  /// Where this thread's channels lie in row 0 of a swizzled tile of kRows rows, and a pair of row
  /// i.
  template <int kRows>
  __device__ uint32_t place(const T* tile) const {
    return ptx::shared_address(tile + channel() / 64 * kRows * 64 + channel() % 64);
  }
  __device__ static void put(uint32_t place, int i, uint32_t pair) {
    ptx::store_shared((place ^ i % 8 * 16) + i * 128, pair);
  }
  __device__ void put_gamma(Stage& s, float2 gamma) const {
    *reinterpret_cast<float2*>(&s.gamma[gamma_place(channel())]) = gamma;
  }

  /// All is read before anything is stored: the compiler keeps their order.
  __device__ void put_rows(Stage& s, const float2 (&factor)[kRun], const Pairs& q,
                           const Pairs& k_pairs) const {
    const float2 total = factor[kRun - 1];
    const uint32_t of_rows = place<2 * kRun>(s.rows), of_kg = place<kRun>(s.kg),
                   of_columns = ptx::shared_address(&own.columns[0][channel()]);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 k = ptx::unpack<T>(k_pairs[i]);
      put(of_rows, i, ptx::pack<T>(k.x * factor[i].x, k.y * factor[i].y));
      put(of_rows, kRun + i, scaled(q[i], factor[i]));
      const float2 column{k.x * ptx::reciprocal(factor[i].x), k.y * ptx::reciprocal(factor[i].y)};
      ptx::store_shared(of_columns + i * kStride * 2, ptx::pack<T>(column.x, column.y));
      put(of_kg, i, ptx::pack<T>(column.x * total.x, column.y * total.y));
    }
    put_gamma(s, {total.x * (1 / kAnchor), total.y * (1 / kAnchor)});
  }
  /// kg and gamma where rows are out of range.
  __device__ void put_kg(Stage& s, const float2 (&decay)[kRun], const Pairs& k) const {
    const uint32_t of_kg = place<kRun>(s.kg);
    float2 factor{1, 1};
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      put(of_kg, i, scaled(k[i], factor));
      multiply(factor, decay[i]);
    }
    put_gamma(s, factor);
  }

  // ---- norms -----------------------------------------------------------------------------------

  /// beta_value() with the fast units.
  __device__ float beta_of(float raw) const {
    if (a.gate.beta_mode == 0) return raw;
    const float x = ptx::reciprocal(1 + ptx::ex2(-kLog2e * raw));
    return a.gate.beta_mode == 2 ? 2 * x : x;
  }
  /// Diagonals of [q; k] k^T and q q^T for 8 tokens a warp, in two sums each: shorter chains.
  struct Squares {
    float with_k[2][4] = {}, with_q[2][4] = {};
  };
  __device__ void add_squares(Squares& sum) const {
    const T(*of)[kK] = lane() % 16 < 8 ? own.raw.q : own.raw.k;
    const uint32_t from =
        ptx::shared_address(&of[half() * 8 + lane() % 8][(lane() / 16 ^ lane() % 8) * 8]);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      uint32_t x[4];  // q and k of 8 channels, then of the next 8
      ptx::ldmatrix_x4(x, (from ^ step % 4 * 32) + step / 4 * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_1688(sum.with_k[i], x[2 * i], x[2 * i + 1], x[2 * i + 1]);
        ptx::mma_1688(sum.with_q[i], x[2 * i], x[2 * i + 1], x[2 * i]);
      }
    }
  }
  /// Of one lane of four: factors of its token.
  struct Norms {
    float q, k, k_beta, diag;
  };
  __device__ Norms norms(const Squares& squares, int rows, uint32_t raw_beta) const {
    const bool odd = lane() / 4 % 2;
    const auto sum = [&](const float(&x)[2][4], int i) {
      return odd ? x[0][i + 1] + x[1][i + 1] : x[0][i] + x[1][i];
    };
    const float beta = norm_row() < rows ? beta_of(float_of(raw_beta, a.beta.type)) : 0.0f;
    const float q_norm = a.gate.l2norm ? ptx::inverse_root(sum(squares.with_q, 0) + 1e-6f) : 1.0f;
    const float k_norm = a.gate.l2norm ? ptx::inverse_root(sum(squares.with_k, 2) + 1e-6f) : 1.0f;
    return {a.gate.scale * q_norm, k_norm, k_norm * beta, sum(squares.with_k, 0)};
  }
  __device__ void put_norms(Stage& s, const Norms& n) const {
    if (lane() % 4 != lane() / 8) return;  // another lane has the diagonal
    const int row = token_place(norm_row());
    s.q_norm[row] = n.q * (1 / kAnchor);
    s.k_norm[row] = n.k * (1 / kAnchor);
    s.k_beta[row] = n.k_beta;
    s.diag[row] = n.diag * kAnchor;
  }
};

}  // namespace kda::cuda::sm90::fused
