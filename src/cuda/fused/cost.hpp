// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm90.fused: a cluster of SMs goes through the tokens of its share of
// chains (a sequence or segment of one value head).
//
// Where the constants are from: fitted to kernel times of an H200 at K = V = 128, bf16; those of
// K = V = 64 to times of an H100. docs/log/2026-11.md has the times and what the fits miss; no file
// of bench/results has them. What is a choice and no measurement says so below.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/text.hpp"
#include "cuda/common/cost_model.hpp"
#include "cuda/fused/cut_model.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::fused {

/// Segments in one pass: their merge and correction, which are launched early.
struct OnePassCosts {
  MergeCosts merge;
  double correct_bytes_per_token;  ///< Qt and residuals read, o read and written, a value head:
                                   ///< 256 + 64 + 512 at V = 128
  double correct_bandwidth;        ///< of the card's, that the correction reaches
  double correct_fixed_us;         ///< with the launches that segments add
  double minimum_step;             ///< of the time with fewer segments, for more; a choice
  int64_t memory_tokens;           ///< after which transitions that may exit early do, as a rule:
                                   ///< slow heads of trained layers took 7,000 to 10,000
  double most_loss;                ///< of the time without, where none does; a choice
  double span_loss;                ///< the same of spans, after memory_tokens; a choice
  double compose_step_us;          ///< maps of a span's segments multiplied, a segment
};

inline constexpr OnePassCosts kOnePassCosts = {
    .merge = {.step_us = 1.6, .columns = 8, .blocks_per_sm = 1, .fixed_us = 4},
    .correct_bytes_per_token = 832,
    .correct_bandwidth = 0.82,
    .correct_fixed_us = 6.5,
    .minimum_step = 0.985,
    .memory_tokens = 8192,
    .most_loss = 1.2,
    .span_loss = 1.15,
    .compose_step_us = 4};

struct Costs {
  double few_ns;      ///< a token, while half of the SMs are idle
  double full_ns;     ///< a token
  double chain_us;    ///< a chain besides
  double fixed_us;    ///< launch, first loads, last stores
  double handoff_us;  ///< where clusters hand states on: parts of chains, waits
  int64_t sms;        ///< of a cluster
  OnePassCosts one_pass;
};

inline constexpr Costs kK128Costs = {.few_ns = 33.9,
                                     .full_ns = 35.2,
                                     .chain_us = 2.6,
                                     .fixed_us = 8.7,
                                     .handoff_us = 5,
                                     .sms = 2,
                                     .one_pass = kOnePassCosts};
inline constexpr Costs kK64Costs = {.few_ns = 29.9,
                                    .full_ns = 33,
                                    .chain_us = 2.7,
                                    .fixed_us = 8.7,
                                    .handoff_us = 5,
                                    .sms = 1,
                                    .one_pass = kOnePassCosts};

inline const Costs& costs_of(int64_t key_dim) { return key_dim <= 64 ? kK64Costs : kK128Costs; }

/// Transitions of a cluster at most, counted by value heads: they bound the workspace where only
/// the GPU knows the lengths.
inline constexpr int64_t kMostTransitions = 2;

/// `check_tokens` (0: none may): transitions may exit early, looked at so often.
inline CutModel model_of(const CostSizes& in, const Costs& c, int64_t check_tokens = 0) {
  const OnePassCosts& one = c.one_pass;
  const auto heads = static_cast<double>(in.num_value_heads);
  const double clusters =
      std::max(1.0, std::floor(static_cast<double>(in.num_sms) / static_cast<double>(c.sms)));
  const double size = static_cast<double>(in.value_dim) / 128;
  CostSizes token = in;
  token.sums.tokens = 1;
  return {.heads = heads,
          .clusters = clusters,
          .heads_a_cluster = heads / clusters,
          .few_us = c.few_ns * 1e-3,
          .full_us = c.full_ns * 1e-3,
          .chain_us = c.chain_us,
          .fixed_us = c.fixed_us,
          .handoff_us = c.handoff_us,
          .roofline_us = roofline_us(token),
          .correct_us = heads * size * one.correct_bytes_per_token /
                        (one.correct_bandwidth * in.bytes_per_second) * 1e6,
          .correct_fixed_us = one.correct_fixed_us,
          .merge_step_us = merge_us(in, one.merge, 1) - one.merge.fixed_us,
          .merge_fixed_us = one.merge.fixed_us,
          .minimum_step = one.minimum_step,
          .most_loss = one.most_loss,
          .value_heads = static_cast<int32_t>(in.num_value_heads),
          .num_sms = static_cast<int32_t>(in.num_sms),
          .most_behind = static_cast<int32_t>(kMostTransitions * static_cast<int64_t>(clusters) /
                                              in.num_value_heads),
          .memory_tokens = static_cast<int32_t>(one.memory_tokens),
          .check_tokens = static_cast<int32_t>(check_tokens),
          .first_segments = {first_segment(0), first_segment(1), first_segment(2), first_segment(3),
                             first_segment(4), first_segment(5), 1, 1}};
}

/// Roofline, uncut in stages and in this kernel.
inline CostEstimate predict(const plan::Workload& work, const DeviceFacts& device) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return {};
  return {.roofline_us = roofline_us(in),
          .serial_us = staged::serial_us(in, staged::costs_of(device)),
          .fused_us = forward_us(model_of(in, costs_of(work.key_dim)), in.sums)};
}

// -- The cut with the least predicted time, where it gains

/// Whether any table of so many tokens and sequences can gain by a cut: the longest time uncut
/// against the least time cut, each in one sequence. It reads no lengths, so that a plan from
/// bounds says the same as one from lengths.
inline bool may_cut(const CutModel& m, int64_t num_tokens, int64_t num_sequences) {
  const auto tokens = static_cast<double>(num_tokens);
  const bool handoff = static_cast<double>(num_sequences) * m.heads > m.clusters;
  const double uncut = tokens * m.full_us + m.chain_us + m.fixed_us + (handoff ? m.handoff_us : 0);
  double chain = HUGE_VAL;
  for (int64_t s = 2; s <= plan::kAutoMaxSegments; ++s)
    chain = std::min(chain, tokens / static_cast<double>(s) * m.few_us + join_us(m, s, int64_t{0}) -
                                m.correct_fixed_us);
  const double fixed = m.fixed_us + m.correct_fixed_us;
  const double cut =
      std::max(chain + m.chain_us + fixed, tokens * m.few_us * m.heads_a_cluster + fixed);
  return uncut >= kMinimumGain * cut;
}

/// The model where lengths are not known.
inline CutModel model_from_bounds(const Problem& p, const DeviceFacts& device,
                                  int64_t check_tokens) {
  return model_of(cost_sizes(p, device), costs_of(p.key_dim), check_tokens);
}

/// SegmentPolicy::kAuto in one pass of this kernel: the cut with the least predicted time, if it
/// gains. The kernel of fused/device_cut.cu makes the same cut.
inline plan::Partition auto_partition(const plan::Workload& work, const DeviceFacts& device,
                                      int64_t check_tokens, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const CutModel m = model_of(in, costs_of(work.key_dim), check_tokens);
  *cost = predict(work, device);
  plan::CutSearch search{.whole_us = cost->fused_us,
                         .least_us = least_us(m, in.sums),
                         .may_gain = may_cut(m, in.sums.tokens, in.sums.sequences),
                         .minimum_gain = kMinimumGain,
                         .minimum_step = m.minimum_step,
                         .patience = kCutPatience,
                         .first_segments = std::span(m.first_segments).first(kNumFirstSegments),
                         .time_us = [&](int64_t first_tokens, int64_t segment_tokens) {
                           const Cut cut = cut_of(in, first_tokens, segment_tokens);
                           return candidate_us(m, in.sums, cut, first_tokens);
                         }};
  const auto let_exit = [&](int64_t chunks, double best, plan::Partition* partition) {
    EarlyExitWalk walk(m, best);
    const int64_t memory = m.memory_tokens;
    for (int64_t segments = 2; segments <= plan::kAutoMaxSegments; ++segments) {
      const int64_t length = plan::ceil_div(chunks, segments), tokens = length * plan::kAutoChunk;
      if (tokens <= memory) break;
      const Cut cut = cut_of(in, tokens, tokens);
      if (!walk.take(early_exit_us(m, in.sums, cut, tokens, memory),
                     early_exit_us(m, in.sums, cut, tokens, tokens)))
        continue;
      partition->segment_chunks = length;
      partition->first_chunks = 0;
      partition->early_exit = true;
    }
    return walk.best;
  };
  if (check_tokens > 0) search.refine = let_exit;
  return plan::best_partition(work, search, &cost->segmented_us);
}

/// The least time, in segments where these gain.
inline double predicted_us(const plan::Workload& work, const DeviceFacts& device) {
  CostEstimate cost;
  auto_partition(work, device, 0, &cost);
  return cost.segmented_us > 0 ? cost.segmented_us : cost.fused_us;
}

/// Cuts spans likewise, behind an empty first segment, so that every segment with tokens has a
/// transition. In line these cost what the segments do, however many there are. So transitions that
/// may exit early are taken where they lose next to nothing if they run on.
inline plan::Partition span_partition(const plan::Workload& work, const DeviceFacts& device,
                                      int64_t check_tokens, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const OnePassCosts& one = costs_of(work.key_dim).one_pass;
  const CutModel m = model_of(in, costs_of(work.key_dim), check_tokens);
  *cost = predict(work, device);
  const int64_t chunks = plan::ceil_div(longest_of(in), plan::kAutoChunk);
  struct {
    int64_t segment_chunks = 0;
    double us = HUGE_VAL;
  } in_line, early;
  const auto keep_less = [&](int64_t segments, double us, auto* best) {
    us += static_cast<double>(segments - 1) * one.compose_step_us;
    if (us < one.minimum_step * best->us) *best = {plan::ceil_div(chunks, segments), us};
  };
  const int64_t most = std::min(plan::kAutoMaxSegments, chunks);
  const auto tokens_of = [&](int64_t segments) {
    return plan::ceil_div(chunks, segments) * plan::kAutoChunk;
  };
  for (int64_t segments = 1; segments <= most; ++segments)
    keep_less(segments,
              one_pass_us(m, in.sums, cut_of(in, 0, tokens_of(segments)), tokens_of(segments)),
              &in_line);
  for (int64_t segments = 1; check_tokens > 0 && segments <= most; ++segments) {
    const int64_t tokens = tokens_of(segments);
    const auto exit_us = [&](int64_t after) {
      return early_exit_us(m, in.sums, cut_of(in, 0, tokens), tokens, after);
    };
    // None would stop much before a shorter segment ends.
    if (2 * tokens > one.memory_tokens && exit_us(tokens) <= one.most_loss * in_line.us)
      keep_less(segments, exit_us(one.memory_tokens), &early);
  }
  plan::Partition partition;
  partition.on = true;
  partition.early_exit = early.us <= one.span_loss * in_line.us;
  const auto& best = partition.early_exit ? early : in_line;
  cost->segmented_us = best.us;
  partition.segment_chunks = best.segment_chunks;
  partition.reasons.push_back(cat("auto: segments of ", best.segment_chunks,
                                  " chunks of 64 tokens, all with transitions",
                                  partition.early_exit ? ", which stop where they are small" : "",
                                  ", ", std::llround(best.us), " us predicted"));
  return partition;
}

}  // namespace kda::cuda::fused
