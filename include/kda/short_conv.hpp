// SPDX-License-Identifier: Apache-2.0
// The causal depthwise convolution in front of KDA: a few taps a channel, then a bias and SiLU. It
// needs no plan.
//
// Per sequence and channel d, with W taps and u the x of the sequence behind its initial state:
//
//   p_t = bias_d + sum_{j < W} weight_{d,j} u_{t - W + 1 + j},   y_t = act(p_t)
//
// weight_{d,W-1} is the tap of the token itself. A state holds the last S inputs of a sequence, the
// oldest first (S >= W - 1; the convolution reads the last W - 1). Without one the inputs before a
// sequence are zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kda/status.hpp"
#include "kda/tensor.hpp"
#include "kda/types.hpp"

namespace kda {

/// States of sequences: [num_slots, D, state_width], any strides.
struct ConvState {
  TensorView tensor;  ///< fp32, bf16 or fp16; without memory there are no states
  int64_t num_slots = 0;
  /// [N] slots; below first_slot: none. Null: sequence n has slot n, and num_slots is N.
  const int32_t* indices = nullptr;
};

struct ShortConv {
  int64_t batch = 1;                          ///< B; 1 with cu_seqlens
  int64_t num_tokens = 0;                     ///< T: of each row of the batch
  int64_t channels = 0;                       ///< D
  int64_t width = 4;                          ///< W: 2, 3 or 4
  Activation activation = Activation::kNone;  ///< kNone or kSilu

  /// x, y [B, T, D], fp32, bf16 or fp16, each its own type; any strides, each tensor its own. What
  /// is [B, D, T] in memory has a stride of 1 along tokens; fast are 1 along tokens or channels.
  TensorView x, y;
  TensorView weight;  ///< [D, W], the same types, any strides
  TensorView bias;    ///< [D] or none

  /// [num_sequences + 1] int32 or int64, from 0 to T. Null: each row of the batch is a sequence. On
  /// CUDA the last may be below T: rows of y and dx behind it are 0.
  const void* cu_seqlens = nullptr;
  DType cu_seqlens_dtype = DType::kInt64;
  int64_t num_sequences = 0;  ///< N, with cu_seqlens

  int64_t state_width = 0;  ///< S of both states
  ConvState initial_state;
  /// May be the initial states, sequence by sequence: in place, on CUDA with the same array of
  /// indices. No two sequences have one slot.
  ConvState final_state;
  const uint8_t* has_state = nullptr;  ///< [N]; where 0 a sequence starts from zero
  int64_t first_slot = 0;              ///< smaller indices are no slot

  int32_t num_threads = 0;  ///< on the CPU; 0: OMP_NUM_THREADS, else the cores of this process

  DeviceKind device = DeviceKind::kCpu;  ///< where all of the memory is; the rest is for CUDA
  void* stream = nullptr;                ///< cudaStream_t of the current device
  bool trusted = false;       ///< vouches that pointers and stream belong to the current device
  void* workspace = nullptr;  ///< of a backward that wants dweight or dbias, on the device
  std::size_t workspace_bytes = 0;
};

/// Writes y and final_state. Sums are in fp32, tap by tap from the oldest; a result does not depend
/// on num_threads, nor on the other sequences. Errors name the field. cu_seqlens, indices and
/// has_state are on the device too, where nobody looks at them first: offsets are clamped to 0..T,
/// a slot of num_slots or more is none, and two sequences must not have one slot.
Status short_conv(const ShortConv& call) noexcept;

/// A gradient without memory is not wanted, or (dy, d_final_state) is zero.
struct ShortConvGradients {
  TensorView dy;               ///< [B, T, D] as y
  TensorView d_final_state;    ///< [N, D, S]
  TensorView dx;               ///< [B, T, D] as x
  TensorView dweight;          ///< [D, W]
  TensorView dbias;            ///< [D]
  TensorView d_initial_state;  ///< [N, D, S]
};

/// Gradients of short_conv() of the same call, whose x and initial_state are unchanged; y and
/// final_state are not looked at. States have no indices. Sums over tokens are in fp32 over 16
/// tokens (CUDA: 128 or fewer), those in fp64, in one order: a call repeats its bits. A sequence
/// whose has_state is 0 has a d_initial_state of zero.
Status short_conv_backward(const ShortConv& call, const ShortConvGradients& gradients) noexcept;
/// Bytes of the workspace for it, aligned to 4; 0 on the CPU.
std::size_t short_conv_backward_workspace(const ShortConv& call) noexcept;

}  // namespace kda
