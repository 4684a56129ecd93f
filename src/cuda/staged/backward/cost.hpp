// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged backward. The constants are measured on an H200, at 8,192 tokens
// and K = V = 128 with 64 heads; kGroupUs is a guess.
#pragma once

#include "cuda/backward/cost.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::staged {

/// A token of a chain of 64 columns of V, in a block with an SM for itself.
inline constexpr double kErrorsNs = 46, kReverseNs = 55;
/// SM time of a token and value head.
inline constexpr double kChunkGradNs = 343, kGradientsNs = 103;
/// Launches of a group, and the ends of its chains.
inline constexpr double kGroupUs = 25;

/// Groups one after the other: in each the chains, spread over the SMs or the longest of them.
inline double backward_us(const CostInput& in, const DeviceFacts& device, int64_t num_heads,
                          const HeadGroups& groups) {
  const int64_t of_each = in.num_value_heads / num_heads;
  const auto sms = static_cast<double>(in.num_sms);
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  const auto longest = static_cast<double>(longest_of(in));
  double us = intra_us(in, costs_of(device)) + total_tokens(in) *
                                                   static_cast<double>(in.num_value_heads) / sms *
                                                   size * (kChunkGradNs + kGradientsNs) * 1e-3;
  for (int64_t first = 0; first < num_heads; first += groups.heads) {
    const int64_t heads = std::min(groups.heads, num_heads - first) * of_each;
    const double all = total_tokens(in) * static_cast<double>(heads * tiles_of(in.value_dim)) / sms;
    us += std::max(longest, all) * (kErrorsNs + kReverseNs) * 1e-3 + kGroupUs;
  }
  return std::max(cuda::backward::least_us(in), us);
}

}  // namespace kda::cuda::staged
