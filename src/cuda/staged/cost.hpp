// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm80.staged (chunk_intra, then one chain of chunks a state tile).
//
// Where the constants are from: fitted to kernel times of an H200 at K = V = 128, bf16, which
// docs/log/2026-11.md has ("Cost model"); no file of bench/results has them. minimum_step is a
// choice. On other cards times are those of an H200 by the clock, and none is less than its bytes
// take.
#pragma once

#include "cuda/common/common.hpp"
#include "cuda/common/cost_model.hpp"
#include "cuda/staged/chain_model.hpp"

namespace kda::cuda::staged {

/// Hopper's own chain kernels (chunk_delta_h_sm90.cu).
inline constexpr Costs kSm90Costs = {
    .intra_work_ns = 100,
    .intra_fixed_us = 8,
    .intra_bytes_per_token = 2200,
    .forward =
        {.few_ns = 19.5, .alone_ns = 22, .shared_ns = 19.5, .blocks_per_sm = 2, .fixed_us = 5},
    .scan = {.few_ns = 13.5, .alone_ns = 18, .shared_ns = 10.2, .blocks_per_sm = 2, .fixed_us = 3},
    .merge = {.step_us = 1.9, .columns = 8, .blocks_per_sm = 1, .fixed_us = 4},
    .factor_bytes_per_token = 1396,
    .factor_bandwidth = 0.93,
    .minimum_step = 0.98};

/// Other GPUs, measured on an H200 too: few_ns of their scan as if its blocks were wide.
inline constexpr Costs kOtherCosts = {
    .intra_work_ns = kSm90Costs.intra_work_ns,
    .intra_fixed_us = kSm90Costs.intra_fixed_us,
    .intra_bytes_per_token = kSm90Costs.intra_bytes_per_token,
    .forward =
        {.few_ns = 30.6, .alone_ns = 38, .shared_ns = 38.7, .blocks_per_sm = 2, .fixed_us = 14},
    .scan =
        {.few_ns = 25.5, .alone_ns = 25.5, .shared_ns = 18.5, .blocks_per_sm = 4, .fixed_us = 6},
    .merge = {.step_us = 3.4, .columns = 8, .blocks_per_sm = 2, .fixed_us = 7},
    .factor_bytes_per_token = kSm90Costs.factor_bytes_per_token,
    .factor_bandwidth = kSm90Costs.factor_bandwidth,
    .minimum_step = kSm90Costs.minimum_step};

/// Times of an H200 by the clock of another card.
inline ChainCosts at_clock(ChainCosts c, double slower) {
  c.few_ns *= slower, c.alone_ns *= slower, c.shared_ns *= slower;
  return c;
}
inline Costs costs_of(const DeviceFacts& device) {
  if (has_hopper_kernels(device)) return kSm90Costs;
  const double slower = kH200Gigahertz / gigahertz_of(device);
  Costs c = kOtherCosts;
  c.intra_work_ns *= slower;
  c.forward = at_clock(c.forward, slower);
  c.scan = at_clock(c.scan, slower);
  c.merge.step_us *= slower;
  return c;
}

/// The chains of the forward, or what memory needs for their factors and outputs.
inline double forward_us(const CostInput& in, const Costs& c, double chains, double longest) {
  const double memory =
      memory_us(in, c.factor_bytes_per_token, c.factor_bandwidth * in.bytes_per_second);
  return std::max(
      memory, chains_us(in, c.forward, chains, longest, total_tokens(in), tiles_of(in.value_dim)));
}

inline double serial_us(const CostInput& in, const Costs& c) {
  const double forward = forward_us(in, c, static_cast<double>(in.sums.sequences),
                                    static_cast<double>(longest_of(in)));
  return std::max(roofline_us(in), intra_us(in, c) + forward);
}

/// Scan, merge, forward with segments of at most `segment_tokens`.
inline double segmented_us(const CostInput& in, const Costs& c, int64_t segment_tokens) {
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const auto longest = static_cast<double>(segment_tokens);
  const double scan = chains_us(in, c.scan, static_cast<double>(cut.behind), longest,
                                static_cast<double>(cut.tokens_behind),
                                tiles_of(in.value_dim) + tiles_of(in.key_dim));
  const double forward = forward_us(in, c, static_cast<double>(cut.segments), longest);
  return std::max(roofline_us(in),
                  intra_us(in, c) + scan + merge_us(in, c.merge, cut.most - 1) + forward);
}

/// SegmentPolicy::kAuto in stages: the cut with the least predicted time, if it gains.
inline plan::Partition auto_partition(const plan::Workload& work, const DeviceFacts& device,
                                      CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const Costs& costs = costs_of(device);
  cost->roofline_us = roofline_us(in);
  cost->serial_us = serial_us(in, costs);
  const plan::CutSearch search{.whole_us = cost->serial_us,
                               .minimum_gain = kMinimumGain,
                               .minimum_step = costs.minimum_step,
                               .time_us = [&](int64_t, int64_t segment_tokens) {
                                 return segmented_us(in, costs, segment_tokens);
                               }};
  return plan::best_partition(work, search, &cost->segmented_us);
}

}  // namespace kda::cuda::staged
