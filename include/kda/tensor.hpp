// SPDX-License-Identifier: Apache-2.0
// TensorDesc: type, strides and alignment of a tensor whose shape the Problem implies.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "kda/types.hpp"

namespace kda {

inline constexpr int64_t kDefaultAlignment = 16;
/// A stride that nobody has set.
inline constexpr int64_t kUnsetStride = INT64_MIN / 16;

/// A descriptor whose strides are all unset was never described: validate() refuses it, unless the
/// tensor has no elements.
struct TensorDesc {
  DType dtype = DType::kBFloat16;
  /// Elements between neighbours along each dimension, outermost first; dimensions past the
  /// tensor's rank are ignored. The innermost stride must be 1. Strides of dimensions of size 1
  /// are never used.
  std::array<int64_t, 4> strides{kUnsetStride, kUnsetStride, kUnsetStride, kUnsetStride};
  /// Bytes, a power of two. The pointer given to run() and every stride but the innermost are
  /// multiples of it; implementations that need more decline at plan time.
  int64_t alignment = kDefaultAlignment;
};

/// Memory with its type and strides, for calls without a plan. Null: no such tensor.
struct TensorView {
  void* data = nullptr;  ///< inputs are only read; aligned to an element
  DType dtype = DType::kFloat32;
  /// Elements, outermost first, none negative; those of dimensions of size 1 are never used. An
  /// output has no two elements in one place.
  std::array<int64_t, 4> strides{kUnsetStride, kUnsetStride, kUnsetStride, kUnsetStride};
};

/// Row-major descriptor of `shape` (at most 4 dimensions, outermost first), with the largest
/// alignment up to kDefaultAlignment that its own strides keep.
TensorDesc contiguous(DType dtype, std::initializer_list<int64_t> shape) noexcept;

/// Descriptor of one gate a head, [B, T, HV] in memory: as Problem::g, or its gradient.
TensorDesc head_gates(DType dtype, int64_t batch, int64_t num_tokens,
                      int64_t num_value_heads) noexcept;

/// Descriptor of one bias a head, [HV] in memory: as Problem::dt_bias beside head_gates(), or its
/// gradient.
TensorDesc head_bias(DType dtype, int64_t num_value_heads) noexcept;

}  // namespace kda
