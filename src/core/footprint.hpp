// SPDX-License-Identifier: Apache-2.0
// The bytes that a tensor covers, and whether two tensors share some.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/layout.hpp"

namespace kda {

/// [begin, end), and the largest stride, for interleaved views.
struct Footprint {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  int64_t period = 0;        ///< bytes; 0: one dense piece
  int64_t period_bytes = 0;  ///< covered within one period
};

inline Footprint footprint(const void* pointer, DType dtype, const Shape& shape,
                           const std::array<int64_t, 4>& strides) {
  const int64_t size = dtype_size(dtype);
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  Footprint print{.begin = begin, .end = begin};
  int64_t reach = 0;
  std::size_t outermost = 4;
  for (std::size_t dim = 0; dim < 4; ++dim) {
    if (shape[dim] == 0) return print;
    if (shape[dim] == 1) continue;
    reach += strides[dim] * (shape[dim] - 1);
    if (outermost == 4 || strides[dim] > strides[outermost]) outermost = dim;
  }
  print.end = print.begin + static_cast<std::uintptr_t>((reach + 1) * size);
  if (outermost < 4) {
    print.period = strides[outermost] * size;
    print.period_bytes = (reach + 1) * size - print.period * (shape[outermost] - 1);
  }
  return print;
}

/// `bytes` from `pointer` on.
inline Footprint dense_footprint(const void* pointer, int64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  return {.begin = begin, .end = begin + static_cast<std::uintptr_t>(bytes)};
}

/// Ranges may cross and still not touch: two column groups of one row-strided buffer.
inline bool overlap(const Footprint& a, const Footprint& b) {
  if (a.end <= b.begin || b.end <= a.begin || a.begin == a.end || b.begin == b.end) return false;
  if (a.period == 0 || a.period != b.period) return true;
  const auto distance = static_cast<int64_t>(b.begin - a.begin) % a.period;
  const int64_t shift = distance < 0 ? distance + a.period : distance;
  return shift < a.period_bytes || shift + b.period_bytes > a.period;
}

}  // namespace kda
