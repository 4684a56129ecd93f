// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm90.fused: a cluster of SMs goes through the tokens of its share of
// chains (a sequence or segment of one value head).
//
// Where the constants are from: fitted to kernel times of an H200 at K = V = 128, bf16; those of
// K = V = 64 to times of an H100. docs/log/2026-11.md has the times and what the fits miss; no file
// of bench/results has them. What is a choice and no measurement says so below.
#pragma once

#include "core/text.hpp"
#include "cuda/common/cost_model.hpp"
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

/// In one pass a first segment has no transition, so it may be longer than the others: so many
/// times.
inline constexpr int kNumFirstSegments = 6;
KDA_HOST_DEVICE inline double first_segment(int candidate) {
  constexpr double kFirstSegments[kNumFirstSegments] = {1, 1.15, 1.3, 1.5, 1.75, 2};
  return kFirstSegments[candidate];
}
inline constexpr int64_t kCutPatience = 8;  ///< of CutWalk
/// Transitions of a cluster at most, counted by value heads: they bound the workspace where only
/// the GPU knows the lengths. Hardly any cut is the best one with more.
inline constexpr int64_t kMostTransitions = 2;

KDA_HOST_DEVICE inline double clusters_of(const CostInput& in, const Costs& c) {
  return most_of(1.0, floor(static_cast<double>(in.num_sms) / static_cast<double>(c.sms)));
}
/// Segments behind first ones that a cut may have.
KDA_HOST_DEVICE inline int64_t most_behind(const CostInput& in, const Costs& c) {
  return kMostTransitions * static_cast<int64_t>(clusters_of(in, c)) / in.num_value_heads;
}

/// Whether transitions that exit early can run at the end, one chain a cluster.
KDA_HOST_DEVICE inline bool transitions_fit(int64_t chains, int64_t num_sms) {
  return 2 * chains <= num_sms;
}

/// Every cluster has its share of all tokens and chains, none less than the longest chain.
KDA_HOST_DEVICE inline double chains_us(const CostInput& in, const Costs& c, int64_t units,
                                        int64_t tokens, int64_t longest) {
  const auto heads = static_cast<double>(in.num_value_heads);
  const double chains = static_cast<double>(units) * heads;
  const double clusters = clusters_of(in, c);
  const double token_us = (2 * chains <= clusters ? c.few_ns : c.full_ns) * 1e-3;
  const double alone = static_cast<double>(longest) * token_us + c.chain_us + c.fixed_us;
  if (chains <= clusters) return alone;
  const double shared =
      (static_cast<double>(tokens) * heads * token_us + chains * c.chain_us) / clusters +
      c.fixed_us;
  return most_of(alone, shared) + c.handoff_us;
}

/// Uncut.
KDA_HOST_DEVICE inline double forward_us(const CostInput& in, const Costs& c) {
  return most_of(roofline_us(in),
                 chains_us(in, c, in.sums.sequences, in.sums.tokens, in.sums.longest));
}

/// However it is cut: all tokens and chains, as if no cluster were ever idle.
KDA_HOST_DEVICE inline double least_us(const CostInput& in, const Costs& c) {
  const double of_head =
      total_tokens(in) * c.few_ns * 1e-3 + static_cast<double>(in.sums.with_tokens) * c.chain_us;
  return of_head * static_cast<double>(in.num_value_heads) / clusters_of(in, c) + c.fixed_us;
}

/// Merge, where a sequence has a third segment, and correction of so many tokens a value head.
KDA_HOST_DEVICE inline double join_us(const CostInput& in, const Costs& c, const Cut& cut,
                                      int64_t tokens) {
  const OnePassCosts& one = c.one_pass;
  const double size = static_cast<double>(in.value_dim) / 128;
  const double correct = static_cast<double>(tokens) * static_cast<double>(in.num_value_heads) *
                             size * one.correct_bytes_per_token /
                             (one.correct_bandwidth * in.bytes_per_second) * 1e6 +
                         one.correct_fixed_us;
  return correct + (cut.most > 2 ? merge_us(in, one.merge, cut.most - 2) : 0);
}

/// In one pass: transitions are chains of their own.
KDA_HOST_DEVICE inline double one_pass_us(const CostInput& in, const Costs& c, const Cut& cut,
                                          int64_t first_tokens, int64_t segment_tokens) {
  const double chains =
      chains_us(in, c, cut.segments + cut.behind, in.sums.tokens + cut.tokens_behind,
                plan::larger(first_tokens, segment_tokens));
  return most_of(roofline_us(in), chains + join_us(in, c, cut, cut.tokens_behind));
}
inline double one_pass_us(const CostInput& in, const Costs& c, int64_t first_tokens,
                          int64_t segment_tokens) {
  return one_pass_us(in, c, cut_of(in, first_tokens, segment_tokens), first_tokens, segment_tokens);
}

/// Time of one pass with transitions after all else, a cluster each, that exit after
/// `memory_tokens`; their norm is checked after every `check_tokens`. Infinite where there are more
/// of them than clusters.
KDA_HOST_DEVICE inline double early_exit_us(const CostInput& in, const Costs& c, const Cut& cut,
                                            int64_t segment_tokens, int64_t memory_tokens,
                                            int64_t check_tokens) {
  if (static_cast<double>(cut.behind * in.num_value_heads) > clusters_of(in, c)) return HUGE_VAL;
  const int64_t run = plan::smaller(segment_tokens, memory_tokens);
  const double chains = chains_us(in, c, cut.segments, in.sums.tokens, segment_tokens);
  const double transitions = static_cast<double>(run) * c.full_ns * 1e-3 +
                             static_cast<double>(plan::ceil_div(run, check_tokens)) * c.chain_us;
  const int64_t tokens = plan::smaller(cut.tokens_behind, cut.behind * run);
  return most_of(roofline_us(in), chains + transitions + join_us(in, c, cut, tokens));
}
inline double early_exit_us(const CostInput& in, const Costs& c, int64_t first_tokens,
                            int64_t segment_tokens, int64_t memory_tokens, int64_t check_tokens) {
  return early_exit_us(in, c, cut_of(in, first_tokens, segment_tokens), segment_tokens,
                       memory_tokens, check_tokens);
}

/// Roofline, uncut in stages and in this kernel.
inline CostEstimate predict(const plan::Workload& work, const DeviceFacts& device) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return {};
  return {.roofline_us = roofline_us(in),
          .serial_us = staged::serial_us(in, staged::costs_of(device)),
          .fused_us = forward_us(in, costs_of(work.key_dim))};
}

// -- The cut with the least predicted time, where it gains

/// Whether any table of so many tokens and sequences can gain by a cut: the longest time uncut
/// against the least time cut, each in one sequence. It reads no lengths, so that a plan from
/// bounds says the same as one from lengths. (Of 220,000 random tables for which it is false, three
/// would be cut if nobody asked.)
inline bool may_cut(const CostInput& in, const Costs& c) {
  const OnePassCosts& one = c.one_pass;
  const double tokens = total_tokens(in), clusters = clusters_of(in, c);
  const auto heads = static_cast<double>(in.num_value_heads);
  const bool handoff = static_cast<double>(in.sums.sequences) * heads > clusters;
  const double uncut =
      tokens * c.full_ns * 1e-3 + c.chain_us + c.fixed_us + (handoff ? c.handoff_us : 0);
  double chain = HUGE_VAL;
  for (int64_t s = 2; s <= plan::kAutoMaxSegments; ++s)
    chain = least_of(chain, tokens / static_cast<double>(s) * c.few_ns * 1e-3 +
                                (s > 2 ? merge_us(in, one.merge, s - 2) : 0));
  const double fixed = c.fixed_us + one.correct_fixed_us;
  const double cut =
      most_of(chain + c.chain_us + fixed, tokens * heads * c.few_ns * 1e-3 / clusters + fixed);
  return uncut >= kMinimumGain * cut;
}

/// The input of which may_cut() is asked where lengths are not known.
inline CostInput bounds_of(const Problem& p, const DeviceFacts& device) {
  return {.sums = {p.num_sequences, p.num_sequences, p.num_tokens, p.num_tokens},
          .num_value_heads = p.num_value_heads,
          .key_dim = p.key_dim,
          .value_dim = p.value_dim,
          .num_sms = device.num_sms,
          .bytes_per_second = device.memory_bytes_per_second,
          .lengths = {}};
}

/// A candidate of the search: segments with their transitions in the schedule. Infinite where it
/// has more transitions than a cut may have.
KDA_HOST_DEVICE inline double candidate_us(const CostInput& in, const Costs& c, const Cut& cut,
                                           const plan::CutLengths& lengths) {
  if (cut.behind > most_behind(in, c)) return HUGE_VAL;
  return one_pass_us(in, c, cut, lengths.first * plan::kAutoChunk,
                     lengths.others * plan::kAutoChunk);
}

/// The walk over even cuts whose transitions exit early. They are predicted to gain where these
/// exit as they do as a rule, and not to lose much where they never do.
struct EarlyExitWalk {
  double best;  ///< time of what is taken
  double most;  ///< the time if no transition exits
  double minimum_step;
  bool took = false;

  KDA_HOST_DEVICE EarlyExitWalk(const Costs& c, double best_us)
      : best(best_us),
        most(c.one_pass.most_loss * best_us),
        minimum_step(c.one_pass.minimum_step) {}
  KDA_HOST_DEVICE bool take(double time, double without_exit) {
    if (time >= minimum_step * best || without_exit > most) return false;
    best = time;
    return took = true;
  }
};

/// SegmentPolicy::kAuto in one pass of this kernel: the cut with the least predicted time, if it
/// gains. `check_tokens` (0: they must not): transitions may exit early, looked at so often. The
/// kernel of fused/device_cut.cu makes the same cut.
inline plan::Partition auto_partition(const plan::Workload& work, const DeviceFacts& device,
                                      int64_t check_tokens, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const Costs& c = costs_of(work.key_dim);
  *cost = predict(work, device);
  double first_segments[kNumFirstSegments];
  for (int i = 0; i < kNumFirstSegments; ++i) first_segments[i] = first_segment(i);
  plan::CutSearch search{
      .whole_us = cost->fused_us,
      .least_us = least_us(in, c),
      .may_gain = may_cut(in, c),
      .minimum_gain = kMinimumGain,
      .minimum_step = c.one_pass.minimum_step,
      .patience = kCutPatience,
      .first_segments = first_segments,
      .time_us = [&](int64_t first_tokens, int64_t segment_tokens) {
        return candidate_us(in, c, cut_of(in, first_tokens, segment_tokens),
                            {first_tokens / plan::kAutoChunk, segment_tokens / plan::kAutoChunk});
      }};
  const auto let_exit = [&](int64_t chunks, double best, plan::Partition* partition) {
    EarlyExitWalk walk(c, best);
    const int64_t memory = c.one_pass.memory_tokens;
    for (int64_t segments = 2; segments <= plan::kAutoMaxSegments; ++segments) {
      const int64_t length = plan::ceil_div(chunks, segments), tokens = length * plan::kAutoChunk;
      if (tokens <= memory) break;
      if (!walk.take(early_exit_us(in, c, tokens, tokens, memory, check_tokens),
                     early_exit_us(in, c, tokens, tokens, tokens, check_tokens)))
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

/// Cuts spans likewise, behind an empty first segment, so that every segment with tokens has a
/// transition. In line these cost what the segments do, however many there are. So transitions that
/// may exit early are taken where they lose next to nothing if they run on.
inline plan::Partition span_partition(const plan::Workload& work, const DeviceFacts& device,
                                      int64_t check_tokens, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return plan::uncut("auto: no tokens");
  const Costs& c = costs_of(work.key_dim);
  const OnePassCosts& one = c.one_pass;
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
    keep_less(segments, one_pass_us(in, c, 0, tokens_of(segments)), &in_line);
  for (int64_t segments = 1; check_tokens > 0 && segments <= most; ++segments) {
    const int64_t tokens = tokens_of(segments);
    const auto exit_us = [&](int64_t after) {
      return early_exit_us(in, c, 0, tokens, after, check_tokens);
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
