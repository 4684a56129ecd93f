// SPDX-License-Identifier: Apache-2.0
// Inputs of a chunk: rows, decays, norms.
#pragma once

#include <type_traits>

#include "cuda/ptx/ptx.cuh"
#include "cuda/staged/intra/shared.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::intra {

/// Elementwise work is a thread's own: one channel pair of one run of 16 tokens, whose decays it
/// keeps. All factors are running products of decays: no difference of sums, one exponential a
/// token and channel. Indices are functions of the thread: in registers they made others spill.
template <class T, int kK>
struct Inputs {
  using S = Shared<T, kK>;
  static constexpr int kStride = S::kStride;
  static constexpr int kPairs = kK / 2;
  static constexpr int kThreads = kPairs * kRuns;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kVectors = kK / 8;  // 16-byte pieces of a row
  static constexpr int kSteps = kK / 16;   // k16 steps of an mma

  /// Pairs inside a run are anchored at its start where 16 bits have fp32's range: rows start at
  /// kAnchor, and may decay to kLeast.
  static constexpr bool kAnchored = std::is_same_v<T, __nv_bfloat16>;
  static constexpr float kAnchor = kAnchored ? 0x1p48f : 1.0f, kLeast = 0x1p-96f;

  const ChunkIntraArgs& a;
  S& s;
  const ChunkTokens& chunk;
  const int head;
  int tid;

  __device__ Inputs(const ChunkIntraArgs& args, S& shared, const ChunkTokens& tokens,
                    int value_head, int thread)
      : a(args), s(shared), chunk(tokens), head(value_head), tid(thread) {}

  /// What was computed from the thread's index is computed again, not kept in registers or spilled.
  __device__ void forget_indices() { asm volatile("" : "+r"(tid)); }

  __device__ int warp() const { return tid / 32; }
  __device__ int lane() const { return tid % 32; }
  __device__ int run() const { return tid / kPairs; }          // of this thread's tokens
  __device__ int channel() const { return tid % kPairs * 2; }  // first of its pair

  float2 decay[kRun];         // of each token; 1 past the sequence
  uint32_t q[kRun], k[kRun];  // of each token, as they came; after keep_pairs()

  __device__ static int64_t tile() { return blockIdx.x; }  // chunk and head
  __device__ T* tile_of(void* base, int64_t elements) const {
    return static_cast<T*>(base) + tile() * elements;
  }

  /// Rows of a [.., size] tensor to shared memory, zeros past the sequence and past `size`.
  __device__ void load_rows(T (*target)[kStride], const RowView& view, int view_head, int column0,
                            int size) const {
    constexpr int kRowStep = kThreads / kVectors;
    const int row0 = tid / kVectors, c = tid % kVectors * 8;
    const bool inside = column0 + c < size;
    const T* source = static_cast<const T*>(view.base) + chunk_offset(view, chunk, view_head) +
                      row0 * view.stride_t + column0 + c;
    uint32_t address = ptx::shared_address(&target[row0][c]);
#pragma unroll
    for (int row = row0, i = 0; i < kChunk / kRowStep; ++i, row += kRowStep) {
      ptx::cp_async<16>(address, source, inside && row < chunk.count);
      source += kRowStep * view.stride_t;
      address += kRowStep * kStride * sizeof(T);
    }
    ptx::cp_async_commit();
  }

  /// Gates of this thread's tokens and channels as they lie in memory; 0 past the sequence.
  template <class Pair>
  __device__ void load_gates(Pair (&raw)[kRun]) const {
    const int row0 = run() * kRun;
    const int64_t at = chunk_offset(a.g, chunk, head) + row0 * a.g.stride_t + channel();
    const char* source = static_cast<const char*>(a.g.base) + at * (sizeof(Pair) / 2);
    const int count = channel() < a.shape.K ? chunk.count - row0 : 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      raw[i] = i < count ? *reinterpret_cast<const Pair*>(source) : Pair{};
      source += a.g.stride_t * static_cast<int64_t>(sizeof(Pair) / 2);
    }
  }
  /// All of them are asked for before the first is converted, which waits for it.
  __device__ void load_gates(float2 (&gates)[kRun]) const {
    if (a.g.type == Element::kFloat32) return load_gates<float2>(gates);
    uint32_t raw[kRun];
    load_gates<uint32_t>(raw);
    a.g.type == Element::kFloat16 ? unpack_all<__half>(raw, gates)
                                  : unpack_all<__nv_bfloat16>(raw, gates);
  }
  template <class E>
  __device__ static void unpack_all(const uint32_t (&raw)[kRun], float2 (&gates)[kRun]) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) gates[i] = ptx::unpack<E>(raw[i]);
  }

  /// Decay of a token: exp of the gate, with constants folded (docs/operation.md, gate modes 0 log,
  /// 1 softplus, 2 bounded). Nothing is clamped: a decay of 0 is a decay of 0.
  template <int kGateMode>
  __device__ static float decay_of(float raw, float bias, float rate, float lower_bound) {
    if constexpr (kGateMode == 2) {  // exp2(lb' / (1 + exp2(-rate' (raw + bias))))
      const float e = ptx::ex2(-rate * (raw + bias));
      return ptx::ex2(lower_bound * ptx::rcp(1.0f + e));
    } else {
      return ptx::ex2(log2_decay_fast<kGateMode>(raw, bias, rate));
    }
  }

  template <int kGateMode>
  __device__ void transform_gates(const float2 (&raw)[kRun], float2 bias, float rate) {
    const int count = channel() < a.shape.K ? chunk.count - run() * kRun : 0;
    const float bound = kGateMode == 2 ? a.gate.lower_bound * kLog2e : a.gate.lower_bound;
    const float slope = kGateMode == 2 ? rate * kLog2e : rate;
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      decay[i] = {decay_of<kGateMode>(raw[i].x, bias.x, slope, bound),
                  decay_of<kGateMode>(raw[i].y, bias.y, slope, bound)};
    if (count < kRun)  // masked after the transform: gate(0) is not 0
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i >= count) decay[i] = {1, 1};
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kRun; ++i) multiply(product, decay[i]);
    *reinterpret_cast<float2*>(&s.totals[run()][channel()]) = product;
  }

  /// Everything that the chunk needs from device memory but v, all on its way before any of it is
  /// waited for: converting a value waits for it. Without scores nothing needs beta, and only qg
  /// needs q.
  template <bool kScores>
  __device__ void load_inputs() {
    const auto q_head = static_cast<int>(a.shape.group.quotient(static_cast<unsigned>(head)));
    if (kScores || a.factors.qg) load_rows(s.q, a.q, q_head, 0, a.shape.K);
    load_rows(s.k, a.k, q_head, 0, a.shape.K);
    uint32_t raw_beta = 0;
    if (kScores && tid < chunk.count)
      raw_beta = load_bits(a.beta.base, a.beta.type,
                           chunk_offset(a.beta, chunk, head) + tid * a.beta.stride_t);
    const float A_log = a.gate.A_log ? a.gate.A_log[head * a.gate.stride_A] : 0.0f;
    float2 raw[kRun], bias{0, 0};
    if (channel() < a.shape.K && a.gate.dt_bias) {
      const float* row = a.gate.dt_bias + head * a.gate.stride_dt + channel();
      bias = {row[0], row[1]};
    }
    load_gates(raw);
    const float rate = expf(A_log);
    if (a.gate.gate_mode == 0) transform_gates<0>(raw, bias, rate);
    if (a.gate.gate_mode == 1) transform_gates<1>(raw, bias, rate);
    if (a.gate.gate_mode == 2) transform_gates<2>(raw, bias, rate);
    if (kScores && tid < kChunk)
      s.beta[tid] = tid < chunk.count ? beta_value(a.gate, float_of(raw_beta, a.beta.type)) : 0.0f;
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  __device__ uint32_t raw_pair(const T (*rows)[kStride], int i) const {
    return *reinterpret_cast<const uint32_t*>(&rows[run() * kRun + i][channel()]);
  }
  __device__ void keep_pairs() {
    if (tid < kRuns) s.anchored[tid] = kAnchored ? kRun : 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) q[i] = raw_pair(s.q, i), k[i] = raw_pair(s.k, i);
  }

  /// Norms of rows that come normalised; norms() otherwise.
  __device__ void unit_norms() const {
    if (tid < kChunk) s.q_norm[tid] = a.gate.scale, s.k_norm[tid] = 1;
  }

  /// Row norms and the diagonal of Aqk, 8 rows at a time: diagonals of [q; k] k^T and of q q^T.
  template <bool kScores>
  __device__ void norms() const {
#pragma unroll
    for (int row0 = warp() * 8; row0 < kChunk; row0 += kWarps * 8) {
      const T(*half)[kStride] = lane() % 16 < 8 ? s.q : s.k;
      const uint32_t rows = ptx::shared_address(&half[row0 + lane() % 8][lane() / 16 * 8]);
      float with_k[4] = {}, with_q[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t x[4];  // q and k of 8 channels, then of the next 8
        ptx::ldmatrix_x4(x, rows + step * 32);
        ptx::mma_16816<T>(with_k, x, x[1], x[3]);
        ptx::mma_16816<T>(with_q, x, x[0], x[2]);
      }
      const int r = lane() / 4;
      if (lane() % 4 != r / 2) continue;  // another lane has the diagonal
      const bool odd = r % 2;
      const float qq = odd ? with_q[1] : with_q[0], kk = odd ? with_k[3] : with_k[2];
      const float qk = odd ? with_k[1] : with_k[0];
      const int row = row0 + r;
      const float q_norm = a.gate.scale * (a.gate.l2norm ? rsqrtf(qq + 1e-6f) : 1.0f);
      const float k_norm = a.gate.l2norm ? rsqrtf(kk + 1e-6f) : 1.0f;
      s.q_norm[row] = q_norm;  // with the scale of the outputs
      s.k_norm[row] = k_norm;
      if constexpr (kScores) {
        s.k_beta[row] = k_norm * s.beta[row];
        s.diag[row] = qk * q_norm * k_norm;
      }
    }
  }

  /// Decays over the runs before and after each, for decayed_rows(); beside norms().
  __device__ void scan_totals() const {
    if (tid >= kK) return;
    const bool forward = tid < kK / 2;
    const int c = tid % (kK / 2) * 2;
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int r = forward ? i : kRuns - 1 - i;
      float* target = forward ? &s.decay_before[r][c] : &s.decay_after[r][c];
      *reinterpret_cast<float2*>(target) = product;
      multiply(product, *reinterpret_cast<const float2*>(&s.totals[r][c]));
    }
  }

  __device__ static void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }
};

}  // namespace kda::cuda::intra
