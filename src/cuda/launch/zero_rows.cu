// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/zero_rows.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/launch/zero_rows.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t offset_at(const ZeroRowsArgs& a, int64_t i) {
  const int64_t entry = a.wide_lengths ? static_cast<const int64_t*>(a.lengths)[i]
                                       : static_cast<const int32_t*>(a.lengths)[i];
  return max(int64_t{0}, min(entry, a.num_tokens));
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
  return launch_kernel("zero_rows", zero_rows_kernel, min(blocks, args.num_tokens), kThreads, 0,
                       launch, args);
}

}  // namespace kda::cuda
