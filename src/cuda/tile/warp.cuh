// SPDX-License-Identifier: Apache-2.0
// Work that the lanes of a warp do together: rows and sums.
#pragma once

#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda {

__device__ __forceinline__ float sum_over(float x, int first_offset, int end_offset) {
#pragma unroll
  for (int offset = first_offset; offset < end_offset; offset *= 2)
    x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// The sum of what the lanes up to this one have.
__device__ __forceinline__ float sum_up_to(float x, int lane) {
  float sum = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float other = __shfl_sync(~0u, sum, (lane - offset) & 31);
    if (lane >= offset) sum += other;
  }
  return sum;
}

/// This lane's elements of a row, lane + 32 i, as they lie in memory; 0 past `size`. Elements are
/// `step` apart.
template <int kCount>
struct LaneRow {
  uint32_t bits[kCount];

  __device__ __forceinline__ void load(const RowView& view, int64_t at, int size, int step = 1) {
    const auto load = [&](const auto* base) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int c = lane + 32 * i;
        bits[i] = c < size ? base[at + c * step] : 0;
      }
    };
    if (view.type == Element::kFloat32)
      load(static_cast<const uint32_t*>(view.base));
    else
      load(static_cast<const uint16_t*>(view.base));
  }

  __device__ __forceinline__ void convert(Element type, float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = float_of(bits[i], type);
  }
};

/// Copies to shared memory, of rows of whole words. A warp that waits for one of its loads to
/// registers may wait for all of them; this row is waited for alone. With a step of 0 each word is
/// the one that has the element.
template <int kCount>
struct SharedRow {
  uint32_t words[32 * kCount];

  __device__ __forceinline__ void load(const RowView& view, int64_t at, int size, int step = 1) {
    const int lane = threadIdx.x % 32, two_a_word = view.type != Element::kFloat32;
    const auto* row = static_cast<const uint32_t*>(view.base) + (at >> two_a_word);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int word = lane + 32 * i;
      if (word < 32 * kCount >> two_a_word)
        ptx::cp_async<4>(ptx::shared_address(words + word), row + word * step,
                         word << two_a_word < size);
    }
  }

  /// After ptx::cp_async_wait() and a barrier of the warp.
  __device__ __forceinline__ void convert(Element type, float (&x)[kCount]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = float_of(load_bits(words, type, lane + 32 * i), type);
  }
};

/// Sums of kCount values over 2 kOffset neighbouring lanes: each lane ends with its share of the
/// sums in x[0..], or several with the same one where there are more lanes than values.
template <int kCount, int kOffset>
__device__ __forceinline__ void reduce_scatter(float* x) {
  if constexpr (kOffset > 0 && kCount > 1) {
    const bool upper = threadIdx.x & kOffset;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float low = x[i], high = x[i + kCount / 2];
      x[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kOffset);
    }
    reduce_scatter<kCount / 2, kOffset / 2>(x);
  } else if constexpr (kOffset > 0) {
    x[0] += __shfl_xor_sync(~0u, x[0], kOffset);
    reduce_scatter<1, kOffset / 2>(x);
  }
}

}  // namespace kda::cuda
