// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm80.fused: a block goes through the tokens of its share of chains, 64
// columns of V of a value head each.
//
// Where the constants are from: cycles are fitted to times of an H200 that ran the code of compute
// capability 8.0, taken as 1.75 GHz, with four and with two groups (docs/log/2026-11.md). Clocks
// are those that vendors publish: no other card has measured them.
#pragma once

#include <algorithm>

#include "cuda/common/common.hpp"
#include "cuda/common/cost_model.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::fused::portable {

inline int64_t chains_of(const Problem& p) {
  return p.num_sequences * p.num_value_heads * tiles_of(p.value_dim);
}
/// Blocks of a launch: at most one a chain.
inline int64_t blocks_of(const Problem& p, const DeviceFacts& device) {
  return std::min<int64_t>(chains_of(p), std::max(device.num_sms, 1));
}

/// The clock of a card under load.
inline double gigahertz_of(int32_t compute_capability) {
  switch (compute_capability) {
    case 80: return 1.41;
    case 86: return 1.7;
    case 87: return 1.3;
    case 90: return 1.75;
    case 100:
    case 103: return 1.85;
    default: return 2.4;
  }
}

struct Costs {
  double step_cycles;   ///< a sub-chunk of 16 tokens
  double chain_cycles;  ///< a chain besides
  double fixed_us;      ///< launch, first loads, last stores
  double bandwidth;     ///< of the card's, that the kernel reaches
};
/// large: a block has room for four producer groups, at K = 64 for eight; else for half of them.
inline Costs costs_of(int64_t key_dim, bool large) {
  const double step = key_dim <= 64 ? (large ? 950 : 1355) : (large ? 1780 : 2440);
  return {.step_cycles = step, .chain_cycles = 2 * step, .fixed_us = 9, .bandwidth = 0.88};
}

/// Every block has its share of all tokens and chains, none less than the longest chain.
inline double forward_us(const CostInput& in, int32_t compute_capability) {
  const bool large = block_shared_bytes(compute_capability) >= int64_t{163} * 1024;
  const Costs c = costs_of(in.key_dim, large);
  const double cycle_us = 1e-3 / gigahertz_of(compute_capability);
  const auto chains_us = [&](double tokens, double chains) {
    return (tokens / sm90::kSubchunk * c.step_cycles + chains * c.chain_cycles) * cycle_us;
  };
  const auto heads = static_cast<double>(in.num_value_heads * tiles_of(in.value_dim));
  const double shares = heads / static_cast<double>(in.num_sms);
  const double alone = chains_us(static_cast<double>(longest_of(in)), 1);
  const double shared =
      shares * chains_us(total_tokens(in), static_cast<double>(in.sums.sequences));
  return std::max(roofline_us(in) / c.bandwidth, std::max(alone, shared) + c.fixed_us);
}

/// Roofline, uncut in stages and in this kernel.
inline CostEstimate predict(const plan::Workload& work, const DeviceFacts& device) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return {};
  return {.roofline_us = roofline_us(in),
          .serial_us = staged::serial_us(in, staged::costs_of(device)),
          .fused_us = forward_us(in, device.compute_capability)};
}

}  // namespace kda::cuda::fused::portable
