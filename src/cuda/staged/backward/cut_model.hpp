// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged backward as functions of numbers, for the planner (cost.hpp has the
// constants) and for the kernel that cuts where only the GPU knows the lengths (device_cut.cu).
#pragma once

#include "cuda/staged/chain_model.hpp"

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

/// The maps of segments, and launches that end before the next ones begin.
inline constexpr double kSegmentsUs = 12;
/// The part of the card's bandwidth that chains reach.
inline constexpr double kChainBandwidth = 0.9;

/// All that times depend on but lengths. Made on the host.
struct BackwardModel {
  CostSizes sizes;  ///< without sums
  Costs costs;
  BackwardCosts backward;
  MergeCosts reverse_merge;
  double gradients_ns;  ///< of the kernel that serves
  double least_bytes;   ///< a token and value head
  HeadGroups groups;
  int64_t most_behind;  ///< segments behind first ones that a cut may have
  bool phases;          ///< in two phases: states and errors are in the first one
  bool kept;            ///< the forward has kept states and errors
};

/// How a backward is cut; 0 tokens: not at all.
struct BackwardCut {
  int64_t segment_tokens = 0;
  Cut cut = {};  ///< into segments of at most so many
};

/// Chains of both directions, errors and reverse, of the same spans. In one launch they take as
/// long as the longer ones, or twice that where not all blocks fit at once, as segments were
/// measured to.
KDA_HOST_DEVICE inline double both_chains_us(const BackwardModel& m, const CostSizes& in,
                                             double chains, double longest) {
  const BackwardCosts& c = m.backward;
  const double total = total_tokens(in);
  const int64_t tiles = tiles_of(in.value_dim);
  const double errors = chains_us(in, c.errors, chains, longest, total, tiles);
  const double reverse = chains_us(in, c.reverse, chains, longest, total, tiles);
  if (m.kept) return reverse;
  const double blocks = 2 * chains * static_cast<double>(in.num_value_heads * tiles);
  if (!c.beside) return errors + reverse;
  return plan::larger(errors, reverse) * (blocks <= static_cast<double>(in.num_sms) ? 1 : 2);
}

KDA_HOST_DEVICE inline double chain_memory_us(const CostSizes& in, double bytes) {
  return memory_us(in, bytes, kChainBandwidth * in.bytes_per_second);
}

/// States before segments and dS behind them. One launch has both on Hopper, but not in two phases.
KDA_HOST_DEVICE inline double merges_us(const BackwardModel& m, const CostSizes& in,
                                        int64_t steps) {
  if (m.phases || !m.backward.beside)
    return merge_us(in, m.costs.merge, steps) + merge_us(in, m.reverse_merge, steps);
  CostSizes both = in;
  both.num_value_heads *= 2;
  return merge_us(both, m.costs.merge, steps);
}

/// The chains of a group of heads, whose CostSizes `in` is.
KDA_HOST_DEVICE inline double chains_of_backward_us(const BackwardModel& m, const CostSizes& in,
                                                    const BackwardCut& how) {
  const BackwardCosts& c = m.backward;
  const double errors_bytes = m.kept ? 0 : c.errors_bytes;
  if (how.segment_tokens == 0)
    return plan::larger(chain_memory_us(in, errors_bytes + c.reverse_bytes),
                        both_chains_us(m, in, static_cast<double>(in.sums.sequences),
                                       static_cast<double>(longest_of(in))));
  const auto chains = static_cast<double>(how.cut.segments);
  const auto longest = static_cast<double>(how.segment_tokens);
  const int64_t tiles = tiles_of(in.value_dim);
  // Chains for D and those from right to left; states and errors go beside the latter, or in two
  // phases beside the former.
  const double with_errors = both_chains_us(m, in, chains, longest);
  const double alone = chains_us(in, c.reverse, chains, longest, total_tokens(in), tiles);
  const double alone_bytes = m.phases ? c.reverse_bytes : c.d_bytes;
  const double beside_bytes = m.phases ? c.d_bytes : c.reverse_bytes;
  const double both = plan::larger(chain_memory_us(in, alone_bytes), alone) +
                      plan::larger(chain_memory_us(in, errors_bytes + beside_bytes), with_errors);
  const double scan =
      chains_us(in, c.scan, chains, longest, total_tokens(in), tiles + tiles_of(in.key_dim));
  return kSegmentsUs + scan + both + merges_us(m, in, how.cut.most - 1);
}

/// Groups one after the other.
KDA_HOST_DEVICE inline double backward_us(const BackwardModel& m, const CostSizes& in,
                                          const BackwardCut& how) {
  const int64_t of_each = in.num_value_heads / in.num_heads;
  const auto sms = static_cast<double>(in.num_sms);
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  double us = intra_us(in, m.costs) + total_tokens(in) * static_cast<double>(in.num_value_heads) /
                                          sms * size * m.gradients_ns * 1e-3;
  CostSizes group = in;
  double chains = 0;
  for (int64_t first = 0; first < in.num_heads; first += m.groups.heads) {
    const int64_t heads = plan::smaller(m.groups.heads, in.num_heads - first) * of_each;
    if (first == 0 || heads != group.num_value_heads) {  // else as in the group before
      group.num_value_heads = heads;
      chains = chains_of_backward_us(m, group, how);
    }
    us += chains + m.backward.group_us;
  }
  return plan::larger(memory_us(in, m.least_bytes, in.bytes_per_second), us);
}

/// The chain from right to left alone, uncut.
KDA_HOST_DEVICE inline double reverse_us(const BackwardModel& m, const CostSizes& in) {
  const BackwardCosts& c = m.backward;
  return plan::larger(
      chain_memory_us(in, c.reverse_bytes),
      chains_us(in, c.reverse, static_cast<double>(in.sums.sequences),
                static_cast<double>(longest_of(in)), total_tokens(in), tiles_of(in.value_dim)));
}

/// Uncut. In two phases the chain from right to left runs twice.
KDA_HOST_DEVICE inline double whole_us(const BackwardModel& m, const CostSizes& in) {
  return backward_us(m, in, {}) + (m.phases ? reverse_us(m, in) : 0);
}

/// A candidate of the search. Infinite where it has more segments than a cut may have.
KDA_HOST_DEVICE inline double candidate_us(const BackwardModel& m, const CostSizes& in,
                                           const BackwardCut& how) {
  return how.cut.behind > m.most_behind ? HUGE_VAL : backward_us(m, in, how);
}

}  // namespace kda::cuda::staged
