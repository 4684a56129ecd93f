// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged backward. The constants are fitted to times of an H200 at
// K = V = 128 in bf16, which docs/log/2026-11.md has ("Segments of the backward", "Chains of the
// backward on Hopper").
#pragma once

#include "cuda/recurrent/backward/cost.hpp"
#include "cuda/staged/backward/kernels.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::staged {

struct BackwardCosts {
  ChainCosts scan, errors, reverse;
  bool beside;  ///< one launch has the chains of both directions
  /// Bytes a token and value head that each direction reads and writes, and one for D alone; 0: not
  /// what bounds it.
  double errors_bytes, reverse_bytes, d_bytes;
  double gradients_ns;  ///< SM time of a token and value head behind the chains
  double group_us;      ///< launches of a group, and what they take to fill the card
  double minimum_step;  ///< of the time with fewer segments, for more of them
};

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
/// The maps of segments, and launches that end before the next ones begin.
inline constexpr double kSegmentsUs = 12;
/// The part of the card's bandwidth that chains reach.
inline constexpr double kChainBandwidth = 0.9;

/// Chains of both directions, errors and reverse, of the same spans. In one launch they take as
/// long as the longer ones, or twice that where not all blocks fit at once, as segments were
/// measured to. `kept`: errors are there.
inline double both_chains_us(const CostInput& in, const BackwardCosts& c, double chains,
                             double longest, bool kept) {
  const double total = total_tokens(in);
  const int64_t tiles = tiles_of(in.value_dim);
  const double errors = chains_us(in, c.errors, chains, longest, total, tiles);
  const double reverse = chains_us(in, c.reverse, chains, longest, total, tiles);
  if (kept) return reverse;
  const double blocks = 2 * chains * static_cast<double>(in.num_value_heads * tiles);
  if (!c.beside) return errors + reverse;
  return std::max(errors, reverse) * (blocks <= static_cast<double>(in.num_sms) ? 1 : 2);
}

/// Time that memory needs for `bytes` a token and value head at K = V = 128.
inline double chain_memory_us(const CostInput& in, double bytes) {
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) * bytes * size /
         (kChainBandwidth * in.bytes_per_second) * 1e6;
}

/// States before segments and dS behind them. One launch has both on Hopper, but not in two phases.
inline double merges_us(const CostInput& in, const DeviceFacts& device, int64_t steps,
                        bool phases) {
  const MergeCosts merge = costs_of(device).merge;
  if (phases || !backward_costs_of(device).beside)
    return merge_us(in, merge, steps) + merge_us(in, kReverseMerge, steps);
  CostInput both = in;
  both.num_value_heads *= 2;
  return merge_us(both, merge, steps);
}

/// How a backward is cut; 0 tokens: not at all.
struct BackwardCut {
  int64_t segment_tokens = 0;
  bool phases = false;  ///< of a backward in two phases: states and errors are in the first one
  bool kept = false;    ///< the forward has kept states and errors
};

/// The chains of a group of heads, whose CostInput `in` is.
inline double chains_of_backward_us(const CostInput& in, const DeviceFacts& device,
                                    const BackwardCut& how) {
  const BackwardCosts c = backward_costs_of(device);
  const double errors_bytes = how.kept ? 0 : c.errors_bytes;
  if (how.segment_tokens == 0)
    return std::max(chain_memory_us(in, errors_bytes + c.reverse_bytes),
                    both_chains_us(in, c, static_cast<double>(in.sums.sequences),
                                   static_cast<double>(longest_of(in)), how.kept));
  const Cut cut = cut_of(in, how.segment_tokens, how.segment_tokens);
  const auto longest = static_cast<double>(how.segment_tokens);
  const int64_t tiles = tiles_of(in.value_dim);
  const auto us = [&](const ChainCosts& chain, int64_t of_tiles) {
    return chains_us(in, chain, static_cast<double>(cut.segments), longest, total_tokens(in),
                     of_tiles);
  };
  // Chains for D and those from right to left; states and errors go beside the latter, or in two
  // phases beside the former.
  const auto beside = [&](double bytes) {
    return std::max(chain_memory_us(in, errors_bytes + bytes),
                    both_chains_us(in, c, static_cast<double>(cut.segments), longest, how.kept));
  };
  const auto alone = [&](double bytes) {
    return std::max(chain_memory_us(in, bytes), us(c.reverse, tiles));
  };
  const double chains = how.phases ? beside(c.d_bytes) + alone(c.reverse_bytes)
                                   : alone(c.d_bytes) + beside(c.reverse_bytes);
  return kSegmentsUs + us(c.scan, tiles + tiles_of(in.key_dim)) + chains +
         merges_us(in, device, cut.most - 1, how.phases);
}

/// Groups one after the other.
inline double backward_us(const CostInput& in, const DeviceFacts& device, int64_t num_heads,
                          const HeadGroups& groups, const BackwardCut& how = {}) {
  const int64_t of_each = in.num_value_heads / num_heads;
  const auto sms = static_cast<double>(in.num_sms);
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  // By sizes: where types and strides ask for the portable kernel, the cut is the same.
  const bool own = has_hopper_grad(in.key_dim, in.value_dim, of_each);
  const double grad_ns = (own ? backward_costs_of(device) : other_backward_of(device)).gradients_ns;
  double us = intra_us(in, costs_of(device)) + total_tokens(in) *
                                                   static_cast<double>(in.num_value_heads) / sms *
                                                   size * grad_ns * 1e-3;
  CostInput group = in;
  for (int64_t first = 0; first < num_heads; first += groups.heads) {
    group.num_value_heads = std::min(groups.heads, num_heads - first) * of_each;
    us += chains_of_backward_us(group, device, how) + backward_costs_of(device).group_us;
  }
  return std::max(cuda::backward::least_us(in), us);
}

/// The chain from right to left alone, uncut.
inline double reverse_us(const CostInput& in, const DeviceFacts& device) {
  const BackwardCosts c = backward_costs_of(device);
  return std::max(
      chain_memory_us(in, c.reverse_bytes),
      chains_us(in, c.reverse, static_cast<double>(in.sums.sequences),
                static_cast<double>(longest_of(in)), total_tokens(in), tiles_of(in.value_dim)));
}

/// SegmentPolicy::kAuto: the cut with the least predicted time, if it gains. `phases`: uncut, a
/// backward in two phases has that chain twice.
inline plan::Partition auto_backward_partition(const plan::Workload& work,
                                               const DeviceFacts& device, int64_t num_heads,
                                               const HeadGroups& groups, bool phases, bool kept,
                                               CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const plan::CutSearch search{
      .whole_us = backward_us(in, device, num_heads, groups, {.kept = kept}) +
                  (phases ? reverse_us(in, device) : 0),
      .minimum_gain = kMinimumGain,
      .minimum_step = backward_costs_of(device).minimum_step,
      .time_us = [&](int64_t, int64_t segment_tokens) {
        return backward_us(in, device, num_heads, groups, {segment_tokens, phases, kept});
      }};
  return plan::best_partition(work, search, &cost->segmented_us);
}

}  // namespace kda::cuda::staged
