// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged backward. The constants are fitted to times of an H200 at
// K = V = 128 in bf16, which docs/log/2026-11.md has ("Segments of the backward").
#pragma once

#include "cuda/backward/cost.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::staged {

/// Blocks that share an SM are taken to run in turn.
inline constexpr ChainCosts kErrors = {
    .few_ns = 31, .alone_ns = 46, .shared_ns = 46, .blocks_per_sm = 2, .fixed_us = 6};
inline constexpr ChainCosts kReverse = {
    .few_ns = 32, .alone_ns = 55, .shared_ns = 55, .blocks_per_sm = 2, .fixed_us = 8};
inline constexpr MergeCosts kReverseMerge = {
    .step_us = 2.9, .columns = 8, .blocks_per_sm = 2, .fixed_us = 6};
/// The maps of segments, and launches that end before the next ones begin.
inline constexpr double kSegmentsUs = 12;
/// SM time of a token and value head.
inline constexpr double kChunkGradNs = 343, kGradientsNs = 103;
/// Launches of a group.
inline constexpr double kGroupUs = 13;

/// The chains of a group of heads, whose CostInput `in` is; `segment_tokens` 0: uncut.
inline double chains_of_backward_us(const CostInput& in, const DeviceFacts& device,
                                    int64_t segment_tokens) {
  const double total = total_tokens(in);
  const int64_t tiles = tiles_of(in.value_dim);
  if (segment_tokens == 0) {
    const auto chains = static_cast<double>(in.lengths.size());
    const auto longest = static_cast<double>(longest_of(in));
    return chains_us(in, kErrors, chains, longest, total, tiles) +
           chains_us(in, kReverse, chains, longest, total, tiles);
  }
  const Costs& costs = costs_of(device);
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const auto longest = static_cast<double>(segment_tokens);
  const auto us = [&](const ChainCosts& c, int64_t of_tiles) {
    return chains_us(in, c, cut.segments, longest, total, of_tiles);
  };
  return kSegmentsUs + us(costs.scan, tiles + tiles_of(in.key_dim)) + us(kErrors, tiles) +
         2 * us(kReverse, tiles) + merge_us(in, costs.merge, cut.most - 1) +
         merge_us(in, kReverseMerge, cut.most - 1);
}

/// Groups one after the other, in segments of at most `segment_tokens`; 0: uncut.
inline double backward_us(const CostInput& in, const DeviceFacts& device, int64_t num_heads,
                          const HeadGroups& groups, int64_t segment_tokens = 0) {
  const int64_t of_each = in.num_value_heads / num_heads;
  const auto sms = static_cast<double>(in.num_sms);
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  double us = intra_us(in, costs_of(device)) + total_tokens(in) *
                                                   static_cast<double>(in.num_value_heads) / sms *
                                                   size * (kChunkGradNs + kGradientsNs) * 1e-3;
  CostInput group = in;
  for (int64_t first = 0; first < num_heads; first += groups.heads) {
    group.num_value_heads = std::min(groups.heads, num_heads - first) * of_each;
    us += chains_of_backward_us(group, device, segment_tokens) + kGroupUs;
  }
  return std::max(cuda::backward::least_us(in), us);
}

/// SegmentPolicy::kAuto: the cut with the least predicted time, if it gains.
inline plan::Partition auto_backward_partition(const plan::Workload& work,
                                               const DeviceFacts& device, int64_t num_heads,
                                               const HeadGroups& groups, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const plan::CutSearch search{.whole_us = backward_us(in, device, num_heads, groups),
                               .minimum_gain = kMinimumGain,
                               .minimum_step = costs_of(device).minimum_step,
                               .time_us = [&](int64_t, int64_t segment_tokens) {
                                 return backward_us(in, device, num_heads, groups, segment_tokens);
                               }};
  return plan::best_partition(work, search, &cost->segmented_us);
}

}  // namespace kda::cuda::staged
