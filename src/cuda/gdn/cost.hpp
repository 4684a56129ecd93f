// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm90.gdn: chunk_intra, then one chain of chunks a state tile. Scan and
// merge are predicted as those of the staged backend (cuda/staged/cost.hpp).
//
// Where the constants are from: fitted to times of whole calls on an H200 at K = V = 128, bf16;
// tests/plan/cost_test.cpp has the times. most_loss and cut_gain are choices.
#pragma once

#include "cuda/staged/cost.hpp"

namespace kda::cuda::gdn {

struct Costs {
  double intra_ns, intra_value_ns;    ///< chunk_intra: SM time of a token and q/k head, and of a
                                      ///< token and value head
  double few_ns, narrow_ns, wide_ns;  ///< a token of a chain of 64 columns of V while half of the
                                      ///< SMs are idle, of 64, of 128
  double round_us;                    ///< of each round of blocks: first loads, states in and out
  double bytes_per_token;  ///< that a chain reads and writes, with two value heads a q/k head
  double bandwidth;        ///< of the card's, that chains reach
  double fixed_us;         ///< of a launch
  staged::ChainCosts scan;
  MergeCosts merge;
  double minimum_step;    ///< of the time with fewer segments, for more of them
  int64_t memory_tokens;  ///< after which a head has forgotten a state, as a rule: nine in ten
                          ///< heads of trained layers with wide gates
  double most_loss;       ///< of the time without segments, where no head forgets
  double cut_gain;        ///< by which segments must win over another backend
};

inline constexpr Costs kCosts = {
    .intra_ns = 35,
    .intra_value_ns = 13,
    .few_ns = 22,
    .narrow_ns = 24,
    .wide_ns = 42.7,
    .round_us = 3,
    .bytes_per_token = 1044,
    .bandwidth = 0.9,
    .fixed_us = 5,
    .scan = {.few_ns = 13.5, .alone_ns = 15, .shared_ns = 9, .blocks_per_sm = 2, .fixed_us = 3},
    .merge = {.step_us = 1.9, .columns = 8, .blocks_per_sm = 1, .fixed_us = 20},
    .minimum_step = 0.98,
    .memory_tokens = 512,
    .most_loss = 1.2,
    .cut_gain = kMinimumGain};

inline double tokens_and_heads(const CostInput& in) {
  return total_tokens(in) * static_cast<double>(in.num_value_heads);
}
/// The size of K and V; 1 where both are 128.
inline double size_of(const CostInput& in) {
  return static_cast<double>(in.key_dim + in.value_dim) / 256;
}

/// Tokens with those that fill up the last chunk of each sequence.
inline double padded_tokens(const CostInput& in) {
  int64_t chunks = 0;
  for (const int64_t length : in.lengths) chunks += plan::ceil_div(length, plan::kAutoChunk);
  return static_cast<double>(chunks * plan::kAutoChunk);
}

inline double intra_us(const CostInput& in) {
  const double heads_ns = static_cast<double>(in.num_heads) * kCosts.intra_ns +
                          static_cast<double>(in.num_value_heads) * kCosts.intra_value_ns;
  return padded_tokens(in) / static_cast<double>(in.num_sms) * heads_ns * 1e-3 *
             (0.2 + 0.8 * size_of(in)) +
         kCosts.fixed_us;
}

/// `chains` chains of a value head, all of one width: the longest, rounds of blocks, or memory.
inline double forward_us(const CostInput& in, int64_t chains, int64_t longest) {
  if (chains == 0) return 0;
  const int64_t narrow = chains * in.num_value_heads * tiles_of(in.value_dim);
  const bool wide = in.value_dim % 128 == 0 && narrow > in.num_sms;
  const double narrow_ns = 2 * narrow <= in.num_sms ? kCosts.few_ns : kCosts.narrow_ns;
  // Most of a chunk is latency: five sixths of the time at K = 64.
  const double token_us =
      (wide ? kCosts.wide_ns : narrow_ns) * 1e-3 * (2 + static_cast<double>(in.key_dim) / 128) / 3;
  const double rounds =
      rounds_of(static_cast<double>(narrow) / (wide ? 2 : 1), static_cast<double>(in.num_sms));
  const double tokens = rounds * padded_tokens(in) / static_cast<double>(chains);
  const double memory = tokens_and_heads(in) * kCosts.bytes_per_token * size_of(in) /
                        (kCosts.bandwidth * in.bytes_per_second) * 1e6;
  const double steps =
      std::max(tokens, static_cast<double>(longest)) * token_us + rounds * kCosts.round_us;
  return std::max(memory, steps) + kCosts.fixed_us;
}

inline double serial_us(const CostInput& in) {
  return std::max(roofline_us(in),
                  intra_us(in) + forward_us(in, in.sums.with_tokens, longest_of(in)));
}

/// Scan, merge, forward with segments of at most `segment_tokens`. `scanned`: tokens that a scan
/// goes through, as a rule; a few go through their whole segment. `tiles`: blocks of a scan.
inline double segmented_us(const CostInput& in, int64_t segment_tokens, int64_t scanned,
                           int64_t tiles) {
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const double all = std::min(static_cast<double>(cut.tokens_behind),
                              static_cast<double>(cut.behind) * static_cast<double>(scanned));
  const double scan = staged::chains_us(in, kCosts.scan, static_cast<double>(cut.behind),
                                        static_cast<double>(segment_tokens), all, tiles);
  return std::max(roofline_us(in), intra_us(in) + scan + merge_us(in, kCosts.merge, cut.most - 1) +
                                       forward_us(in, cut.segments, segment_tokens));
}

/// The time where no head forgets.
inline double unforgetting_us(const CostInput& in, int64_t segment_tokens) {
  return segmented_us(in, segment_tokens, segment_tokens,
                      tiles_of(in.value_dim) + tiles_of(in.key_dim));
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

/// SegmentPolicy::kAuto. `may_forget`: heads that forget need B alone, of their last tokens.
inline plan::Partition auto_partition(const plan::Workload& work, const DeviceFacts& device,
                                      bool may_forget, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  cost->roofline_us = roofline_us(in);
  cost->serial_us = serial_us(in);
  const auto exact_us = [&](int64_t tokens) { return unforgetting_us(in, tokens); };
  const auto forgetting_us = [&](int64_t tokens) {
    return may_forget ? segmented_us(in, tokens, std::min(tokens, kCosts.memory_tokens),
                                     tiles_of(in.value_dim))
                      : exact_us(tokens);
  };
  return cheapest_cut(work, kCosts.minimum_step, exact_us, forgetting_us, cost);
}

/// Another backend has to beat it: the time of auto_partition's cut where no head forgets, which
/// gates alone decide.
inline double time_to_beat_us(const plan::Workload& work, const DeviceFacts& device) {
  CostEstimate cost;
  const plan::Partition partition = auto_partition(work, device, /*may_forget=*/true, &cost);
  if (!partition.on) return cost.serial_us;
  return kCosts.cut_gain *
         unforgetting_us(cost_input(work, device), partition.segment_chunks * plan::kAutoChunk);
}

}  // namespace kda::cuda::gdn
