// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm90.gdn (cut_model.hpp), and the cut with the least.
//
// Where the constants are from: fitted to times of whole calls on an H200 at K = V = 128, bf16;
// tests/plan/cost_test.cpp has the times. most_loss is a choice.
#pragma once

#include "cuda/gdn/cut_model.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::gdn {

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
    .most_loss = 1.2};

/// Segments behind first ones of a cut at most, times the value heads, for each SM: they bound the
/// workspace where only the GPU knows the lengths. Of 8,557 random tables that gain 211 would have
/// more, and lose up to 17%.
inline constexpr int64_t kMostBehindAnSm = 4;

inline CutModel cut_model(const CostSizes& sizes, bool may_forget) {
  return {.sizes = sizes,
          .costs = kCosts,
          .least_bytes = kBytesPerToken,
          .most_behind = kMostBehindAnSm * sizes.num_sms / sizes.num_value_heads,
          .may_forget = may_forget};
}
/// The model where lengths are not known.
inline CutModel model_from_bounds(const Problem& p, const DeviceFacts& device) {
  return cut_model(cost_sizes(p, device), /*may_forget=*/true);
}

/// Tokens with those that fill up the last chunk of each sequence.
inline double padded_tokens(const CostInput& in) {
  int64_t chunks = 0;
  for (const int64_t length : in.lengths) chunks += plan::ceil_div(length, plan::kAutoChunk);
  return static_cast<double>(chunks * plan::kAutoChunk);
}
inline PaddedSizes padded(const CostInput& in) { return {in, padded_tokens(in)}; }
inline EvenCut even_cut(const CostInput& in, int64_t segment_tokens) {
  return {segment_tokens, cut_of(in, segment_tokens, segment_tokens)};
}

/// Uncut.
inline double serial_us(const CostInput& in) { return whole_us(cut_model(in, true), padded(in)); }
/// The time where no head forgets.
inline double unforgetting_us(const CostInput& in, int64_t segment_tokens) {
  return unforgetting_us(cut_model(in, true), padded(in), even_cut(in, segment_tokens));
}

/// Whether a cut of so many tokens and sequences is looked for: the longest time uncut, of one
/// sequence of all tokens beside any number of short ones, which may make its blocks wide; against
/// the least time cut, as if all tokens were of one sequence. Hardly any table that gains is
/// refused (docs/design/gdn.md). It reads no lengths, so that a plan from bounds says the same as
/// one from lengths.
template <class Model>
bool may_cut(const Model& m, int64_t num_tokens, int64_t num_sequences) {
  const int64_t chunks = plan::ceil_div(num_tokens, plan::kAutoChunk);
  PaddedSizes in{m.sizes, static_cast<double>(chunks * plan::kAutoChunk)};
  in.sums = {num_sequences, 1, num_tokens, num_tokens};
  double least = HUGE_VAL, longest = candidate_us(m, in, {});
  for (int64_t segments = 2; segments <= std::min(plan::kAutoMaxSegments, chunks); ++segments) {
    EvenCut how{plan::ceil_div(chunks, segments) * plan::kAutoChunk};
    how.cut.add(num_tokens, how.segment_tokens, how.segment_tokens);
    least = std::min(least, candidate_us(m, in, how));
  }
  // Past as many chains as SMs, more of them add as many rounds to a cut as to none.
  for (int64_t n = 2; n <= std::min(num_sequences, in.num_sms + 1); ++n) {
    in.sums.with_tokens = n;
    longest = std::max(longest, candidate_us(m, in, {}));
  }
  return longest >= kMinimumGain * least;
}

/// The cut with the least predicted time, if it gains. The kernel of device_cut.cu makes the same
/// cut.
template <class Model>
plan::Partition cheapest_cut(const plan::Workload& work, const CostInput& input, const Model& m,
                             CostEstimate* cost) {
  if (total_tokens(input) == 0) return plan::uncut("auto: no tokens");
  const PaddedSizes in = padded(input);
  cost->roofline_us = least_us(m, in);
  cost->serial_us = candidate_us(m, in, {});
  const plan::CutSearch search{.whole_us = cost->serial_us,
                               .may_gain = in.sums.longest > plan::kAutoChunk &&
                                           may_cut(m, in.sums.tokens, in.sums.sequences),
                               .minimum_gain = kMinimumGain,
                               .minimum_step = m.costs.minimum_step,
                               .time_us = [&](int64_t, int64_t tokens) {
                                 return candidate_us(m, in, even_cut(input, tokens));
                               }};
  return plan::best_partition(work, search, &cost->segmented_us);
}

/// SegmentPolicy::kAuto. `may_forget`: heads that forget need B alone, of their last tokens.
inline plan::Partition auto_partition(const plan::Workload& work, const DeviceFacts& device,
                                      bool may_forget, CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  return cheapest_cut(work, in, cut_model(in, may_forget), cost);
}

/// Another backend has to beat it: the mean of two times of auto_partition's cut, where every head
/// forgets and where none does. Gates alone decide which heads do; those of a layer are of both
/// kinds.
inline double time_to_beat_us(const plan::Workload& work, const DeviceFacts& device) {
  CostEstimate cost;
  const plan::Partition partition = auto_partition(work, device, /*may_forget=*/true, &cost);
  if (!partition.on) return cost.serial_us;
  const int64_t tokens = partition.segment_chunks * plan::kAutoChunk;
  return (cost.segmented_us + unforgetting_us(cost_input(work, device), tokens)) / 2;
}

}  // namespace kda::cuda::gdn
