// SPDX-License-Identifier: Apache-2.0
// Predicted times of cuda.sm80.fused: a block goes through the tokens of its share of chains, 64
// columns of V of a value head each.
//
// Where the constants are from: cycles are fitted to times of an H200 that ran the code of compute
// capability 8.0, taken as 1.75 GHz, with four and with two groups (docs/log/2026-11.md). No other
// card has run it: cycles are the same there but for tensor cores, whose rates vendors publish.
// `bench/refit.py --backend cuda.sm80.fused` fits kRows to times of a card.
#pragma once

#include <algorithm>

#include "cuda/common/common.hpp"
#include "cuda/common/cost_model.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/fused/kernels.hpp"
#include "cuda/staged/cost.hpp"

namespace kda::cuda::fused::portable {

inline int64_t chains_of(const Problem& p) {
  return p.num_sequences * p.num_value_heads * tiles_of(p.value_dim);
}
/// Blocks of a launch: at most one a chain.
inline int64_t blocks_of(const Problem& p, const DeviceFacts& device) {
  return std::min<int64_t>(chains_of(p), std::max(device.num_sms, 1));
}

/// Kernels of a size whose steps take different time. Rates and gates in bf16 are meant, but for
/// fp16.
enum class Kind : int32_t { kFp16Operands, kBf16Operands, kSoftplus, kFp16Rows };

inline Kind kind_of(const Problem& p) {
  if (p.q.dtype == DType::kFloat16) return Kind::kFp16Rows;
  if (p.gate_mode == GateMode::kSoftplus) return Kind::kSoftplus;
  return has_fp16_operands(p) ? Kind::kFp16Operands : Kind::kBf16Operands;
}

/// Costs of one size of the kernel in one form. `large`: a block has room for four producer
/// groups, at K = V = 64 for seven; else for half of them.
struct Costs {
  int64_t key_dim;
  bool large;
  double step_cycles;   ///< a sub-chunk of 16 tokens
  double chain_cycles;  ///< a chain besides
  double fixed_us;      ///< launch, first loads, last stores
  /// Steps of the other kinds, of that one.
  double bf16_operands, softplus, fp16_rows;
  /// mma.sync of a step, a quarter of an SM; with operands in bf16.
  double products, bf16_products;
};

/// A fit to one sequence and many, but where a block is not `large`: few chains were timed there,
/// and no kinds of K = V = 64. These are taken to cost half as much more again as in the large
/// form, which those of K = V = 128 do.
inline constexpr Costs kRows[] = {{.key_dim = 64,
                                   .large = false,
                                   .step_cycles = 1355,
                                   .chain_cycles = 2710,
                                   .fixed_us = 12,
                                   .bf16_operands = 1.07,
                                   .softplus = 1.15,
                                   .fp16_rows = 1.08,
                                   .products = 36.5,
                                   .bf16_products = 44.5},
                                  {.key_dim = 64,
                                   .large = true,
                                   .step_cycles = 960,
                                   .chain_cycles = 4420,
                                   .fixed_us = 12,
                                   .bf16_operands = 1.07,
                                   .softplus = 1.1,
                                   .fp16_rows = 1.05,
                                   .products = 36.5,
                                   .bf16_products = 44.5},
                                  {.key_dim = 128,
                                   .large = false,
                                   .step_cycles = 2440,
                                   .chain_cycles = 4880,
                                   .fixed_us = 12,
                                   .bf16_operands = 0.93,
                                   .softplus = 1.37,
                                   .fp16_rows = 1.23,
                                   .products = 69,
                                   .bf16_products = 85},
                                  {.key_dim = 128,
                                   .large = true,
                                   .step_cycles = 1755,
                                   .chain_cycles = 4350,
                                   .fixed_us = 12,
                                   .bf16_operands = 0.91,
                                   .softplus = 1.25,
                                   .fp16_rows = 1.14,
                                   .products = 69,
                                   .bf16_products = 85}};

/// The share of the copy rate that it is taken to reach, as the staged backend's chains do. Memory
/// bound no time that was measured.
inline constexpr double kBandwidth = 0.93;
/// Steps take so much more than their products alone, where these decide.
inline constexpr double kProductsMargin = 1.15;
/// A card without a measurement of its own takes this kernel where it is so much faster: a choice,
/// about what the cycles of another card may differ by.
inline constexpr double kUnmeasuredMargin = 1.15;

inline const Costs& costs_of(int64_t key_dim, bool large) {
  for (const Costs& row : kRows)
    if (row.large == large && row.key_dim == (key_dim <= 64 ? 64 : 128)) return row;
  return kRows[0];
}

/// Cycles of a product m16n8k16 on a quarter of an SM, with sums in fp32. GeForce cards have half
/// the rate of others of 8.6, 8.9 and 12.x, and nothing tells them from these: so all count as they
/// do. 11.0 is taken as 8.6's professional cards.
inline double product_cycles(int32_t compute_capability) {
  struct Rate {
    int32_t from;  // this compute capability on
    double cycles;
  };
  constexpr Rate kRates[] = {{80, 8}, {86, 32}, {87, 16}, {89, 32}, {90, 8}, {110, 16}, {120, 32}};
  double cycles = kRates[0].cycles;
  for (const Rate& rate : kRates)
    if (compute_capability >= rate.from) cycles = rate.cycles;
  return cycles;
}

/// Whether a card of such a capability has timed this kernel.
inline bool is_measured(const DeviceFacts& device) { return device.compute_capability / 10 == 9; }

inline double step_cycles(const Costs& c, Kind kind, const DeviceFacts& device) {
  const bool bf16 = kind == Kind::kBf16Operands;
  const double factor = bf16                      ? c.bf16_operands
                        : kind == Kind::kSoftplus ? c.softplus
                        : kind == Kind::kFp16Rows ? c.fp16_rows
                                                  : 1;
  const double products = (bf16 ? c.bf16_products : c.products) *
                          product_cycles(device.compute_capability) * kProductsMargin;
  return std::max(c.step_cycles * factor, products);
}

/// Every block has its share of all tokens and chains, none less than the longest chain.
inline double forward_us(const CostInput& in, Kind kind, const DeviceFacts& device) {
  const bool large = block_shared_bytes(device.compute_capability) >= int64_t{163} * 1024;
  const Costs& c = costs_of(in.key_dim, large);
  const double step = step_cycles(c, kind, device), cycle_us = 1e-3 / gigahertz_of(device);
  const auto chains_us = [&](double tokens, double chains) {
    return (tokens / sm90::kSubchunk * step + chains * c.chain_cycles) * cycle_us;
  };
  const auto heads = static_cast<double>(in.num_value_heads * tiles_of(in.value_dim));
  const double shares = heads / static_cast<double>(in.num_sms);
  const double alone = chains_us(static_cast<double>(longest_of(in)), 1);
  const double shared =
      shares * chains_us(total_tokens(in), static_cast<double>(in.sums.sequences));
  return std::max(roofline_us(in) / kBandwidth, std::max(alone, shared) + c.fixed_us);
}

/// Roofline, uncut in stages and in this kernel.
inline CostEstimate predict(const plan::Workload& work, Kind kind, const DeviceFacts& device) {
  const CostInput in = cost_input(work, device);
  if (total_tokens(in) == 0) return {};
  return {.roofline_us = roofline_us(in),
          .serial_us = staged::serial_us(in, staged::costs_of(device)),
          .fused_us = forward_us(in, kind, device)};
}

}  // namespace kda::cuda::fused::portable
