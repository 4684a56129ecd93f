// SPDX-License-Identifier: Apache-2.0
// Rows of the gated RMS norm, forward and backward (kernels.hpp).
#pragma once

#include "cpu/blocked/rows.hpp"
#include "cpu/layer/activation.hpp"
#include "cpu/layer/kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

using layer::NormRow;
using layer::NormRowGradients;
using layer::NormSteps;

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

/// With n = x / norm and dn = dy weight act(gate): dx = (dn - n mean(dn n)) / norm,
/// dgate = dy n weight act'(gate), dweight += dy n act(gate).
struct NormSlopes {
  F n, dy, weight;
  Activated gate;

  F dn() const { return dy * weight * gate.value; }
  F dx(F mean, F factor) const { return fnma(n, mean, dn()) * factor; }
  F dgate() const { return dy * n * weight * gate.slope; }
  F dweight(F before) const { return fma(dy * n, gate.value, before); }
};

static void norm(const NormRow& row, char* y, DType y_dtype) {
  const F factor = set1(reciprocal_norm(row));
  for (int64_t at = 0; at < row.channels; at += kWidth) {
    F value = load_part(row.x, row.x_dtype, at, row.channels) * factor * weight_part(row, at);
    if (row.gate) value = value * activate(row.activation, gate_part(row, at));
    store_part(y, y_dtype, at, row.channels, value);
  }
}

static void norm_backward(const NormRow& row, const NormRowGradients& gradients) {
  const F factor = set1(reciprocal_norm(row));
  const int64_t D = row.channels;
  const auto slopes = [&](int64_t at) -> NormSlopes {
    return {load_part(row.x, row.x_dtype, at, D) * factor,
            load_part(gradients.dy, gradients.dy_dtype, at, D), weight_part(row, at),
            row.gate ? activate_with_slope(row.activation, gate_part(row, at))
                     : Activated{set1(1.0f), set1(0.0f)}};
  };
  F sum = set1(0.0f);
  for (int64_t at = 0; at < D; at += kWidth) {
    const NormSlopes part = slopes(at);
    sum = fma(part.dn(), part.n, sum);
  }
  const F mean = set1(reduce_add(sum) / static_cast<float>(D));
  for (int64_t at = 0; at < D; at += kWidth) {
    const NormSlopes part = slopes(at);
    if (gradients.dx) store_part(gradients.dx, gradients.dx_dtype, at, D, part.dx(mean, factor));
    if (gradients.dgate) store_part(gradients.dgate, gradients.dgate_dtype, at, D, part.dgate());
    if (gradients.dweight) {
      char* sums = reinterpret_cast<char*>(gradients.dweight);
      const F before = load_part(sums, DType::kFloat32, at, D);
      store_part(sums, DType::kFloat32, at, D, part.dweight(before));
    }
  }
}

// ---- rows narrower than a vector: kWidth of them at a time --------------------------------------

/// A channel of kWidth rows in each vector.
struct Turned {
  alignas(64) float at[kWidth * kWidth];

  F operator[](int channel) const { return load(at + channel * kWidth); }
  void set(int channel, F x) { store(at + channel * kWidth, x); }

  /// `filler`: in the lanes of rows that are not there.
  void read(const char* rows, DType dtype, int64_t step, int count, int channels, float filler) {
    if (step == channels && count == kWidth) {
      alignas(64) float dense[kWidth * kWidth];
      load_row(rows, dtype, count * channels, count * channels, dense);
      for (int c = 0; c < channels; ++c)
        for (int i = 0; i < kWidth; ++i) at[c * kWidth + i] = dense[i * channels + c];
      return;
    }
    for (int c = 0; c < channels; ++c)
      for (int i = 0; i < kWidth; ++i)
        at[c * kWidth + i] = i < count ? load_element(rows, dtype, i * step + c) : filler;
  }
  void write(char* rows, DType dtype, int64_t step, int count, int channels) const {
    if (step == channels && count == kWidth) {
      alignas(64) float dense[kWidth * kWidth];
      for (int c = 0; c < channels; ++c)
        for (int i = 0; i < kWidth; ++i) dense[i * channels + c] = at[c * kWidth + i];
      return store_row(dense, dtype, count * channels, rows);
    }
    for (int c = 0; c < channels; ++c)
      for (int i = 0; i < count; ++i) store_element(rows, dtype, i * step + c, at[c * kWidth + i]);
  }
};

/// kWidth rows, or as many as there are. Lanes of others have what adds nothing to a sum.
struct NarrowRows {
  Turned x, gate;
  float weight[kWidth];
  F factor;

  NarrowRows(const NormRow& row, const NormSteps& steps, int64_t first, int count) {
    const auto channels = static_cast<int>(row.channels);
    x.read(row.x + first * steps.x * element_bytes(row.x_dtype), row.x_dtype, steps.x, count,
           channels, 1.0f);
    if (row.gate)
      gate.read(row.gate + first * steps.gate * element_bytes(row.gate_dtype), row.gate_dtype,
                steps.gate, count, channels, 0.0f);
    for (int c = 0; c < channels; ++c)
      weight[c] = row.weight ? load_element(row.weight, row.weight_dtype, c) : 1.0f;
    F sum = set1(0.0f);
    for (int c = 0; c < channels; ++c) sum = fma(x[c], x[c], sum);
    float norms[kWidth];
    store(norms, sum);
    for (float& norm : norms)
      norm = 1.0f / __builtin_sqrtf(norm / static_cast<float>(channels) + row.eps);
    factor = load(norms);
  }
};

static void norm_narrow(const NormRow& row, const NormSteps& steps, int64_t count, char* y,
                        DType y_dtype) {
  const auto channels = static_cast<int>(row.channels);
  for (int64_t first = 0; first < count; first += kWidth) {
    const int here = static_cast<int>(count - first < kWidth ? count - first : kWidth);
    NarrowRows rows(row, steps, first, here);
    for (int c = 0; c < channels; ++c) {
      F value = rows.x[c] * rows.factor * set1(rows.weight[c]);
      if (row.gate) value = value * activate(row.activation, rows.gate[c]);
      rows.x.set(c, value);
    }
    rows.x.write(y + first * steps.y * element_bytes(y_dtype), y_dtype, steps.y, here, channels);
  }
}

static void norm_narrow_backward(const NormRow& row, const NormSteps& steps, int64_t count,
                                 const NormRowGradients& g) {
  const auto channels = static_cast<int>(row.channels);
  for (int64_t first = 0; first < count; first += kWidth) {
    const int here = static_cast<int>(count - first < kWidth ? count - first : kWidth);
    NarrowRows rows(row, steps, first, here);
    Turned dy;
    dy.read(g.dy + first * steps.y * element_bytes(g.dy_dtype), g.dy_dtype, steps.y, here, channels,
            0.0f);
    const auto slopes = [&](int c) -> NormSlopes {
      return {rows.x[c] * rows.factor, dy[c], set1(rows.weight[c]),
              row.gate ? activate_with_slope(row.activation, rows.gate[c])
                       : Activated{set1(1.0f), set1(0.0f)}};
    };
    F sum = set1(0.0f);
    for (int c = 0; c < channels; ++c) sum = fma(slopes(c).dn(), slopes(c).n, sum);
    const F mean = sum * set1(1.0f / static_cast<float>(channels));
    for (int c = 0; c < channels; ++c) {
      const NormSlopes part = slopes(c);
      if (g.dweight) g.dweight[c] += reduce_add(part.dweight(set1(0.0f)));
      rows.x.set(c, part.dx(mean, rows.factor));
      rows.gate.set(c, part.dgate());
    }
    if (g.dx)
      rows.x.write(g.dx + first * steps.dx * element_bytes(g.dx_dtype), g.dx_dtype, steps.dx, here,
                   channels);
    if (g.dgate)
      rows.gate.write(g.dgate + first * steps.dgate * element_bytes(g.dgate_dtype), g.dgate_dtype,
                      steps.dgate, here, channels);
  }
}

}  // namespace kda::cpu::blocked::KDA_ISA
