// SPDX-License-Identifier: Apache-2.0
// A tensor of which kernels write zeros in rows that belong to no sequence.
#pragma once

#include <cstdint>

namespace kda::cuda {

/// A [B, T, heads, size] tensor; strides are in elements.
struct WrittenTensor {
  void* base = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0, stride_c = 0;
  int64_t heads = 1, size = 1;
  int32_t bytes = 2;  ///< of an element: 2 or 4
};

}  // namespace kda::cuda
