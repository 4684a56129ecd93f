// SPDX-License-Identifier: Apache-2.0
// Predicted times of the backward of cuda.sm90.gdn: factors of chunks, both chains in one launch,
// gradients of chunks; of segments a scan and a merge of both directions before the chains. All
// constants are in kBackwardCosts.
//
// Where they are from: fitted to times of whole calls on an H200 at K = V = 128, bf16, uncut;
// tests/plan/cost_test.cpp has the times. There chains take as long as their bytes. errors_ns,
// reverse_ns and merge are predictions; of segments docs/design/gdn_backward.md has times beside
// them.
#pragma once

#include "cuda/gdn/cost.hpp"
#include "cuda/recurrent/backward/cost.hpp"

namespace kda::cuda::gdn {

struct BackwardCosts {
  double intra_ns, intra_value_ns;  ///< chunk_intra: SM time of a token and q/k head, and of a
                                    ///< token and value head
  double grad_ns, grad_value_ns;    ///< chunk_grad, likewise
  double errors_ns, reverse_ns;  ///< a token of a chain of 64 columns of V, left to right and back
  double round_us;               ///< of each round of blocks: first loads, states in and out
  double chain_bytes, chain_value_bytes;  ///< of both chains, a token and q/k head or value head
  double bandwidth;                       ///< of the card's, that chains reach
  double fixed_us;                        ///< of a launch
  MergeCosts merge;                       ///< of both directions
  double minimum_step;                    ///< as in Costs
};

inline constexpr BackwardCosts kBackwardCosts = {
    .intra_ns = 35,
    .intra_value_ns = 18,
    .grad_ns = 17,
    .grad_value_ns = 118,
    .errors_ns = 18.5,
    .reverse_ns = 22.5,
    .round_us = 5,
    .chain_bytes = 768,
    .chain_value_bytes = 3104,
    .bandwidth = 0.99,
    .fixed_us = 5,
    .merge = {.step_us = 1.9, .columns = 8, .blocks_per_sm = 1, .fixed_us = 8},
    .minimum_step = 0.98};

/// Blocks of one launch, an SM each: from right to left, from left to right, and transitions.
struct ChainBlocks {
  double reverse, errors, transitions;
};

/// Chains of `mean` tokens, the longest of `longest`: rounds of blocks, or the longest chain.
/// Kernels have 128 channels whatever K is.
inline double chains_us(const CostInput& in, const ChainBlocks& blocks, double mean,
                        double longest) {
  const BackwardCosts& c = kBackwardCosts;
  const double errors = blocks.errors + blocks.transitions, all = blocks.reverse + errors;
  if (all == 0) return 0;
  const double rounds = rounds_of(all, static_cast<double>(in.num_sms));
  const double token_ns = (blocks.reverse * c.reverse_ns + errors * c.errors_ns) / all;
  const double steps_us = std::max(longest * c.reverse_ns, mean * rounds * token_ns) * 1e-3;
  return steps_us + rounds * c.round_us;
}

/// Both chains of `chains` sequences or segments a value head.
inline double both_chains_us(const CostInput& in, int64_t chains, int64_t longest) {
  if (chains == 0) return 0;
  const BackwardCosts& c = kBackwardCosts;
  const int64_t tiles = tiles_of(in.value_dim);
  const auto blocks = static_cast<double>(chains * in.num_value_heads * tiles);
  const double bytes = static_cast<double>(in.num_heads) * c.chain_bytes +
                       static_cast<double>(in.num_value_heads * tiles) / 2 * c.chain_value_bytes;
  const double rounds = rounds_of(2 * blocks, static_cast<double>(in.num_sms));
  const double memory =
      padded_tokens(in) * bytes / (c.bandwidth * in.bytes_per_second) * 1e6 + rounds * c.round_us;
  return std::max(
      memory, chains_us(in, {blocks, blocks, 0}, padded_tokens(in) / static_cast<double>(chains),
                        static_cast<double>(longest)));
}

/// Factors before the chains, gradients behind them, three launches.
inline double around_chains_us(const CostInput& in) {
  const BackwardCosts& c = kBackwardCosts;
  const auto H = static_cast<double>(in.num_heads), HV = static_cast<double>(in.num_value_heads);
  const double tiles = static_cast<double>(tiles_of(in.value_dim)) / 2;
  const double ns =
      H * (c.intra_ns + c.grad_ns) + HV * (c.intra_value_ns + c.grad_value_ns * tiles);
  return padded_tokens(in) / static_cast<double>(in.num_sms) * ns * 1e-3 + 3 * c.fixed_us;
}

inline double whole_backward_us(const CostInput& in) {
  return std::max(cuda::backward::least_us(in),
                  around_chains_us(in) + both_chains_us(in, in.sums.with_tokens, longest_of(in)));
}

/// With segments of at most `segment_tokens`, of which a scan goes through `scanned` tokens at
/// most. `exact`: with all transitions.
inline double segmented_backward_us(const CostInput& in, int64_t segment_tokens, int64_t scanned,
                                    bool exact) {
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const auto heads = static_cast<double>(cut.behind * in.num_value_heads);
  const double V = heads * static_cast<double>(tiles_of(in.value_dim));
  const double K = exact ? heads * static_cast<double>(tiles_of(in.key_dim)) : 0;
  const auto tokens = static_cast<double>(std::min(scanned, segment_tokens));
  CostInput both = in;
  both.num_value_heads *= 2;
  return around_chains_us(in) + chains_us(in, {V, V, K}, tokens, tokens) + kBackwardCosts.fixed_us +
         merge_us(both, kBackwardCosts.merge, cut.most - 1) +
         both_chains_us(in, cut.segments, segment_tokens);
}

/// The time where no head forgets.
inline double unforgetting_backward_us(const CostInput& in, int64_t segment_tokens) {
  return segmented_backward_us(in, segment_tokens, segment_tokens, /*exact=*/true);
}

/// The cut with the least predicted time, if it gains: forgetting_us(tokens of a segment), unless
/// exact_us(tokens), the time where no head forgets, would lose more than kCosts.most_loss.
/// `cost` has the time without a cut.
template <class ExactUs, class ForgettingUs>
plan::Partition cheapest_cut(const plan::Workload& work, double minimum_step, ExactUs&& exact_us,
                             ForgettingUs&& forgetting_us, CostEstimate* cost) {
  const double most = kCosts.most_loss * cost->serial_us;
  const auto time_us = [&](int64_t, int64_t tokens) -> double {
    const double exact = exact_us(tokens);
    return exact > most ? exact : forgetting_us(tokens);
  };
  const plan::CutSearch search{.whole_us = cost->serial_us,
                               .minimum_gain = kMinimumGain,
                               .minimum_step = minimum_step,
                               .time_us = time_us};
  return plan::best_partition(work, search, &cost->segmented_us);
}

/// SegmentPolicy::kAuto, as auto_partition() of the forward has it.
inline plan::Partition auto_backward_partition(const plan::Workload& work,
                                               const DeviceFacts& device, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  cost->roofline_us = cuda::backward::least_us(in);
  cost->serial_us = whole_backward_us(in);
  return cheapest_cut(
      work, kBackwardCosts.minimum_step,
      [&](int64_t tokens) { return unforgetting_backward_us(in, tokens); },
      [&](int64_t tokens) {
        return segmented_backward_us(in, tokens, kCosts.memory_tokens, /*exact=*/false);
      },
      cost);
}

/// Another backend has to beat it: the time of that cut where no head forgets, or without one.
inline double backward_to_beat_us(const plan::Workload& work, const DeviceFacts& device) {
  CostEstimate cost;
  const plan::Partition partition = auto_backward_partition(work, device, &cost);
  if (!partition.on) return cost.serial_us;
  return unforgetting_backward_us(cost_input(work, device),
                                  partition.segment_chunks * plan::kAutoChunk);
}

}  // namespace kda::cuda::gdn
