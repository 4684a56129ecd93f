// SPDX-License-Identifier: Apache-2.0
// The way back through gates and step sizes (equations: stage/backward.hpp).
#pragma once

#include "cuda/tile/arguments.hpp"

namespace kda::cuda::backward {

/// a b, and 0 where b is 0 whatever a is; NaN stays NaN.
__device__ __forceinline__ float product_or_zero(float a, float b) {
  return fabsf(b) > 0 ? a * b : b * 0.0f;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
/// s(x) s(-x), which loses nothing where s is near 1.
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = expf(-fabsf(x));
  return e / ((1.0f + e) * (1.0f + e));
}

__device__ __forceinline__ float step_slope(const GateView& gate, float raw) {
  if (gate.beta_mode == BetaMode::kPlain) return 1;
  return (gate.beta_mode == BetaMode::kSigmoid2 ? 2.0f : 1.0f) * sigmoid_slope(raw);
}

/// Gradients by what a log decay is made from.
struct GateGradient {
  float raw;    ///< by the raw gate, and by dt_bias
  float A_log;  ///< by A_log
};
__device__ __forceinline__ GateGradient undo_gate(const GateView& gate, float raw, float bias,
                                                  float rate, float dg) {
  const float x = raw + bias;
  if (gate.gate_mode == GateMode::kSoftplus)
    return {product_or_zero(-rate * sigmoid(x), dg),
            product_or_zero(-rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))), dg)};
  if (gate.gate_mode == GateMode::kBounded) {
    const float inner = product_or_zero(gate.lower_bound * sigmoid_slope(rate * x), dg);
    return {rate * inner, product_or_zero(rate * x, inner)};
  }
  return {dg, 0};
}

}  // namespace kda::cuda::backward
