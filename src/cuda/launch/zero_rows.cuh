// SPDX-License-Identifier: Apache-2.0
// Zeros in a row, for kernels that write the rows of no sequence.
#pragma once

#include "cuda/launch/written_tensor.hpp"

namespace kda::cuda {

constexpr int kWordBytes = 16;  // written at once where rows are dense and aligned

/// Whether rows of `x` are made of whole words without gaps.
__device__ __forceinline__ bool has_words(const WrittenTensor& x) {
  const bool dense = (x.size == 1 || x.stride_c == 1) &&
                     (x.heads == 1 || x.stride_h == (x.size == 1 ? 1 : x.size));
  const int64_t row = x.heads * x.size * x.bytes;
  return dense && row % kWordBytes == 0 && x.stride_t * x.bytes % kWordBytes == 0 &&
         x.stride_b * x.bytes % kWordBytes == 0 &&
         reinterpret_cast<uintptr_t>(x.base) % kWordBytes == 0;
}

/// By all threads of a block.
__device__ __forceinline__ void zero_row(const WrittenTensor& x, int64_t batch, int64_t token) {
  char* row = static_cast<char*>(x.base) + (batch * x.stride_b + token * x.stride_t) * x.bytes;
  const int64_t elements = x.heads * x.size;
  if (has_words(x)) {
    for (int64_t i = threadIdx.x; i < elements * x.bytes / kWordBytes; i += blockDim.x)
      reinterpret_cast<uint4*>(row)[i] = uint4{0, 0, 0, 0};
    return;
  }
  for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) {
    char* to = row + (i / x.size * x.stride_h + i % x.size * x.stride_c) * x.bytes;
    if (x.bytes == 4)
      *reinterpret_cast<uint32_t*>(to) = 0;
    else
      *reinterpret_cast<uint16_t*>(to) = 0;
  }
}

}  // namespace kda::cuda
