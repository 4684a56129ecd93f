// SPDX-License-Identifier: Apache-2.0
// exp, log1p, sigmoid and the gate on SIMD registers, fp32.
// Measured maximum relative errors: tests/cpu/math_test.cpp.
#pragma once

#include "cpu/blocked/kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

struct ExpPair {
  F exp;    // e^x
  F expm1;  // e^x - 1, with the relative accuracy of x for small |x|
};

/// e^x = 2^n (1 + p), r = x - n ln 2, |r| <= ln(2)/2, p = e^r - 1 by its Taylor polynomial.
/// Below -104 (fp32 0 even with subnormals) x is clamped: the result is 0, also for -inf.
static inline __attribute__((always_inline)) ExpPair exp_pair(F x) {
  x = max(min(x, set1(89.0f)), set1(-104.0f));
  const F n = round(x * set1(1.44269504f));
  F r = fnma(n, set1(0.693145751953125f), x);  // ln 2 in two parts, the first exact with n
  r = fnma(n, set1(1.428606765330187e-6f), r);
  F p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r * r, r);
  const F two_n = scale_pow2(set1(1.0f), n);
  const F whole = scale_pow2(set1(1.0f) + p, n);
  const F small = fma(two_n, p, two_n - set1(1.0f));
  // Where e^x > 1.4 the subtraction is harmless, and 2^n may be infinite.
  return {whole, select_greater(n, set1(0.5f), whole - set1(1.0f), small)};
}

static inline __attribute__((always_inline)) F exp(F x) { return exp_pair(x).exp; }

/// 1 / (1 + e^-x): relative accuracy for every x, which slow gates need (a tanh form has none).
static inline __attribute__((always_inline)) F sigmoid(F x) {
  return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x));
}

/// log(1 + y), 0 <= y <= 1, as 2 atanh(s), s = y / (2 + y) <= 1/3.
static inline F log1p_unit(F y) {
  const F s = y / (y + set1(2.0f));
  const F s2 = s * s;
  F p = set1(1.0f / 15);
  p = fma(p, s2, set1(1.0f / 13));
  p = fma(p, s2, set1(1.0f / 11));
  p = fma(p, s2, set1(1.0f / 9));
  p = fma(p, s2, set1(1.0f / 7));
  p = fma(p, s2, set1(1.0f / 5));
  p = fma(p, s2, set1(1.0f / 3));
  const F twice = s + s;
  return fma(p * s2, twice, twice);
}

static inline F softplus(F x) { return max(x, set1(0.0f)) + log1p_unit(exp(set1(0.0f) - abs(x))); }

/// Log decay of x = raw gate + dt_bias (docs/operation.md, "Gates").
static inline F log_decay(GateMode mode, F x, F factor, F lower_bound) {
  switch (mode) {
    case GateMode::kLog: break;
    case GateMode::kSoftplus: return set1(0.0f) - factor * softplus(x);
    case GateMode::kBounded: return lower_bound * sigmoid(factor * x);
  }
  return x;
}

}  // namespace kda::cpu::blocked::KDA_ISA
