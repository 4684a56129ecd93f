// SPDX-License-Identifier: Apache-2.0
// Predicted times of the backward of cuda.sm90.gdn as functions of numbers, as gdn/cut_model.hpp
// has those of the forward: factors of chunks, both chains in one launch, gradients of chunks; of
// segments a scan and a merge of both directions before the chains.
#pragma once

#include "cuda/gdn/cut_model.hpp"

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

/// All that times depend on but lengths. Made on the host.
struct BackwardModel {
  CostSizes sizes;  ///< without sums
  BackwardCosts costs;
  double least_bytes;     ///< a token and value head
  double most_loss;       ///< as in Costs
  int64_t memory_tokens;  ///< likewise
  HeadGroups groups;      ///< one after the other
  int64_t most_behind;    ///< segments behind first ones that a cut may have
};

KDA_HOST_DEVICE inline double least_us(const BackwardModel& m, const CostSizes& in) {
  return memory_us(in, m.least_bytes, in.bytes_per_second);
}

/// Blocks of one launch, an SM each: from right to left, from left to right, and transitions.
struct ChainBlocks {
  double reverse, errors, transitions;
};

/// Chains of `mean` tokens, the longest of `longest`: rounds of blocks, or the longest chain.
/// Kernels have 128 channels whatever K is.
KDA_HOST_DEVICE inline double chains_us(const BackwardModel& m, const PaddedSizes& in,
                                        const ChainBlocks& blocks, double mean, double longest) {
  const BackwardCosts& c = m.costs;
  const double errors = blocks.errors + blocks.transitions, all = blocks.reverse + errors;
  if (all == 0) return 0;
  const double rounds = rounds_of(all, static_cast<double>(in.num_sms));
  const double token_ns = (blocks.reverse * c.reverse_ns + errors * c.errors_ns) / all;
  const double steps_us = plan::larger(longest * c.reverse_ns, mean * rounds * token_ns) * 1e-3;
  return steps_us + rounds * c.round_us;
}

/// Both chains of `chains` sequences or segments a value head.
KDA_HOST_DEVICE inline double both_chains_us(const BackwardModel& m, const PaddedSizes& in,
                                             int64_t chains, int64_t longest) {
  if (chains == 0) return 0;
  const BackwardCosts& c = m.costs;
  const int64_t tiles = tiles_of(in.value_dim);
  const auto blocks = static_cast<double>(chains * in.num_value_heads * tiles);
  const double bytes = static_cast<double>(in.num_heads) * c.chain_bytes +
                       static_cast<double>(in.num_value_heads * tiles) / 2 * c.chain_value_bytes;
  const double rounds = rounds_of(2 * blocks, static_cast<double>(in.num_sms));
  const double memory =
      in.padded_tokens * bytes / (c.bandwidth * in.bytes_per_second) * 1e6 + rounds * c.round_us;
  return plan::larger(
      memory, chains_us(m, in, {blocks, blocks, 0}, in.padded_tokens / static_cast<double>(chains),
                        static_cast<double>(longest)));
}

/// Factors before the chains, gradients behind them, three launches.
KDA_HOST_DEVICE inline double around_chains_us(const BackwardModel& m, const PaddedSizes& in) {
  const BackwardCosts& c = m.costs;
  const auto H = static_cast<double>(in.num_heads), HV = static_cast<double>(in.num_value_heads);
  const double tiles = static_cast<double>(tiles_of(in.value_dim)) / 2;
  const double ns =
      H * (c.intra_ns + c.grad_ns) + HV * (c.intra_value_ns + c.grad_value_ns * tiles);
  return in.padded_tokens / static_cast<double>(in.num_sms) * ns * 1e-3 + 3 * c.fixed_us;
}

/// The sum over groups of heads of group_us(sizes with the heads of one), as if each were a problem
/// of its own.
template <class GroupUs>
KDA_HOST_DEVICE inline double over_groups(const BackwardModel& m, const PaddedSizes& in,
                                          const GroupUs& group_us) {
  const int64_t of_each = in.num_value_heads / in.num_heads;
  PaddedSizes group = in;
  double all = 0, one = 0;
  for (int64_t first = 0; first < in.num_heads; first += m.groups.heads) {
    const int64_t heads = plan::smaller(m.groups.heads, in.num_heads - first);
    if (first == 0 || heads != group.num_heads) {  // else as in the group before
      group.num_heads = heads, group.num_value_heads = heads * of_each;
      one = group_us(group);
    }
    all += one;
  }
  return all;
}

KDA_HOST_DEVICE inline double whole_backward_us(const BackwardModel& m, const PaddedSizes& in) {
  return plan::larger(least_us(m, in), over_groups(m, in, [&](const PaddedSizes& group) {
                        return around_chains_us(m, group) +
                               both_chains_us(m, group, group.sums.with_tokens, longest_of(group));
                      }));
}

/// A group in segments, of which a scan goes through `scanned` tokens at most. `exact`: with all
/// transitions.
KDA_HOST_DEVICE inline double segmented_group_us(const BackwardModel& m, const PaddedSizes& in,
                                                 const EvenCut& how, int64_t scanned, bool exact) {
  const Cut& cut = how.cut;
  const int64_t segment_tokens = how.segment_tokens;
  const auto heads = static_cast<double>(cut.behind * in.num_value_heads);
  const double V = heads * static_cast<double>(tiles_of(in.value_dim));
  const double K = exact ? heads * static_cast<double>(tiles_of(in.key_dim)) : 0;
  const auto tokens = static_cast<double>(plan::smaller(scanned, segment_tokens));
  CostSizes both = in;
  both.num_value_heads *= 2;
  return around_chains_us(m, in) + chains_us(m, in, {V, V, K}, tokens, tokens) + m.costs.fixed_us +
         merge_us(both, m.costs.merge, cut.most - 1) +
         both_chains_us(m, in, cut.segments, segment_tokens);
}

/// All groups in segments.
KDA_HOST_DEVICE inline double segmented_backward_us(const BackwardModel& m, const PaddedSizes& in,
                                                    const EvenCut& how, int64_t scanned,
                                                    bool exact) {
  return over_groups(m, in, [&](const PaddedSizes& group) {
    return segmented_group_us(m, group, how, scanned, exact);
  });
}

/// The time where no head forgets.
KDA_HOST_DEVICE inline double unforgetting_backward_us(const BackwardModel& m,
                                                       const PaddedSizes& in, const EvenCut& how) {
  return segmented_backward_us(m, in, how, how.segment_tokens, /*exact=*/true);
}

/// A candidate of the search, as that of the forward.
KDA_HOST_DEVICE inline double candidate_us(const BackwardModel& m, const PaddedSizes& in,
                                           const EvenCut& how) {
  if (how.cut.behind > m.most_behind) return HUGE_VAL;
  const double whole = whole_backward_us(m, in);
  if (how.segment_tokens == 0) return whole;
  const double exact = unforgetting_backward_us(m, in, how);
  if (exact > m.most_loss * whole) return exact;
  return segmented_backward_us(m, in, how, m.memory_tokens, /*exact=*/false);
}

}  // namespace kda::cuda::gdn
