// SPDX-License-Identifier: Apache-2.0
// bf16 and fp16 as fp32, one element at a time. Storing rounds to nearest, ties to even.
// Internal linkage, no templates of the standard library: the ISA-specific sources include this
// file, and the linker must not pick their copy for a machine without that ISA.
#pragma once

#include <cstdint>
#include <cstring>

#include "kda/types.hpp"

namespace kda {

static inline float bf16_to_float(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

static inline uint16_t float_to_bf16(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Integer arithmetic only, so that a flush-to-zero mode cannot touch fp16 subnormals.
static inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return __builtin_bit_cast(float, sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0)
    return __builtin_bit_cast(float, sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return __builtin_bit_cast(float, sign);
  uint32_t shift = 0;
  while (!(mantissa & 0x400u)) {
    mantissa <<= 1;
    ++shift;
  }
  return __builtin_bit_cast(float, sign | ((113 - shift) << 23) | ((mantissa & 0x3ffu) << 13));
}

static inline uint16_t float_to_fp16(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 2^16
  if (magnitude < 0x33000000u) return sign;                                    // < 2^-25
  const uint32_t exponent = magnitude >> 23;
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = exponent < 113 ? 126 - exponent : 13;  // subnormal results drop more
  const uint32_t base = exponent < 113 ? 0 : (exponent - 113) << 10;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  uint32_t kept = base + (mantissa >> shift);
  if (rest > half || (rest == half && (kept & 1u))) ++kept;  // may carry into the exponent
  return static_cast<uint16_t>(sign | kept);
}

/// A number of split states (SplitDesc), and its two parts. A NaN keeps its sign alone.
struct SplitNumber {
  uint16_t bf16;
  int16_t rest;
};
static inline SplitNumber split_float(float value) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u), 0};
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<int16_t>(bits)};
}
static inline float join_float(uint16_t bf16, int16_t rest) {
  const auto low = static_cast<uint32_t>(static_cast<int32_t>(rest));
  return __builtin_bit_cast(float, (static_cast<uint32_t>(bf16) << 16) + low);
}

/// Element `idx` of an array of fp32, bf16 or fp16.
static inline float load_element(const void* base, DType dtype, int64_t idx) {
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(base) + idx * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(base) + idx * 2, 2);
  return dtype == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

static inline void store_element(void* base, DType dtype, int64_t idx, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<char*>(base) + idx * 4, &value, 4);
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
  std::memcpy(static_cast<char*>(base) + idx * 2, &bits, 2);
}

/// Element `idx` of an array of any floating type.
static inline double load_double(const void* base, DType dtype, int64_t idx) {
  if (dtype != DType::kFloat64) return static_cast<double>(load_element(base, dtype, idx));
  double value;
  std::memcpy(&value, static_cast<const char*>(base) + idx * 8, 8);
  return value;
}

static inline void store_double(void* base, DType dtype, int64_t idx, double value) {
  if (dtype == DType::kFloat64)
    std::memcpy(static_cast<char*>(base) + idx * 8, &value, 8);
  else
    store_element(base, dtype, idx, static_cast<float>(value));
}

}  // namespace kda
