// SPDX-License-Identifier: Apache-2.0
// Inputs of a chunk: rows, decays, norms.
#pragma once

#include "cuda/staged/intra/context.cuh"

namespace kda::cuda::intra {

/// Copies columns of a [.., size] tensor to shared memory; zeros past the sequence and past `size`.
template <class C>
__device__ void load_rows(const C& c, RowsOf<C>* target, const RowView& view, int view_head,
                          int column0, int size) {
  using T = typename C::T;
  constexpr int kRowStep = C::kThreads / C::kVectors;
  const int row0 = c.tid / C::kVectors, column = c.tid % C::kVectors * 8;
  const bool inside = column0 + column < size;
  const T* source = static_cast<const T*>(view.base) + chunk_offset(view, c.chunk, view_head) +
                    row0 * view.stride_t + column0 + column;
  uint32_t address = ptx::shared_address(&target[row0][column]);
#pragma unroll
  for (int row = row0, i = 0; i < kChunk / kRowStep; ++i, row += kRowStep) {
    ptx::cp_async<16>(address, source, inside && row < c.chunk.count);
    source += kRowStep * view.stride_t;
    address += kRowStep * C::kStride * sizeof(T);
  }
  ptx::cp_async_commit();
}

// ---- gates

__device__ __forceinline__ float2 twice(float x) { return {x, x}; }
__device__ __forceinline__ uint32_t twice(uint16_t bits) { return bits * 0x10001u; }

/// Gates of this thread's tokens and channels as they lie in memory; 0 past the sequence. One a
/// head is the gate of both channels.
template <class Gate, class C, class Pair>
__device__ void load_gate_bits(const C& c, Pair (&raw)[kSubchunk]) {
  static_assert(sizeof(Pair) == 2 * sizeof(Gate));
  const RowView& g = c.a.g;
  const int row0 = c.subchunk() * kSubchunk;
  const int64_t at =
      chunk_offset(g, c.chunk, c.head) + row0 * g.stride_t + c.channel() * gate_step(c.a);
  const Gate* source = static_cast<const Gate*>(g.base) + at;
  const int count = c.channel() < c.a.shape.K ? c.chunk.count - row0 : 0;
  if (gate_step(c.a) == 0) {
    Gate gates[kSubchunk];
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i, source += g.stride_t)
      gates[i] = i < count ? *source : Gate{};
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i) raw[i] = twice(gates[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i, source += g.stride_t)
    raw[i] = i < count ? *reinterpret_cast<const Pair*>(source) : Pair{};
}
template <class E>
__device__ void unpack_all(const uint32_t (&raw)[kSubchunk], float2 (&gates)[kSubchunk]) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) gates[i] = ptx::unpack<E>(raw[i]);
}
/// All of them are asked for before the first is converted, which waits for it.
template <class C>
__device__ void load_gates(const C& c, float2 (&gates)[kSubchunk]) {
  if (c.a.g.type == Element::kFloat32) return load_gate_bits<float>(c, gates);
  uint32_t raw[kSubchunk];
  load_gate_bits<uint16_t>(c, raw);
  c.a.g.type == Element::kFloat16 ? unpack_all<__half>(raw, gates)
                                  : unpack_all<__nv_bfloat16>(raw, gates);
}

/// Decay of a token: exp of the gate, with constants folded (docs/operation.md). Nothing is
/// clamped: a decay of 0 is a decay of 0.
template <GateMode kGateMode>
__device__ float decay_of(float raw, float bias, float rate, float lower_bound) {
  if constexpr (kGateMode == GateMode::kBounded) {  // exp2(lb' / (1 + exp2(-rate' (raw + bias))))
    const float e = ptx::ex2(-rate * (raw + bias));
    return ptx::ex2(lower_bound * ptx::rcp(1.0f + e));
  } else {
    return ptx::ex2(log2_decay_fast<kGateMode>(raw, bias, rate));
  }
}
/// Makes this thread's decays, and their product over its sub-chunk.
template <GateMode kGateMode, class C>
__device__ void transform_gates(C& c, const float2 (&raw)[kSubchunk], float2 bias, float rate) {
  constexpr bool kBounded = kGateMode == GateMode::kBounded;
  const int count = c.channel() < c.a.shape.K ? c.chunk.count - c.subchunk() * kSubchunk : 0;
  const float bound = kBounded ? c.a.gate.lower_bound * kLog2e : c.a.gate.lower_bound;
  const float slope = kBounded ? rate * kLog2e : rate;
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i)
    c.decay[i] = {decay_of<kGateMode>(raw[i].x, bias.x, slope, bound),
                  decay_of<kGateMode>(raw[i].y, bias.y, slope, bound)};
  if (count < kSubchunk)  // masked after the transform: gate(0) is not 0
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i)
      if (i >= count) c.decay[i] = {1, 1};
  float2 product{1, 1};
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) multiply(product, c.decay[i]);
  *reinterpret_cast<float2*>(&c.s.totals[c.subchunk()][c.channel()]) = product;
}

// ---- all inputs

/// Everything that the chunk needs from device memory but v, all on its way before any of it is
/// waited for: converting a value waits for it. Without scores nothing needs beta, and only qg
/// needs q.
template <bool kScores, class C>
__device__ void load_inputs(C& c) {
  const HeadGates<ChunkIntraArgs>& a = c.a;
  const int head = c.head;
  const int q_head = q_head_of(a, head);
  if (kScores || a.factors.qg) load_rows(c, c.s.q, a.q, q_head, 0, a.shape.K);
  load_rows(c, c.s.k, a.k, q_head, 0, a.shape.K);
  uint32_t raw_beta = 0;
  if (kScores && c.tid < c.chunk.count)
    raw_beta = load_bits(a.beta.base, a.beta.type,
                         chunk_offset(a.beta, c.chunk, head) + c.tid * a.beta.stride_t);
  const float A_log = a.gate.A_log ? a.gate.A_log[head * a.gate.stride_A] : 0.0f;
  float2 raw[kSubchunk], bias{0, 0};
  if (c.channel() < a.shape.K && a.gate.dt_bias) {
    const float* row = a.gate.dt_bias + head * a.gate.stride_dt + c.channel();
    bias = {row[0], row[1]};
  }
  load_gates(c, raw);
  const float rate = expf(A_log);
  if (a.gate.gate_mode == GateMode::kLog) transform_gates<GateMode::kLog>(c, raw, bias, rate);
  if (a.gate.gate_mode == GateMode::kSoftplus)
    transform_gates<GateMode::kSoftplus>(c, raw, bias, rate);
  if (a.gate.gate_mode == GateMode::kBounded)
    transform_gates<GateMode::kBounded>(c, raw, bias, rate);
  if (kScores && c.tid < kChunk)
    c.s.beta[c.tid] =
        c.tid < c.chunk.count ? beta_value(a.gate, float_of(raw_beta, a.beta.type)) : 0.0f;
  ptx::cp_async_wait<0>();
  __syncthreads();
}

template <class C>
__device__ uint32_t raw_pair(const C& c, const RowsOf<C>* rows, int i) {
  return *reinterpret_cast<const uint32_t*>(&rows[c.subchunk() * kSubchunk + i][c.channel()]);
}
/// Takes this thread's pairs of q and k to registers.
template <class C>
__device__ void keep_pairs(C& c) {
  if (c.tid < kSubchunks) c.s.anchored[c.tid] = C::kAnchored ? kSubchunk : 0;
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i)
    c.q[i] = raw_pair(c, c.s.q, i), c.k[i] = raw_pair(c, c.s.k, i);
}

/// Whether a log gate of this thread is positive, or NaN; other gates never are.
template <class C>
__device__ bool has_growth(const C& c) {
  bool grows = false;
  if (c.a.gate.gate_mode == GateMode::kLog)
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i) grows = grows || !(c.decay[i].x <= 1 && c.decay[i].y <= 1);
  return grows;
}

// ---- norms

/// Norms of rows that come normalised; find_norms() otherwise.
template <class C>
__device__ void unit_norms(const C& c) {
  if (c.tid < kChunk) c.s.q_norm[c.tid] = c.a.gate.scale, c.s.k_norm[c.tid] = 1;
}
/// Row norms and the diagonal of Aqk, 8 rows at a time: diagonals of [q; k] k^T and of q q^T.
template <bool kScores, class C>
__device__ void find_norms(const C& c) {
  auto& s = c.s;
#pragma unroll
  for (int row0 = c.warp() * 8; row0 < kChunk; row0 += C::kWarps * 8) {
    const RowsOf<C>* half = c.lane() % 16 < 8 ? s.q : s.k;
    const uint32_t rows = ptx::shared_address(&half[row0 + c.lane() % 8][c.lane() / 16 * 8]);
    float with_k[4] = {}, with_q[4] = {};
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t x[4];  // q and k of 8 channels, then of the next 8
      ptx::ldmatrix_x4(x, rows + step * 32);
      ptx::mma_16816<typename C::T>(with_k, x, x[1], x[3]);
      ptx::mma_16816<typename C::T>(with_q, x, x[0], x[2]);
    }
    const int r = c.lane() / 4;
    if (c.lane() % 4 != r / 2) continue;  // another lane has the diagonal
    const bool odd = r % 2;
    const float qq = odd ? with_q[1] : with_q[0], kk = odd ? with_k[3] : with_k[2];
    const float qk = odd ? with_k[1] : with_k[0];
    const int row = row0 + r;
    const float q_norm = c.a.gate.scale * (c.a.gate.l2norm ? rsqrtf(qq + 1e-6f) : 1.0f);
    const float k_norm = c.a.gate.l2norm ? rsqrtf(kk + 1e-6f) : 1.0f;
    s.q_norm[row] = q_norm;  // with the scale of the outputs
    s.k_norm[row] = k_norm;
    if constexpr (kScores) {
      s.k_beta[row] = k_norm * s.beta[row];
      s.diag[row] = qk * q_norm * k_norm;
    }
  }
}

/// Decays over the sub-chunks before and after each, for decayed_rows(); beside find_norms().
template <class C>
__device__ void scan_totals(const C& c) {
  if (c.tid >= C::kK) return;
  const bool forward = c.tid < C::kK / 2;
  const int channel = c.tid % (C::kK / 2) * 2;
  float2 product{1, 1};
#pragma unroll
  for (int i = 0; i < kSubchunks; ++i) {
    const int r = forward ? i : kSubchunks - 1 - i;
    float* target = forward ? &c.s.decay_before[r][channel] : &c.s.decay_after[r][channel];
    *reinterpret_cast<float2*>(target) = product;
    multiply(product, *reinterpret_cast<const float2*>(&c.s.totals[r][channel]));
  }
}

}  // namespace kda::cuda::intra
