// SPDX-License-Identifier: Apache-2.0
// Predicted times of the forward of cuda.sm90.gdn as functions of numbers, for the planner
// (cost.hpp has the constants) and for the kernel that cuts where only the GPU knows the lengths
// (device_cut.cu): chunk_intra, then one chain of chunks a state tile. Scan and merge are predicted
// as those of the staged backend.
#pragma once

#include "cuda/staged/chain_model.hpp"

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
};

/// All that times depend on but lengths. Made on the host.
struct CutModel {
  CostSizes sizes;  ///< without sums
  Costs costs;
  double least_bytes;   ///< a token and value head
  int64_t most_behind;  ///< segments behind first ones that a cut may have
  bool may_forget;      ///< heads that forget need B alone, of their last tokens
};

/// Sums of lengths, and tokens with those that fill up the last chunk of each sequence.
struct PaddedSizes : CostSizes {
  double padded_tokens;
};

/// How sequences are cut; 0 tokens: not at all.
struct EvenCut {
  int64_t segment_tokens = 0;
  Cut cut = {};  ///< into segments of at most so many
};

KDA_HOST_DEVICE inline double least_us(const CutModel& m, const CostSizes& in) {
  return memory_us(in, m.least_bytes, in.bytes_per_second);
}

KDA_HOST_DEVICE inline double intra_us(const CutModel& m, const PaddedSizes& in) {
  const double heads_ns = static_cast<double>(in.num_heads) * m.costs.intra_ns +
                          static_cast<double>(in.num_value_heads) * m.costs.intra_value_ns;
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return in.padded_tokens / static_cast<double>(in.num_sms) * heads_ns * 1e-3 * (0.2 + 0.8 * size) +
         m.costs.fixed_us;
}

/// `chains` chains of a value head, all of one width: the longest, rounds of blocks, or memory.
KDA_HOST_DEVICE inline double forward_us(const CutModel& m, const PaddedSizes& in, int64_t chains,
                                         int64_t longest) {
  if (chains == 0) return 0;
  const Costs& c = m.costs;
  const int64_t narrow = chains * in.num_value_heads * tiles_of(in.value_dim);
  const bool wide = in.value_dim % 128 == 0 && narrow > in.num_sms;
  const double narrow_ns = 2 * narrow <= in.num_sms ? c.few_ns : c.narrow_ns;
  // Most of a chunk is latency: five sixths of the time at K = 64.
  const double token_us =
      (wide ? c.wide_ns : narrow_ns) * 1e-3 * (2 + static_cast<double>(in.key_dim) / 128) / 3;
  const double rounds =
      rounds_of(static_cast<double>(narrow) / (wide ? 2 : 1), static_cast<double>(in.num_sms));
  const double tokens = rounds * in.padded_tokens / static_cast<double>(chains);
  const double memory = memory_us(in, c.bytes_per_token, c.bandwidth * in.bytes_per_second);
  const double steps =
      plan::larger(tokens, static_cast<double>(longest)) * token_us + rounds * c.round_us;
  return plan::larger(memory, steps) + c.fixed_us;
}

/// Uncut.
KDA_HOST_DEVICE inline double whole_us(const CutModel& m, const PaddedSizes& in) {
  return plan::larger(least_us(m, in),
                      intra_us(m, in) + forward_us(m, in, in.sums.with_tokens, longest_of(in)));
}

/// Scan, merge, forward. `scanned`: tokens that a scan goes through, as a rule; a few go through
/// their whole segment. `tiles`: blocks of a scan.
KDA_HOST_DEVICE inline double segmented_us(const CutModel& m, const PaddedSizes& in,
                                           const EvenCut& how, int64_t scanned, int64_t tiles) {
  const Cut& cut = how.cut;
  const double all = plan::smaller(static_cast<double>(cut.tokens_behind),
                                   static_cast<double>(cut.behind) * static_cast<double>(scanned));
  const double scan = staged::chains_us(in, m.costs.scan, static_cast<double>(cut.behind),
                                        static_cast<double>(how.segment_tokens), all, tiles);
  return plan::larger(least_us(m, in), intra_us(m, in) + scan +
                                           merge_us(in, m.costs.merge, cut.most - 1) +
                                           forward_us(m, in, cut.segments, how.segment_tokens));
}

/// The time where no head forgets.
KDA_HOST_DEVICE inline double unforgetting_us(const CutModel& m, const PaddedSizes& in,
                                              const EvenCut& how) {
  return segmented_us(m, in, how, how.segment_tokens,
                      tiles_of(in.value_dim) + tiles_of(in.key_dim));
}

/// A candidate of the search: the time where most heads forget, unless the time where none does
/// would lose more than most_loss. Infinite where it has more segments than a cut may have.
KDA_HOST_DEVICE inline double candidate_us(const CutModel& m, const PaddedSizes& in,
                                           const EvenCut& how) {
  if (how.cut.behind > m.most_behind) return HUGE_VAL;
  const double whole = whole_us(m, in);
  if (how.segment_tokens == 0) return whole;
  const double exact = unforgetting_us(m, in, how);
  if (!m.may_forget || exact > m.costs.most_loss * whole) return exact;
  return segmented_us(m, in, how, plan::smaller(how.segment_tokens, m.costs.memory_tokens),
                      tiles_of(in.value_dim));
}

}  // namespace kda::cuda::gdn
