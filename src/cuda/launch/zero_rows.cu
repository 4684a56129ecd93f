// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/zero_rows.hpp"

#include <algorithm>

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/elements.cuh"

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
         x.stride_b * x.bytes % kWordBytes == 0 &&
         reinterpret_cast<uintptr_t>(x.base) % kWordBytes == 0;
}

__device__ __forceinline__ void zero_row(const WrittenTensor& x, int64_t batch, int64_t token) {
  char* row = static_cast<char*>(x.base) + (batch * x.stride_b + token * x.stride_t) * x.bytes;
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

/// Rows of one batch entry.
struct Rows {
  int64_t batch, begin, end;
};

/// All blocks share in them.
__device__ __forceinline__ void zero_all(const ZeroRowsArgs& a, const Rows& rows) {
  for (int64_t token = rows.begin + blockIdx.x; token < rows.end; token += gridDim.x)
    for (int n = 0; n < a.count; ++n) zero_row(a.tensors[n], rows.batch, token);
}

/// Sequence n's rows, if it has no slot; else none.
__device__ __forceinline__ Rows without_slot(const ZeroRowsArgs& a, int64_t n) {
  if (n >= a.num_sequences) return {0, 0, 0};
  if (!lacks_slot(a.states, a.states.indices[n])) return {0, 0, 0};
  if (!a.lengths) return {n, 0, a.num_tokens};
  return {0, offset_at(a, n), offset_at(a, n + 1)};
}

__global__ void __launch_bounds__(kThreads)
    zero_rows_kernel(const __grid_constant__ ZeroRowsArgs a) {
  __shared__ Rows found[kThreads];
  ptx::griddepcontrol_wait();
  if (a.lengths) {
    const int64_t first = offset_at(a, 0), last = max(first, offset_at(a, a.num_sequences));
    zero_all(a, {0, 0, first});
    zero_all(a, {0, last, a.num_tokens});
  }
  if (!a.states.indices) return;
  for (int64_t n = 0; n < a.num_sequences; n += kThreads) {
    const Rows rows = without_slot(a, n + threadIdx.x);
    if (!__syncthreads_or(rows.begin < rows.end)) continue;
    found[threadIdx.x] = rows;
    __syncthreads();
    for (int i = 0; i < min(int64_t{kThreads}, a.num_sequences - n); ++i) zero_all(a, found[i]);
    __syncthreads();
  }
}

}  // namespace

Status launch_zero_rows(const ZeroRowsArgs& args, int64_t blocks, const Launch& launch) {
  if (args.count == 0) return {};
  return launch_kernel("zero_rows", zero_rows_kernel, std::min(blocks, args.num_tokens), kThreads,
                       0, launch, args);
}

}  // namespace kda::cuda
