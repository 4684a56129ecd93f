// SPDX-License-Identifier: Apache-2.0
// The norm behind KDA, by rows of one head and with an output gate:
//
//   y = x / sqrt(mean(x^2) + eps) * weight * act(gate)
//
// It needs no plan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kda/status.hpp"
#include "kda/tensor.hpp"
#include "kda/types.hpp"

namespace kda {

struct GatedRmsNorm {
  /// As B, T and heads; their product is what counts, on CUDA below 2^31.
  std::array<int64_t, 3> rows{1, 1, 1};
  int64_t channels = 0;                          ///< D, over which the mean goes
  double eps = 1e-6;                             ///< finite, not negative
  Activation activation = Activation::kSigmoid;  ///< of the gate

  /// [rows.., D], fp32, bf16 or fp16, each its own type; the innermost stride is 1, any others.
  TensorView x, y;
  TensorView gate;    ///< the same, or none
  TensorView weight;  ///< [D], the same types, stride 1, or none

  int32_t num_threads = 0;  ///< on the CPU; 0: OMP_NUM_THREADS, else the cores of this process

  DeviceKind device = DeviceKind::kCpu;  ///< where all of the memory is; the rest is for CUDA
  void* stream = nullptr;                ///< cudaStream_t of the current device
  bool trusted = false;       ///< vouches that pointers and stream belong to the current device
  void* workspace = nullptr;  ///< of a backward that wants dweight, on the device
  std::size_t workspace_bytes = 0;
};

/// Writes y. Arithmetic is fp32; the bits of a row depend on no other row, on no stride and not on
/// num_threads. Errors name the field.
Status gated_rms_norm(const GatedRmsNorm& call) noexcept;

/// A gradient without memory is not wanted; dy is needed.
struct GatedRmsNormGradients {
  TensorView dy, dx;   ///< [rows.., D]
  TensorView dgate;    ///< [rows.., D]
  TensorView dweight;  ///< [D]
};

/// Gradients of gated_rms_norm() of the same call; y is not looked at. Sums over rows are in fp32
/// over 32 rows (CUDA: of a group of rows, of which there are up to 8192), those in fp64, in one
/// order: a call repeats its bits.
Status gated_rms_norm_backward(const GatedRmsNorm& call,
                               const GatedRmsNormGradients& gradients) noexcept;
/// Bytes of the workspace for it, aligned to 4; 0 on the CPU.
std::size_t gated_rms_norm_backward_workspace(const GatedRmsNorm& call) noexcept;

}  // namespace kda
