// SPDX-License-Identifier: Apache-2.0
// Whether heads forget within a segment, by the bounds of |M| that gdn_intra leaves for each chunk.
// A bound of M is one of its transpose too, so it serves chains of either direction.
#pragma once

#include "cuda/gdn/factors.hpp"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::gdn {

/// A segment may drop its M once this bounds the log2 of its norm. Losses on the last tokens alone
/// leave early ones gradients that are small beside those behind them: these are dropped later.
inline constexpr float kForgottenLog2 = -20, kForgottenGradientLog2 = -40;

/// Chunks next to an end of a segment that leave all that a state has there: over them, and over
/// them with any number of the chunks behind them up to the end of the sequence (one of which may
/// grow), the product of the bounds is 2^limit at most. 0 if the segment has not so many.
/// `all`: chunks from that end of the segment up to the end of the sequence; numbers_of(i): of the
/// i-th one of them. Every warp finds it for itself, 32 chunks at a time.
template <class NumbersOf>
__device__ __forceinline__ int chunks_that_last(float limit, int of_segment, int all, int lane,
                                                NumbersOf&& numbers_of) {
  int reaching = 0;  // chunks, of which the last one is still felt
  float before = 0;
#pragma unroll 4
  for (int begin = 0; begin < all; begin += 32) {
    const int i = begin + lane;
    float bound = 0;
    if (i < all) {
      const Numbers& numbers = numbers_of(i);
      bound = numbers.log2_decay + (numbers.log2_growth[0] + numbers.log2_growth[1]);
    }
    const float sum = before + sum_up_to(bound, lane);
    const bool reaches = i < all && !(sum <= limit);
    const uint32_t last = ptx::redux_max(reaches ? static_cast<uint32_t>(lane) + 1 : 0);
    if (last > 0) reaching = begin + static_cast<int>(last);
    before = __shfl_sync(~0u, sum, 31);
  }
  return reaching < of_segment ? reaching + 1 : 0;
}

/// The last chunks of a chain's segment, without which nothing is left at its end.
template <class C>
__device__ __forceinline__ int chunks_that_last_to_the_end(const C& c, const Numbers* numbers) {
  const auto before = static_cast<int>(
      (c.tokens.begin - sequence_range(c.a.map, c.tokens.sequence).begin) / kChunk);
  return chunks_that_last(
      kForgottenLog2, c.num_chunks, before + c.num_chunks, c.lane,
      [&](int i) -> const Numbers& { return numbers[c.tile(c.num_chunks - 1 - i)]; });
}

/// Leaves a chain from left to right the last `count` chunks of its segment.
template <class C>
__device__ __forceinline__ void begin_with_the_last(C& c, int count) {
  const int skipped = c.num_chunks - count;
  c.tokens.begin += skipped * kChunk;
  c.chunk0 += skipped;
  c.num_chunks = count;
}

/// The first chunks of a chain's segment, likewise for gradients at its start.
template <class C>
__device__ __forceinline__ int chunks_that_last_to_the_start(const C& c, const Numbers* numbers) {
  const auto all =
      static_cast<int>(chunks_of(sequence_range(c.a.map, c.tokens.sequence).end - c.tokens.begin));
  return chunks_that_last(kForgottenGradientLog2, c.num_chunks, all, c.lane,
                          [&](int i) -> const Numbers& { return numbers[c.tile(i)]; });
}

}  // namespace kda::cuda::gdn
