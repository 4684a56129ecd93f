// SPDX-License-Identifier: Apache-2.0
// Elements of any stored type as fp32, addresses of rows and states, gate transforms.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;

/// An element as it lies in memory, and its value. Converting waits for the load, so it is a step
/// of its own: whatever is loaded in between is on its way by then.
__device__ __forceinline__ uint32_t load_bits(const void* base, Element type, int64_t at) {
  return type == Element::kFloat32 ? static_cast<const uint32_t*>(base)[at]
                                   : static_cast<const uint16_t*>(base)[at];
}
__device__ __forceinline__ float float_of(uint32_t bits, Element type) {
  if (type == Element::kFloat32) return __uint_as_float(bits);
  if (type == Element::kBFloat16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

__device__ __forceinline__ void store_element(void* base, Element type, int64_t at, float x) {
  if (type == Element::kFloat32)
    static_cast<float*>(base)[at] = x;
  else if (type == Element::kBFloat16)
    static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(x);
  else
    static_cast<__half*>(base)[at] = __float2half_rn(x);
}

/// Offset of a row: token `t` of its sequence, which begins at flattened token `begin`.
__device__ __forceinline__ int64_t row_offset(const RowView& view, const SequenceMap& map,
                                              int64_t sequence, int64_t token, int64_t head) {
  // Without cu_seqlens sequence n is batch row n; with it the batch has one row.
  if (!map.cu_seqlens)
    return sequence * view.stride_b + (token - sequence * map.num_tokens) * view.stride_t +
           head * view.stride_h;
  return token * view.stride_t + head * view.stride_h;
}

__device__ __forceinline__ TokenRange sequence_range(const SequenceMap& map, int64_t n) {
  if (!map.cu_seqlens) return {n, n * map.num_tokens, (n + 1) * map.num_tokens};
  return {n, map.cu_seqlens[n], map.cu_seqlens[n + 1]};
}

__device__ __forceinline__ TokenRange range_of(const SequenceMap& map, int64_t unit) {
  return map.segments ? map.segments[unit] : sequence_range(map, unit);
}

/// Whether an index means none.
template <class States>
__device__ __forceinline__ bool is_none(const States& states, int64_t slot) {
  return slot < states.first_slot;
}

/// Whether the buffer has no such slot.
template <class States>
__device__ __forceinline__ bool lacks_slot(const States& states, int64_t slot) {
  return is_none(states, slot) || slot >= states.num_slots;
}

/// Slot that sequence n uses, or -1: none.
__device__ __forceinline__ int64_t state_slot(const StateView& view, int64_t n) {
  if (!view.base || (view.mask && view.mask[n] == 0)) return -1;
  const int64_t slot = view.indices ? view.indices[n] : n;
  // Written out, for the compilers order the code of most kernels by how it is written.
  return slot < view.first_slot || slot >= view.num_slots ? -1 : slot;
}

__device__ __forceinline__ int64_t state_offset(const StateView& view, int64_t slot, int64_t head,
                                                int k, int v) {
  const int row = view.vk ? v : k;
  const int column = view.vk ? k : v;
  return slot * view.stride_slot + head * view.stride_head + row * view.stride_row + column;
}

template <bool kBf16>
__device__ __forceinline__ float load_state(const void* base, int64_t at) {
  return kBf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(base)[at])
               : static_cast<const float*>(base)[at];
}
/// A state element as it lies in memory, in a float; widen_state() makes it the value.
__device__ __forceinline__ float load_state_bits(const StateView& view, int64_t at) {
  return __uint_as_float(view.bf16 ? static_cast<const uint16_t*>(view.base)[at]
                                   : static_cast<const uint32_t*>(view.base)[at]);
}
__device__ __forceinline__ float widen_state(float bits) {
  return __uint_as_float(__float_as_uint(bits) << 16);
}

template <bool kBf16>
__device__ __forceinline__ void store_state(void* base, int64_t at, float x) {
  if constexpr (kBf16)
    static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(x);
  else
    static_cast<float*>(base)[at] = x;
}
__device__ __forceinline__ void store_state(const StateView& view, int64_t at, float x) {
  view.bf16 ? store_state<true>(view.base, at, x) : store_state<false>(view.base, at, x);
}

/// Log decay from the raw gate, with fp32's accuracy (docs/operation.md).
__device__ __forceinline__ float log_decay_exact(const GateView& gate, float raw, float bias,
                                                 float rate) {
  const float x = raw + bias;
  float g = raw;
  if (gate.gate_mode == GateMode::kSoftplus) g = -rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
  if (gate.gate_mode == GateMode::kBounded) g = gate.lower_bound / (1.0f + expf(-rate * x));
  return g;
}
__device__ __forceinline__ float log2_decay_exact(const GateView& gate, float raw, float bias,
                                                  float rate) {
  return log_decay_exact(gate, raw, bias, rate) * kLog2e;
}

/// The log decay with the fast units: relative error below 2^-18, also for the slowest channels (no
/// tanh, no log of a number near 1).
template <GateMode kGateMode>
__device__ __forceinline__ float log2_decay_fast(float raw, float bias, float rate) {
  static_assert(kGateMode == GateMode::kLog || kGateMode == GateMode::kSoftplus);
  if constexpr (kGateMode == GateMode::kLog) return raw * kLog2e;
  const float x = raw + bias;
  const float e = ptx::ex2(-fabsf(x) * kLog2e);
  const float log2_1pe = ptx::lg2(1.0f + e);
  const float series = e * (1.0f - e * (0.5f - e * 0.33333333f)) * kLog2e;
  return -rate * (fmaxf(x, 0.0f) * kLog2e + (e < 0.015625f ? series : log2_1pe));
}

__device__ __forceinline__ float beta_value(const GateView& gate, float raw) {
  if (gate.beta_mode == BetaMode::kPlain) return raw;
  return (gate.beta_mode == BetaMode::kSigmoid2 ? 2.0f : 1.0f) / (1.0f + expf(-raw));
}

}  // namespace kda::cuda
