// SPDX-License-Identifier: Apache-2.0
// Parts that the predictions of the CUDA backends share: the work, its roofline, cuts, the merge of
// segments. The constants of a backend are in its cost.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "plan/partition.hpp"

namespace kda::cuda {

using plan::kMinimumGain;
/// The clock that times and cycles of an H200 are taken with.
inline constexpr double kH200Gigahertz = 1.75;
/// Facts without a clock are those of an H200.
inline double gigahertz_of(const DeviceFacts& device) {
  return device.gigahertz > 0 ? device.gigahertz : kH200Gigahertz;
}

/// q, k, v, o, g in bf16 and beta, of a token and value head at K = V = 128.
inline constexpr double kBytesPerToken = 1282;

/// Stage segment_merge: S' = M S + B, step by step, a block `columns` columns of V.
struct MergeCosts {
  double step_us;  ///< of each round of blocks
  int64_t columns;
  int64_t blocks_per_sm;
  double fixed_us;  ///< with the launches that segments add
};

struct CostInput {
  plan::LengthSums<int64_t> sums;
  int64_t num_heads, num_value_heads;
  int64_t key_dim, value_dim;
  int64_t num_sms;
  double bytes_per_second;
  std::span<const int64_t> lengths;  ///< tokens of each sequence; the workload's
};

inline CostInput cost_input(const plan::Workload& work, const DeviceFacts& device) {
  CostInput in{.sums = {},
               .num_heads = work.num_heads,
               .num_value_heads = work.num_value_heads,
               .key_dim = work.key_dim,
               .value_dim = work.value_dim,
               .num_sms = work.num_sms,
               .bytes_per_second = device.memory_bytes_per_second,
               .lengths = work.lengths};
  for (const int64_t length : work.lengths) in.sums.add(length);
  return in;
}
CostInput cost_input(plan::Workload&& work,
                     const DeviceFacts& device) = delete;  // its lengths stay

inline int64_t tiles_of(int64_t columns) { return (columns + 63) / 64; }
inline double rounds_of(double blocks, double at_once) { return ceil(blocks / at_once); }
inline double total_tokens(const CostInput& in) { return static_cast<double>(in.sums.tokens); }
inline int64_t longest_of(const CostInput& in) { return in.sums.longest; }

inline double roofline_us(const CostInput& in) {
  const double rows = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) * kBytesPerToken * rows /
         in.bytes_per_second * 1e6;
}

using Cut = plan::Cut<int64_t>;
/// Segments of at most `segment_tokens` behind first ones of `first_tokens`.
inline Cut cut_of(const CostInput& in, int64_t first_tokens, int64_t segment_tokens) {
  Cut cut;
  for (const int64_t length : in.lengths) cut.add(length, first_tokens, segment_tokens);
  return cut;
}

inline double merge_us(const CostInput& in, const MergeCosts& c, int64_t steps) {
  const double blocks = static_cast<double>(in.num_value_heads) *
                        ceil(static_cast<double>(in.value_dim) / static_cast<double>(c.columns));
  const double size = static_cast<double>(in.key_dim * in.key_dim) / (128.0 * 128.0);
  return static_cast<double>(steps) * c.step_us * size *
             rounds_of(blocks, static_cast<double>(in.num_sms * c.blocks_per_sm)) +
         c.fixed_us;
}

}  // namespace kda::cuda
