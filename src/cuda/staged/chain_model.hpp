// SPDX-License-Identifier: Apache-2.0
// Predicted times of chunk_intra and of chains of chunks, as functions that the host and kernels
// share (cuda/common/cost_sizes.hpp). Their constants are in cost.hpp.
#pragma once

#include "cuda/common/cost_sizes.hpp"

namespace kda::cuda::staged {

/// A chain kernel: a block walks the chunks of one sequence or segment for 64 columns of a state.
struct ChainCosts {
  double few_ns;          ///< a token, while half of the SMs are idle
  double alone_ns;        ///< a token, in a block with an SM for itself
  double shared_ns;       ///< of SM time; blocks beside each other take turns
  int64_t blocks_per_sm;  ///< at once
  double fixed_us;        ///< launch, first loads, states in and out, of each round of blocks
};

struct Costs {
  double intra_work_ns;  ///< chunk_intra: SM time of a token and value head
  double intra_fixed_us;
  double intra_bytes_per_token;  ///< of q, k, v, g and factors, a value head
  ChainCosts forward, scan;
  MergeCosts merge;
  double factor_bytes_per_token;  ///< that the forward reads and writes, a value head
  double factor_bandwidth;        ///< of the card's, that it reaches
  double minimum_step;            ///< of the time with fewer segments, for more of them
};

/// Time of chunk_intra. At K = V = 64 it was measured to be six tenths of that at K = V = 128.
KDA_HOST_DEVICE inline double intra_us(const CostSizes& in, const Costs& c) {
  const double size = 0.2 + 0.8 * static_cast<double>(in.key_dim + in.value_dim) / 256;
  const double work = total_tokens(in) * static_cast<double>(in.num_value_heads) /
                      static_cast<double>(in.num_sms) * c.intra_work_ns * size * 1e-3;
  return plan::larger(work, memory_us(in, c.intra_bytes_per_token, in.bytes_per_second)) +
         c.intra_fixed_us;
}

/// Chains of `blocks` blocks: time of a token and of a round of them.
struct ChainTimes {
  const ChainCosts& c;
  double blocks, sms, us_per_ns, mean;

  KDA_HOST_DEVICE double token_ns(double of_blocks) const {
    return 2 * blocks <= sms ? c.few_ns
                             : plan::larger(c.alone_ns, c.shared_ns * rounds_of(of_blocks, sms));
  }
  KDA_HOST_DEVICE double round_us(double of_blocks) const {
    return of_blocks > 0 ? mean * token_ns(of_blocks) * us_per_ns + c.fixed_us : 0;
  }
};

/// `chains` chains of `total` tokens a value head, `tiles` blocks each: the longest chain, or all
/// of them in rounds of as many as fit, whichever is more.
KDA_HOST_DEVICE inline double chains_us(const CostSizes& in, const ChainCosts& c, double chains,
                                        double longest, double total, int64_t tiles) {
  if (chains == 0) return 0;
  const auto sms = static_cast<double>(in.num_sms);
  const double at_once = sms * static_cast<double>(c.blocks_per_sm);
  // Most of a chunk is latency: five sixths of the time at K = 64.
  const double size = (2 + static_cast<double>(in.key_dim) / 128) / 3;
  const ChainTimes times{.c = c,
                         .blocks = chains * static_cast<double>(in.num_value_heads * tiles),
                         .sms = sms,
                         .us_per_ns = size * 1e-3,
                         .mean = total / chains};
  const double full = floor(times.blocks / at_once);
  const double all = full * times.round_us(at_once) + times.round_us(times.blocks - full * at_once);
  // Blocks beside the longest one slow it down while they last.
  const double beside = plan::smaller(times.mean, longest);
  const double one = (beside * times.token_ns(plan::smaller(times.blocks, at_once)) +
                      (longest - beside) * times.token_ns(1)) *
                         times.us_per_ns +
                     c.fixed_us;
  return plan::larger(one, all);
}

}  // namespace kda::cuda::staged
