// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm90.fused as functions of numbers, for the planner (fused/cost.hpp has
// the constants) and for the kernel that cuts on the device (fused/device_cut.cu): a cluster of SMs
// goes through the tokens of its share of chains (a sequence or segment of one value head).
#pragma once

#include <cmath>
#include <cstdint>

#include "plan/cut_search.hpp"

namespace kda::cuda::fused {

/// In one pass a first segment has no transition, so it may be longer than the others: so many
/// times.
inline constexpr int kNumFirstSegments = 6;
KDA_HOST_DEVICE inline double first_segment(int candidate) {
  constexpr double kFirstSegments[kNumFirstSegments] = {1, 1.15, 1.3, 1.5, 1.75, 2};
  return kFirstSegments[candidate];
}
/// Candidates of a number of segments: those, then even segments whose transitions exit early as a
/// rule, and the same if none does.
inline constexpr int kNumCandidates = kNumFirstSegments + 2;
inline constexpr int kCutPatience = 8;  ///< of CutWalk

/// All that times depend on but lengths: a problem and a card. Made on the host.
struct CutModel {
  double heads;               ///< value heads
  double clusters;            ///< of the card
  double heads_a_cluster;     ///< value heads for each of them
  double few_us, full_us;     ///< a token, while half of the SMs are idle, and else
  double chain_us, fixed_us;  ///< a chain besides; a call
  double handoff_us;          ///< where clusters hand states on
  double roofline_us;         ///< a token of all value heads: its bytes
  double correct_us;          ///< a token of all value heads that is corrected
  double correct_fixed_us;
  double merge_step_us, merge_fixed_us;
  double minimum_step, most_loss;  ///< OnePassCosts
  int32_t value_heads, num_sms;
  int32_t most_behind;    ///< segments behind first ones that a cut may have
  int32_t memory_tokens;  ///< OnePassCosts
  int32_t check_tokens;   ///< between checks of a transition that may exit early; 0: none may
  double first_segments[kNumCandidates];  ///< first_segment(), then 1, by candidate
};

KDA_HOST_DEVICE inline double most_of(double a, double b) { return a < b ? b : a; }
KDA_HOST_DEVICE inline double least_of(double a, double b) { return b < a ? b : a; }

/// Whether transitions that exit early can run at the end, one chain a cluster.
KDA_HOST_DEVICE inline bool transitions_fit(int64_t chains, int64_t num_sms) {
  return 2 * chains <= num_sms;
}

/// Every cluster has its share of all tokens and chains, none less than the longest chain.
template <class Int>
KDA_HOST_DEVICE double chains_us(const CutModel& m, Int units, Int tokens, Int longest) {
  const double chains = static_cast<double>(units) * m.heads;
  const double token_us = 2 * chains <= m.clusters ? m.few_us : m.full_us;
  const double alone = static_cast<double>(longest) * token_us + m.chain_us + m.fixed_us;
  if (chains <= m.clusters) return alone;
  const double shared =
      (static_cast<double>(tokens) * token_us + static_cast<double>(units) * m.chain_us) *
          m.heads_a_cluster +
      m.fixed_us;
  return most_of(alone, shared) + m.handoff_us;
}

template <class Int>
KDA_HOST_DEVICE double roofline_us(const CutModel& m, const plan::LengthSums<Int>& sums) {
  return static_cast<double>(sums.tokens) * m.roofline_us;
}

/// Uncut.
template <class Int>
KDA_HOST_DEVICE double forward_us(const CutModel& m, const plan::LengthSums<Int>& sums) {
  return most_of(roofline_us(m, sums), chains_us(m, sums.sequences, sums.tokens, sums.longest));
}

/// However it is cut: all tokens and chains, as if no cluster were ever idle.
template <class Int>
KDA_HOST_DEVICE double least_us(const CutModel& m, const plan::LengthSums<Int>& sums) {
  return (static_cast<double>(sums.tokens) * m.few_us +
          static_cast<double>(sums.with_tokens) * m.chain_us) *
             m.heads_a_cluster +
         m.fixed_us;
}

/// Merge, where a sequence has a third segment (`most` of a sequence), and correction of so many
/// tokens.
template <class Int>
KDA_HOST_DEVICE double join_us(const CutModel& m, Int most, Int tokens) {
  const double merge =
      most > 2 ? static_cast<double>(most - 2) * m.merge_step_us + m.merge_fixed_us : 0;
  return static_cast<double>(tokens) * m.correct_us + m.correct_fixed_us + merge;
}

/// The chains of one pass, and what follows them.
template <class Int>
struct OnePass {
  Int units, tokens, longest;  ///< of chains that clusters share
  double transitions_us;       ///< of transitions behind them
  Int most, corrected;         ///< segments of a sequence; tokens
};
template <class Int>
KDA_HOST_DEVICE double one_pass_us(const CutModel& m, const plan::LengthSums<Int>& sums,
                                   const OnePass<Int>& p) {
  const double chains = chains_us(m, p.units, p.tokens, p.longest) + p.transitions_us;
  return most_of(roofline_us(m, sums), chains + join_us(m, p.most, p.corrected));
}

/// Transitions are chains of their own.
template <class Int>
KDA_HOST_DEVICE OnePass<Int> in_line(const plan::LengthSums<Int>& sums, const plan::Cut<Int>& cut,
                                     Int longest) {
  return {cut.segments + cut.behind, sums.tokens + cut.tokens_behind, longest, 0, cut.most,
          cut.tokens_behind};
}
/// Transitions run after all else, a cluster each, and exit after `memory_tokens`.
template <class Int>
KDA_HOST_DEVICE OnePass<Int> early_exit(const CutModel& m, const plan::LengthSums<Int>& sums,
                                        const plan::Cut<Int>& cut, Int segment_tokens,
                                        Int memory_tokens) {
  const Int run = plan::smaller(segment_tokens, memory_tokens);
  const auto checks = static_cast<double>(plan::ceil_div(run, static_cast<Int>(m.check_tokens)));
  return {cut.segments,   sums.tokens,
          segment_tokens, static_cast<double>(run) * m.full_us + checks * m.chain_us,
          cut.most,       plan::smaller(cut.tokens_behind, cut.behind * run)};
}
/// Whether there is room for the transitions of a cut.
template <class Int>
KDA_HOST_DEVICE bool fits_in_line(const CutModel& m, const plan::Cut<Int>& cut) {
  return cut.behind <= m.most_behind;
}
template <class Int>
KDA_HOST_DEVICE bool fits_behind(const CutModel& m, const plan::Cut<Int>& cut) {
  return static_cast<double>(cut.behind) * m.heads <= m.clusters;
}

template <class Int>
KDA_HOST_DEVICE double one_pass_us(const CutModel& m, const plan::LengthSums<Int>& sums,
                                   const plan::Cut<Int>& cut, Int longest) {
  return one_pass_us(m, sums, in_line(sums, cut, longest));
}

/// A candidate of the search. Infinite where it has more transitions than a cut may have.
template <class Int>
KDA_HOST_DEVICE double candidate_us(const CutModel& m, const plan::LengthSums<Int>& sums,
                                    const plan::Cut<Int>& cut, Int first_tokens) {
  return fits_in_line(m, cut) ? one_pass_us(m, sums, cut, first_tokens) : HUGE_VAL;
}

/// A candidate with transitions that exit after `memory_tokens`. Infinite where there are more of
/// them than clusters.
template <class Int>
KDA_HOST_DEVICE double early_exit_us(const CutModel& m, const plan::LengthSums<Int>& sums,
                                     const plan::Cut<Int>& cut, Int segment_tokens,
                                     Int memory_tokens) {
  if (!fits_behind(m, cut)) return HUGE_VAL;
  return one_pass_us(m, sums, early_exit(m, sums, cut, segment_tokens, memory_tokens));
}

/// The walk over even cuts whose transitions exit early. They are predicted to gain where these
/// exit as they do as a rule, and not to lose much where they never do.
struct EarlyExitWalk {
  double best;  ///< time of what is taken
  double most;  ///< the time if no transition exits
  double minimum_step;
  double below;  ///< less time than this is taken
  bool took = false;

  KDA_HOST_DEVICE EarlyExitWalk(const CutModel& m, double best_us)
      : best(best_us),
        most(m.most_loss * best_us),
        minimum_step(m.minimum_step),
        below(minimum_step * best) {}
  KDA_HOST_DEVICE bool take(double time, double without_exit) {
    if (time >= below || without_exit > most) return false;
    best = time;
    below = minimum_step * best;
    return took = true;
  }
};

}  // namespace kda::cuda::fused
