// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm90.gdn: chunk_intra, then one chain of chunks a state tile, as the
// staged backend has them (cuda/staged/cost.hpp).
//
// Where the constants are from: no card has measured them. Chains: steps of 1.25 us a chunk of 64
// tokens, which a probe of the products took; chunk_intra: counts of its instructions.
#pragma once

#include "cuda/staged/cost.hpp"

namespace kda::cuda::gdn {

inline constexpr staged::Costs kCosts = {
    .intra_work_ns = 23,
    .intra_fixed_us = 5,
    .forward =
        {.few_ns = 19.5, .alone_ns = 19.5, .shared_ns = 14.5, .blocks_per_sm = 2, .fixed_us = 5},
    .scan = {.few_ns = 13.5, .alone_ns = 15, .shared_ns = 10.2, .blocks_per_sm = 2, .fixed_us = 3},
    .merge = {.step_us = 1.9, .columns = 8, .blocks_per_sm = 1, .fixed_us = 4},
    .factor_bytes_per_token = 1044,  // with two value heads a q/k head
    .factor_bandwidth = 0.9,
    .minimum_step = 0.98};

/// After so many tokens a head has forgotten a state, as a rule: nine in ten heads of trained
/// layers with wide gates.
inline constexpr int64_t kMemoryTokens = 512;
/// The most time that a cut may take where no head forgets, of that without one: a choice.
inline constexpr double kMostLoss = 1.2;

/// Scan, merge, forward where most heads forget within kMemoryTokens, so that they need B alone, of
/// these tokens, and a few do not.
inline double forgetting_us(const CostInput& in, int64_t segment_tokens) {
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const auto segment = static_cast<double>(segment_tokens);
  const auto tokens = static_cast<double>(std::min(segment_tokens, kMemoryTokens));
  const auto behind = static_cast<double>(cut.behind);
  const double scan =
      staged::chains_us(in, kCosts.scan, behind, segment, behind * tokens, tiles_of(in.value_dim));
  const double forward = staged::forward_us(in, kCosts, static_cast<double>(cut.segments), segment);
  return std::max(roofline_us(in), staged::intra_us(in, kCosts) + scan +
                                       merge_us(in, kCosts.merge, cut.most - 1) + forward);
}

/// SegmentPolicy::kAuto: the cut with the least predicted time, if it gains. `may_forget`: M of
/// heads that forget is dropped.
inline plan::Partition auto_partition(const plan::Workload& work, const DeviceFacts& device,
                                      bool may_forget, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  cost->roofline_us = roofline_us(in);
  cost->serial_us = staged::serial_us(in, kCosts);
  const double most = kMostLoss * cost->serial_us;
  const plan::CutSearch search{
      .whole_us = cost->serial_us,
      .minimum_gain = kMinimumGain,
      .minimum_step = kCosts.minimum_step,
      .time_us = [&](int64_t, int64_t segment_tokens) {
        const double exact = staged::segmented_us(in, kCosts, segment_tokens);
        return may_forget && exact <= most ? forgetting_us(in, segment_tokens) : exact;
      }};
  return plan::best_partition(work, search, &cost->segmented_us);
}

}  // namespace kda::cuda::gdn
