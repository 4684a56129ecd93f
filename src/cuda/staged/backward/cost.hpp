// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged backward. The constants are fitted to times of an H200 at
// K = V = 128 in bf16, which docs/log/2026-11.md has ("Segments of the backward", "Chains of the
// backward on Hopper").
#pragma once

#include "cuda/recurrent/backward/cost.hpp"
#include "cuda/staged/backward/cut_model.hpp"
#include "cuda/staged/backward/kernels.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::staged {

/// Hopper's own kernels (chains_sm90.cu; with K = V = 128 and 64 grad_sm90).
inline constexpr BackwardCosts kSm90Backward = {
    .scan =
        {.few_ns = 13.5, .alone_ns = 13.5, .shared_ns = 10.2, .blocks_per_sm = 2, .fixed_us = 3},
    .errors =
        {.few_ns = 14.5, .alone_ns = 14.5, .shared_ns = 14.5, .blocks_per_sm = 1, .fixed_us = 5},
    .reverse =
        {.few_ns = 22.5, .alone_ns = 22.5, .shared_ns = 22.5, .blocks_per_sm = 1, .fixed_us = 5},
    .beside = true,
    .errors_bytes = 1536,
    .reverse_bytes = 2048,
    .d_bytes = 1280,
    .gradients_ns = 156,
    .group_us = 40,
    // 8 to 32 segments of 32,768 tokens and 4 heads took from 2% less to 3% more than predicted.
    .minimum_step = 0.99};

/// Other GPUs, measured on an H200 too. Blocks that share an SM are taken to run in turn.
inline constexpr BackwardCosts kOtherBackward = {
    .scan = kOtherCosts.scan,
    .errors = {.few_ns = 31, .alone_ns = 46, .shared_ns = 46, .blocks_per_sm = 2, .fixed_us = 6},
    .reverse = {.few_ns = 32, .alone_ns = 55, .shared_ns = 55, .blocks_per_sm = 2, .fixed_us = 8},
    .beside = false,
    .errors_bytes = 0,
    .reverse_bytes = 0,
    .d_bytes = 0,
    .gradients_ns = 343 + 103,  // chunk_grad and the last pass
    .group_us = 13,
    .minimum_step = kOtherCosts.minimum_step};

/// Costs of the kernels for other GPUs, by the clock of the card.
inline BackwardCosts other_backward_of(const DeviceFacts& device) {
  const double slower = kH200Gigahertz / gigahertz_of(device);
  BackwardCosts c = kOtherBackward;
  c.scan = at_clock(c.scan, slower);
  c.errors = at_clock(c.errors, slower);
  c.reverse = at_clock(c.reverse, slower);
  c.gradients_ns *= slower;
  return c;
}
inline BackwardCosts backward_costs_of(const DeviceFacts& device) {
  return has_hopper_kernels(device) ? kSm90Backward : other_backward_of(device);
}

inline constexpr MergeCosts kReverseMerge = {
    .step_us = 2.9, .columns = 8, .blocks_per_sm = 2, .fixed_us = 6};
/// Segments behind first ones of a cut at most, times the value heads of a group, for each SM: they
/// bound the workspace where only the GPU knows the lengths. Cuts that gain have fewer.
inline constexpr int64_t kMostBehindAnSm = 2;

inline BackwardModel backward_model(const CostSizes& sizes, const DeviceFacts& device,
                                    const HeadGroups& groups, bool phases, bool kept) {
  const int64_t of_each = sizes.num_value_heads / sizes.num_heads;
  // By sizes: where types and strides ask for the portable kernel, the cut is the same.
  const bool own = has_hopper_grad(sizes.key_dim, sizes.value_dim, of_each);
  return {
      .sizes = sizes,
      .costs = costs_of(device),
      .backward = backward_costs_of(device),
      .reverse_merge = kReverseMerge,
      .gradients_ns = (own ? backward_costs_of(device) : other_backward_of(device)).gradients_ns,
      .least_bytes = cuda::backward::kLeastBytes,
      .groups = groups,
      .most_behind =
          phases ? INT64_MAX : kMostBehindAnSm * sizes.num_sms / (groups.heads * of_each),
      .phases = phases,
      .kept = kept};
}

/// The model where lengths are not known.
inline BackwardModel model_from_bounds(const Plan& plan, const HeadGroups& groups) {
  return backward_model(cost_sizes(plan.problem, plan.device), plan.device, groups,
                        /*phases=*/false, plan.requested.keep == KeepPolicy::kChunks);
}

/// Whether any table of so many tokens and sequences can gain by a cut: the longest time uncut
/// against the least time cut, each as if all tokens were of one sequence. It reads no lengths, so
/// that a plan from bounds says the same as one from lengths.
inline bool may_cut(const BackwardModel& m, int64_t num_tokens, int64_t num_sequences) {
  CostSizes in = m.sizes;
  in.sums = {num_sequences, 1, num_tokens, num_tokens};
  double least = HUGE_VAL;
  const int64_t chunks = plan::ceil_div(num_tokens, plan::kAutoChunk);
  for (int64_t segments = 2; segments <= std::min(plan::kAutoMaxSegments, chunks); ++segments) {
    BackwardCut how{plan::ceil_div(chunks, segments) * plan::kAutoChunk};
    how.cut.add(num_tokens, how.segment_tokens, how.segment_tokens);
    least = std::min(least, candidate_us(m, in, how));
  }
  return whole_us(m, in) >= kMinimumGain * least;
}

/// SegmentPolicy::kAuto: the cut with the least predicted time, if it gains. The kernel of
/// device_cut.cu makes the same cut.
inline plan::Partition auto_backward_partition(const plan::Workload& work,
                                               const DeviceFacts& device, const HeadGroups& groups,
                                               bool phases, bool kept, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const BackwardModel m = backward_model(in, device, groups, phases, kept);
  const plan::CutSearch search{
      .whole_us = whole_us(m, in),
      .may_gain = phases || may_cut(m, in.sums.tokens, in.sums.sequences),
      .minimum_gain = kMinimumGain,
      .minimum_step = m.backward.minimum_step,
      .time_us = [&](int64_t, int64_t segment_tokens) {
        return candidate_us(m, in, {segment_tokens, cut_of(in, segment_tokens, segment_tokens)});
      }};
  return plan::best_partition(work, search, &cost->segmented_us);
}

/// Another backend has to beat it: the time in these groups, cut where that gains.
inline double backward_to_beat_us(const plan::Workload& work, const DeviceFacts& device,
                                  const HeadGroups& groups) {
  CostEstimate cost;
  if (auto_backward_partition(work, device, groups, /*phases=*/false, /*kept=*/false, &cost).on)
    return cost.segmented_us;
  const CostInput in = cost_input(work, device);
  return whole_us(backward_model(in, device, groups, /*phases=*/false, /*kept=*/false), in);
}

}  // namespace kda::cuda::staged
