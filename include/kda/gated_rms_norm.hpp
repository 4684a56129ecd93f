// SPDX-License-Identifier: Apache-2.0
// The norm behind KDA, by rows of one head and with an output gate:
//
//   y = x / sqrt(mean(x^2) + eps) * weight * act(gate)
//
// On the CPU. It needs no plan and no workspace.
#pragma once

#include <array>
#include <cstdint>

#include "kda/status.hpp"
#include "kda/tensor.hpp"
#include "kda/types.hpp"

namespace kda {

struct GatedRmsNorm {
  std::array<int64_t, 3> rows{1, 1, 1};  ///< as B, T and heads; their product is what counts
  int64_t channels = 0;                  ///< D, over which the mean goes
  double eps = 1e-6;                     ///< finite, not negative
  Activation activation = Activation::kSigmoid;  ///< of the gate

  /// [rows.., D], fp32, bf16 or fp16, each its own type; the innermost stride is 1, any others.
  TensorView x, y;
  TensorView gate;    ///< the same, or none
  TensorView weight;  ///< [D], the same types, stride 1, or none

  int32_t num_threads = 0;  ///< 0: OMP_NUM_THREADS, else the cores of this machine
};

/// Writes y. Arithmetic is fp32; a result does not depend on num_threads. Memory is of the host.
/// Errors name the field.
Status gated_rms_norm(const GatedRmsNorm& call) noexcept;

/// A gradient without memory is not wanted; dy is needed.
struct GatedRmsNormGradients {
  TensorView dy, dx;   ///< [rows.., D]
  TensorView dgate;    ///< [rows.., D]
  TensorView dweight;  ///< [D]
};

/// Gradients of gated_rms_norm() of the same call; y is not looked at. Sums over rows are in fp32
/// over 32 rows, those in fp64.
Status gated_rms_norm_backward(const GatedRmsNorm& call,
                               const GatedRmsNormGradients& gradients) noexcept;

}  // namespace kda
