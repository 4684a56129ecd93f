// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/zero_rows.hpp"

#include <algorithm>

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace kda::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWordBytes = 16;  // written at once where rows are dense and aligned

__device__ __forceinline__ int64_t offset_at(const ZeroRowsArgs& a, int64_t i) {
  const int64_t entry = a.wide_lengths ? static_cast<const int64_t*>(a.lengths)[i]
                                       : static_cast<const int32_t*>(a.lengths)[i];
  return max(int64_t{0}, min(entry, a.num_tokens));
}

/// Whether rows of `x` are made of whole words without gaps.
__device__ __forceinline__ bool has_words(const WrittenTensor& x) {
  const bool dense = (x.size == 1 || x.stride_c == 1) &&
                     (x.heads == 1 || x.stride_h == (x.size == 1 ? 1 : x.size));
  const int64_t row = x.heads * x.size * x.bytes;
  return dense && row % kWordBytes == 0 && x.stride_t * x.bytes % kWordBytes == 0 &&
         reinterpret_cast<uintptr_t>(x.base) % kWordBytes == 0;
}

__device__ __forceinline__ void zero_row(const WrittenTensor& x, int64_t token) {
  char* row = static_cast<char*>(x.base) + token * x.stride_t * x.bytes;
  const int64_t elements = x.heads * x.size;
  if (has_words(x)) {
    for (int64_t i = threadIdx.x; i < elements * x.bytes / kWordBytes; i += kThreads)
      reinterpret_cast<uint4*>(row)[i] = uint4{0, 0, 0, 0};
    return;
  }
  for (int64_t i = threadIdx.x; i < elements; i += kThreads) {
    char* to = row + (i / x.size * x.stride_h + i % x.size * x.stride_c) * x.bytes;
    if (x.bytes == 4)
      *reinterpret_cast<uint32_t*>(to) = 0;
    else
      *reinterpret_cast<uint16_t*>(to) = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    zero_rows_kernel(const __grid_constant__ ZeroRowsArgs a) {
  ptx::griddepcontrol_wait();
  const int64_t first = offset_at(a, 0), last = max(first, offset_at(a, a.num_sequences));
  const int64_t rows = first + a.num_tokens - last;
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x)
    for (int n = 0; n < a.count; ++n) zero_row(a.tensors[n], i < first ? i : last + i - first);
}

}  // namespace

Status launch_zero_rows(const ZeroRowsArgs& args, int64_t blocks, const Launch& launch) {
  if (args.count == 0) return {};
  return launch_kernel("zero_rows", zero_rows_kernel, std::min(blocks, args.num_tokens), kThreads,
                       0, launch, args);
}

}  // namespace kda::cuda
