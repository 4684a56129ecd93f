// SPDX-License-Identifier: Apache-2.0
// One decode step of a KDA layer in one kernel, on CUDA: short convolution with SiLU of q, k and v,
// the recurrence, output gate and RMS norm, for 1 to 8 tokens of each sequence, on pools of states
// in place. It is short_conv(), decode and gated_rms_norm() (docs/operation.md, docs/layer.md) one
// after the other, without the roundings between them. It needs no plan and no workspace.
#pragma once

#include <cstdint>

#include "kda/problem.hpp"
#include "kda/short_conv.hpp"
#include "kda/status.hpp"
#include "kda/tensor.hpp"
#include "kda/types.hpp"

namespace kda {

struct FusedDecode {
  int64_t num_sequences = 0;  ///< N
  int64_t num_tokens = 1;     ///< T of each sequence, 1 to 8
  int64_t num_heads = 1;      ///< H, of q, k and v alike
  int64_t head_dim = 128;     ///< D = K = V: 128
  int64_t width = 4;          ///< W of the convolution, 2 to 4

  /// A projection and its convolution. fp32, bf16 or fp16, any strides.
  struct Part {
    TensorView x;       ///< [N, T, H D]
    TensorView weight;  ///< [H D, W]
    TensorView bias;    ///< [H D] or none
    TensorView state;   ///< [num_slots, H D, S], in place
  };
  Part q, k, v;
  int64_t state_width = 3;  ///< S, at least W - 1

  TensorView g;     ///< [N, T, H, D]
  TensorView beta;  ///< [N, T, H]
  GateMode gate_mode = GateMode::kLog;
  BetaMode beta_mode = BetaMode::kPlain;
  double lower_bound = -5;
  double scale = 0;    ///< 0: D^-1/2
  TensorView A_log;    ///< fp32 [H], by gate_mode as in Problem
  TensorView dt_bias;  ///< fp32 [H D] or none

  /// fp32 or bf16, [num_slots, H, D, D], in place: rows of K (kv) or of V (vk) without gaps,
  /// 16-byte aligned as every stride.
  TensorView state;
  StateLayout state_layout = StateLayout::kKV;
  int64_t num_slots = 0;
  /// [N] slots of both pools; no two sequences have one. Null: sequence n has slot n. Outside of
  /// first_slot..num_slots - 1: the sequence is skipped, its y is 0 and nothing else is touched.
  const int32_t* slots = nullptr;
  int64_t first_slot = 0;
  const uint8_t* has_state = nullptr;  ///< [N]; where 0 a sequence starts from zero

  Activation activation = Activation::kSigmoid;  ///< of the output gate
  bool qk_l2norm = true;
  bool norm = true;        ///< divide by the root of the mean square of a head
  double norm_eps = 1e-5;  ///< as in GatedRmsNorm
  TensorView norm_weight;  ///< [D] or none
  TensorView output_gate;  ///< [N, T, H, D] or none
  TensorView y;            ///< [N, T, H, D]

  void* stream = nullptr;  ///< cudaStream_t of the current device
  DeviceKind device = DeviceKind::kCuda;
  bool trusted = false;  ///< vouches that pointers and stream belong to the current device
};

/// Writes y and the states. Arithmetic is fp32. A call whose arguments are right is kUnsupported on
/// a CPU and for other sizes and layouts than the above. Errors name the field; nothing is written
/// then. slots, has_state and A_log are read by the host where `device` is the CPU.
Status fused_decode(const FusedDecode& call) noexcept;

}  // namespace kda
