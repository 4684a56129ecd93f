// SPDX-License-Identifier: Apache-2.0
// The output residual: what bf16 outputs of segments from zero lack, four bits an output, until
// they are corrected and rounded for good. Two roundings to bf16 would be the largest part of their
// error.
//
// The bits are bits 16 to 13 of the exact output: the last bit of bf16 before it was rounded, which
// tells whether it was rounded up, and the three bits behind it.
//
// The fused kernel has outputs as accumulators lie: a lane (4 r + j) has tokens 2 j, 2 j + 1 and
// those 8 further of columns r and r + 8. Residuals are stored as segment_correct reads them: a
// word has tokens t and t + 8 of columns 2 j, 2 j + 8, 2 j + 1, 2 j + 9 (lane 4 t + j).
#pragma once

#include "cuda/fused/fused_prefill.hpp"
#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::sm90::fused {

/// Words of a sub-chunk and head: [16 columns, lanes].
constexpr int kResidualLanes = 32;
template <int kV>
constexpr int kResidualWords = kV / 16 * kResidualLanes;
static_assert(kResidualWords<128> * sizeof(uint32_t) == residual_bytes(128));

/// First word of the sub-chunk of a segment that begins at this token of the batch. Segments begin
/// anywhere, and their sub-chunks may come in twos: each segment has two places more than whole
/// sub-chunks of the batch.
template <int kV>
__device__ __forceinline__ int64_t residual_place(const Shape& shape, int64_t segment,
                                                  int64_t token, int64_t head) {
  return ((token / kSubchunk + 2 * segment) * shape.HV + head) * kResidualWords<kV>;
}

/// The residual word of this lane's outputs: o[n][i] is of token 8 n + 2 j + i % 2, column r + i /
/// 2 * 8.
__device__ __forceinline__ uint32_t residual_of(const float (&o)[2][4]) {
  uint32_t words[2] = {};  // of even and odd tokens
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int left = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 4 - 13;
    const uint32_t bits = __float_as_uint(o[i % 2][i / 2 % 2 * 2 + i / 4]);
    words[i / 4] |= (left < 0 ? bits >> -left : bits << left) & 0xfu << (left + 13);
  }
  return ptx::movmatrix_trans(words[0] | words[1]);
}

/// A pair of neighbours in a row as they were, up to those bits (not half a bit more, which would
/// make NaN of an infinity). kUpper: 1 for tokens t + 8. `word` is shifted by 8 for columns from 8
/// on.
template <int kUpper>
__device__ __forceinline__ float2 with_residual(uint32_t pair, uint32_t word) {
  const auto exact = [](uint32_t bits, uint32_t last, uint32_t four) {
    const uint32_t lacking = (four & 0xf0000000) ^ last << 31;
    return __uint_as_float(bits + static_cast<uint32_t>(static_cast<int32_t>(lacking) >> 15));
  };
  return {exact(pair << 16, pair, word << (28 - 4 * kUpper)),
          exact(pair & 0xffff0000, pair >> 16, word << (12 - 4 * kUpper))};
}

}  // namespace kda::cuda::sm90::fused
