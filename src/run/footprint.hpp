// SPDX-License-Identifier: Apache-2.0
// Where a tensor lies in memory, and whether two of them touch.
#pragma once

#include <cstdint>

#include "core/layout.hpp"
#include "kda/problem.hpp"

namespace kda {

/// The bytes that a tensor covers: [begin, end), and its largest stride, for interleaved views.
struct Footprint {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  int64_t period = 0;        ///< bytes; 0: one dense piece
  int64_t period_bytes = 0;  ///< covered within one period
};

/// A tensor of a call. Without a descriptor the problem has none.
struct Entry {
  const char* name = "";
  const TensorDesc* desc = nullptr;
  Shape shape = {};
  const void* pointer = nullptr;
  bool output = false;
};

inline Footprint footprint(const Entry& entry) {
  const int64_t size = dtype_size(entry.desc->dtype);
  const auto begin = reinterpret_cast<std::uintptr_t>(entry.pointer);
  Footprint print{.begin = begin, .end = begin};
  int64_t reach = 0;
  std::size_t outermost = 4;
  for (std::size_t dim = 0; dim < 4; ++dim) {
    if (entry.shape[dim] == 0) return print;
    if (entry.shape[dim] == 1) continue;
    reach += entry.desc->strides[dim] * (entry.shape[dim] - 1);
    if (outermost == 4 || entry.desc->strides[dim] > entry.desc->strides[outermost])
      outermost = dim;
  }
  print.end = print.begin + static_cast<std::uintptr_t>((reach + 1) * size);
  if (outermost < 4) {
    print.period = entry.desc->strides[outermost] * size;
    print.period_bytes = (reach + 1) * size - print.period * (entry.shape[outermost] - 1);
  }
  return print;
}

/// Ranges may cross and still not touch: two column groups of one row-strided buffer.
inline bool overlap(const Footprint& a, const Footprint& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.period == 0 || a.period != b.period) return true;
  const auto distance = static_cast<int64_t>(b.begin - a.begin) % a.period;
  const int64_t shift = distance < 0 ? distance + a.period : distance;
  return shift < a.period_bytes || shift + b.period_bytes > a.period;
}

}  // namespace kda
