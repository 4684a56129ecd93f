// SPDX-License-Identifier: Apache-2.0
// One gate a head, and q/k heads that are tiled over the value heads. Decode, the recurrence, their
// backward and the fused forward have instances of their own for them (src/cuda/head_gates), whose
// arguments say more. Kernels of stages ask at run time.
#pragma once

#include "core/host_device.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

template <class Base>
struct HeadGates : Base {
  int32_t gate_step = 1;   ///< elements from one channel's gate to the next; 0: one a head
  int32_t dgate_step = 1;  ///< the same of dg; 0: the sum over channels
  bool tiled = false;      ///< value head j reads q/k head j % H
  bool one_bias = false;   ///< dt_bias has one element a head
};

template <class Args>
inline constexpr bool kHasHeadGates = requires(const Args& args) {
  args.gate_step;
};

template <class Args>
KDA_HOST_DEVICE_INLINE int gate_step(const Args& a) {
  if constexpr (kHasHeadGates<Args>)
    return a.gate_step;
  else
    return 1;
}

/// Whether kernels with these arguments read one bias a head as it is.
template <class Args>
inline constexpr bool kReadsHeadBias = kHasHeadGates<Args>;

/// Elements from one channel's bias to the next.
template <class Args>
KDA_HOST_DEVICE_INLINE int bias_step(const Args& a) {
  if constexpr (kReadsHeadBias<Args>)
    return a.one_bias ? 0 : 1;
  else
    return 1;
}

template <class Args>
KDA_HOST_DEVICE_INLINE bool has_tiled_heads(const Args& a) {
  if constexpr (kHasHeadGates<Args>)
    return a.tiled;
  else
    return false;
}

/// The q/k head of a value head, of HV. 32-bit divisions: 64-bit ones take longer than a token.
template <class Args>
KDA_HOST_DEVICE_INLINE int64_t q_head_of(const Args& a, int64_t value_head, unsigned HV) {
  if (has_tiled_heads(a))
    return static_cast<unsigned>(value_head) % static_cast<unsigned>(a.shape.H);
  return static_cast<unsigned>(value_head) / (HV / static_cast<unsigned>(a.shape.H));
}

/// Finds it by the divisor of the shape.
template <class Args>
KDA_HOST_DEVICE_INLINE int q_head_of(const Args& a, int value_head) {
  const auto head = static_cast<unsigned>(value_head);
  return static_cast<int>(has_tiled_heads(a) ? head % static_cast<unsigned>(a.shape.H)
                                             : a.shape.group.quotient(head));
}

/// Value head `i` of those that read a q/k head.
template <class Args>
KDA_HOST_DEVICE_INLINE int value_head_of(const Args& a, int q_head, int i) {
  return has_tiled_heads(a) ? q_head + i * static_cast<int>(a.shape.H)
                            : q_head * static_cast<int>(a.shape.group.value) + i;
}

}  // namespace kda::cuda
