// SPDX-License-Identifier: Apache-2.0
// Predicted times of the backward (backward.hpp). kStatesUs + kReverseUs and kChunkGradUs are
// fitted to two measured times (bench/results/gpu_backward.json): 8,192 tokens and K = V = 128 with
// 16 and 64 heads on an H200. How the first two share their sum, and kWindowUs, are guesses.
#pragma once

#include "cuda/common/cost_model.hpp"
#include "cuda/recurrent/backward/backward.hpp"

namespace kda::cuda::backward {

/// Least bytes of a token and value head in bf16 at K = V = 128: inputs once, d_o, gradients.
inline constexpr double kLeastBytes = 2308;
/// A chunk of 16 tokens of one tile of a state, in a block with an SM for itself.
inline constexpr double kStatesUs = 15, kReverseUs = 15;
/// A chunk of a value head in backward_chunk_grad: time of an SM.
inline constexpr double kChunkGradUs = 58;
/// Launches of a window, and the ends of its chains.
inline constexpr double kWindowUs = 15;

inline double least_us(const CostSizes& in) {
  return memory_us(in, kLeastBytes, in.bytes_per_second);
}

/// Chains of all sequences spread over the SMs, or the longest of them; a state more than once
/// where there are several windows.
inline double serial_us(const CostInput& in, const BackwardSizes& sizes) {
  const double chunk_us = kStatesUs * (sizes.windows > 1 ? 2 : 1) + kReverseUs;
  const double columns = static_cast<double>(in.num_value_heads * sizes.tiles);
  const double longest = static_cast<double>(longest_of(in)) / kBackwardTokens * chunk_us;
  const double all =
      total_tokens(in) / kBackwardTokens * columns / static_cast<double>(in.num_sms) * chunk_us;
  const double chunk_grad = total_tokens(in) / kBackwardTokens *
                            static_cast<double>(in.num_value_heads) /
                            static_cast<double>(in.num_sms) * kChunkGradUs;
  return std::max(least_us(in), std::max(longest, all) + chunk_grad) +
         kWindowUs * static_cast<double>(sizes.windows);
}

}  // namespace kda::cuda::backward
