// SPDX-License-Identifier: Apache-2.0
// The caller's cu_seqlens, as the kernels read them that make maps of sequences in tiles of an
// entry a thread. Offsets of a map never go back and stay within the tokens; where the caller's do
// not, that is flagged.
#pragma once

#include "cuda/launch/sequence_map.hpp"
#include "cuda/launch/zero_rows.cuh"

namespace kda::cuda {

/// Where sequence i - 1 begins and where it ends: sequence i begins there.
struct MapEntry {
  int64_t begin, end;
};

/// Whether an entry so far is not as the caller has it; then the largest offset of all tiles so
/// far.
struct Mended {
  bool any = false;
  int64_t largest = 0;
};

struct GivenOffsets {
  const SequenceMapArgs& a;

  __device__ const void* place(int64_t i) const {
    return static_cast<const char*>(a.raw) + i * (a.wide ? 8 : 4);
  }
  __device__ int64_t load(int64_t i) const {
    return a.wide ? *static_cast<const int64_t*>(place(i))
                  : int64_t{*static_cast<const int32_t*>(place(i))};
  }
  __device__ int64_t clamped(int64_t offset) const {
    return max(int64_t{0}, min(offset, a.num_tokens));
  }
  /// The largest offset before entry i, where they are not in order. Tiles that `mended.largest`
  /// does not know are in order, and end with their largest.
  __device__ int64_t largest_before(int64_t i, Mended& mended) const {
    const int64_t first = i - threadIdx.x, end = min(first + blockDim.x, a.num_sequences + 1);
    if (first > 0) mended.largest = max(mended.largest, clamped(load(first - 1)));
    int64_t before = mended.largest;
#pragma unroll 1
    for (int64_t k = first; k < end; ++k) {
      const int64_t offset = clamped(load(k));
      mended.largest = max(mended.largest, offset);
      if (k < i) before = mended.largest;
    }
    return before;
  }
  /// Whether all tokens are in the first n sequences. Both entries are loaded at once.
  __device__ bool has_all(int64_t n) const {
    const int64_t first = load(0), end = load(n);
    return (first | (end ^ a.num_tokens)) == 0;
  }

  /// Entry i as the caller has it; the last one behind the table.
  __device__ MapEntry given(int64_t i) const {
    const int64_t at = min(i, a.num_sequences);
    return {load(max(at, int64_t{1}) - 1), load(at)};
  }
  /// Entry i of the map, by all threads of the block and tile by tile.
  __device__ MapEntry entry(int64_t i, const MapEntry& given, Mended& mended) const {
    MapEntry made{clamped(given.begin), clamped(given.end)};
    mended.any |= __syncthreads_or(i <= a.num_sequences &&
                                   (made.end != given.end || given.begin > given.end));
    if (mended.any) made.begin = largest_before(i, mended), made.end = max(made.begin, made.end);
    if (i == 0 || i > a.num_sequences) made.begin = made.end;
    return made;
  }
  /// By one thread.
  __device__ void flag(bool good) const {
    if (a.flags) *a.flags = good ? 0 : kBadSequences;
  }

  /// SequenceMapArgs::rest, by all threads of the blocks behind the first one.
  __device__ void zero_rest() const {
    __shared__ unsigned long long end;  // of the last sequence
    if (threadIdx.x == 0) end = 0;
    __syncthreads();
    int64_t largest = 0;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i <= a.num_sequences; i += blockDim.x)
      largest = max(largest, clamped(load(i)));
    atomicMax(&end, static_cast<unsigned long long>(largest));
    __syncthreads();
    const int64_t first = clamped(load(0)), last = static_cast<int64_t>(end);
#pragma unroll 1
    for (int64_t row = blockIdx.x - 1; row < first + a.num_tokens - last; row += gridDim.x - 1)
      zero_row(a.rest, 0, row < first ? row : last + row - first);
  }
};

}  // namespace kda::cuda
