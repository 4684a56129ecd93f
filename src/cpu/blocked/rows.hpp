// SPDX-License-Identifier: Apache-2.0
// Rows of fp32, bf16 or fp16 in memory to and from fp32.
#pragma once

#include "cpu/blocked/kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

static inline F load_vector(const char* src, DType dtype) {
  if (dtype == DType::kFloat32) return load(reinterpret_cast<const float*>(src));
  const auto* bits = reinterpret_cast<const uint16_t*>(src);
  return dtype == DType::kBFloat16 ? load_bf16(bits) : load_fp16(bits);
}

static inline void store_vector(char* dst, DType dtype, F x) {
  if (dtype == DType::kFloat32) return store(reinterpret_cast<float*>(dst), x);
  auto* bits = reinterpret_cast<uint16_t*>(dst);
  return dtype == DType::kBFloat16 ? store_bf16(bits, x) : store_fp16(bits, x);
}

static inline int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

static void load_row(const void* src, DType dtype, int count, int padded, float* dst) {
  const char* bytes = static_cast<const char*>(src);
  const int step = element_bytes(dtype);
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store(dst + i, load_vector(bytes + i * step, dtype));
  for (; i < count; ++i) dst[i] = load_element(src, dtype, i);
  for (; i < padded; ++i) dst[i] = 0;
}

static void store_row(const float* src, DType dtype, int count, void* dst) {
  char* bytes = static_cast<char*>(dst);
  const int step = element_bytes(dtype);
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) store_vector(bytes + i * step, dtype, load(src + i));
  for (; i < count; ++i) store_element(dst, dtype, i, src[i]);
}

}  // namespace kda::cpu::blocked::KDA_ISA
