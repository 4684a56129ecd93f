// SPDX-License-Identifier: Apache-2.0
// Activations and their slopes on SIMD registers, fp32; a NaN stays one.
#pragma once

#include "cpu/blocked/math.hpp"

namespace kda::cpu::blocked::KDA_ISA {

/// sigmoid() loses a NaN, and a clamped x that is 0 times it brings one back.
static inline F sigmoid_or_nan(F x) {
  const F bounded = max(set1(-104.0f), min(set1(104.0f), x));  // both give the second for a NaN
  return fma(set1(0.0f), bounded, sigmoid(x));
}

struct Activated {
  F value, slope;
};

static inline F activate(Activation activation, F x) {
  if (activation == Activation::kNone) return x;
  return activation == Activation::kSilu ? x * sigmoid(x) : sigmoid_or_nan(x);
}

/// silu' = s (1 + x (1 - s)), sigmoid' = s (1 - s); 1 - s as sigmoid(-x), which keeps its digits.
static inline Activated activate_with_slope(Activation activation, F x) {
  if (activation == Activation::kNone) return {x, set1(1.0f)};
  const F s = sigmoid_or_nan(x);
  const F rest = sigmoid_or_nan(set1(0.0f) - x);
  if (activation == Activation::kSigmoid) return {s, s * rest};
  return {x * s, s * fma(x, rest, set1(1.0f))};
}

}  // namespace kda::cpu::blocked::KDA_ISA
