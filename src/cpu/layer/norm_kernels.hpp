// SPDX-License-Identifier: Apache-2.0
// One row of the gated RMS norm, forward and backward (kernels.hpp).
#pragma once

#include "cpu/blocked/rows.hpp"
#include "cpu/layer/activation.hpp"
#include "cpu/layer/kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

using layer::NormRow;
using layer::NormRowGradients;

/// Elements [at, at + kWidth) of a row of `channels`, zero behind its end.
static inline F load_part(const char* row, DType dtype, int64_t at, int64_t channels) {
  const char* source = row + at * element_bytes(dtype);
  if (at + kWidth <= channels) return load_vector(source, dtype);
  float part[kWidth];
  load_row(source, dtype, static_cast<int>(channels - at), kWidth, part);
  return load(part);
}

static inline void store_part(char* row, DType dtype, int64_t at, int64_t channels, F x) {
  char* target = row + at * element_bytes(dtype);
  if (at + kWidth <= channels) return store_vector(target, dtype, x);
  float part[kWidth];
  store(part, x);
  store_row(part, dtype, static_cast<int>(channels - at), target);
}

static inline F weight_part(const NormRow& row, int64_t at) {
  return row.weight ? load_part(row.weight, row.weight_dtype, at, row.channels) : set1(1.0f);
}

static inline F gate_part(const NormRow& row, int64_t at) {
  return load_part(row.gate, row.gate_dtype, at, row.channels);
}

/// 1 / sqrt(mean(x^2) + eps)
static inline float reciprocal_norm(const NormRow& row) {
  F sum = set1(0.0f);
  for (int64_t at = 0; at < row.channels; at += kWidth) {
    const F x = load_part(row.x, row.x_dtype, at, row.channels);
    sum = fma(x, x, sum);
  }
  const float mean = reduce_add(sum) / static_cast<float>(row.channels);
  return 1.0f / __builtin_sqrtf(mean + row.eps);
}

static void norm(const NormRow& row, char* y, DType y_dtype) {
  const F factor = set1(reciprocal_norm(row));
  for (int64_t at = 0; at < row.channels; at += kWidth) {
    F value = load_part(row.x, row.x_dtype, at, row.channels) * factor * weight_part(row, at);
    if (row.gate) value = value * activate(row.activation, gate_part(row, at));
    store_part(y, y_dtype, at, row.channels, value);
  }
}

/// With n = x / norm and dn = dy weight act(gate): dx = (dn - n mean(dn n)) / norm,
/// dgate = dy n weight act'(gate), dweight += dy n act(gate).
static void norm_backward(const NormRow& row, const NormRowGradients& gradients) {
  const F factor = set1(reciprocal_norm(row));
  const int64_t D = row.channels;
  const auto activated = [&](int64_t at) {
    return row.gate ? activate_with_slope(row.activation, gate_part(row, at))
                    : Activated{set1(1.0f), set1(0.0f)};
  };
  F sum = set1(0.0f);
  for (int64_t at = 0; at < D; at += kWidth) {
    const F n = load_part(row.x, row.x_dtype, at, D) * factor;
    const F dy = load_part(gradients.dy, gradients.dy_dtype, at, D);
    sum = fma(dy * weight_part(row, at) * activated(at).value, n, sum);
  }
  const F mean = set1(reduce_add(sum) / static_cast<float>(D));
  for (int64_t at = 0; at < D; at += kWidth) {
    const F n = load_part(row.x, row.x_dtype, at, D) * factor;
    const F dy = load_part(gradients.dy, gradients.dy_dtype, at, D);
    const F weight = weight_part(row, at);
    const Activated a = activated(at);
    if (gradients.dx)
      store_part(gradients.dx, gradients.dx_dtype, at, D,
                 fnma(n, mean, dy * weight * a.value) * factor);
    if (gradients.dgate)
      store_part(gradients.dgate, gradients.dgate_dtype, at, D, dy * n * weight * a.slope);
    if (gradients.dweight) {
      char* sums = reinterpret_cast<char*>(gradients.dweight);
      const F before = load_part(sums, DType::kFloat32, at, D);
      store_part(sums, DType::kFloat32, at, D, fma(dy * n, a.value, before));
    }
  }
}

}  // namespace kda::cpu::blocked::KDA_ISA
