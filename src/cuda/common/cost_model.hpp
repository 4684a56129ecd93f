// SPDX-License-Identifier: Apache-2.0
// Parts that the predictions of the CUDA backends share: the work, its roofline, cuts, the merge of
// segments. The constants of a backend are in its cost.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "plan/partition.hpp"

namespace kda::cuda {

/// Segments must win by this factor: a choice, about the error of the model.
inline constexpr double kMinimumGain = 1.12;
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
  std::vector<int64_t> lengths;  ///< tokens of each sequence
  int64_t num_value_heads;
  int64_t key_dim, value_dim;
  int64_t num_sms;
  double bytes_per_second;
};

inline CostInput cost_input(const plan::Workload& work, const DeviceFacts& device) {
  return {work.lengths,   work.num_value_heads, work.key_dim,
          work.value_dim, work.num_sms,         device.memory_bytes_per_second};
}

inline int64_t tiles_of(int64_t columns) { return (columns + 63) / 64; }
inline double rounds_of(double blocks, double at_once) { return std::ceil(blocks / at_once); }

inline double total_tokens(const CostInput& in) {
  double total = 0;
  for (const int64_t length : in.lengths) total += static_cast<double>(length);
  return total;
}
inline int64_t longest_of(const CostInput& in) {
  return *std::max_element(in.lengths.begin(), in.lengths.end());
}

inline double roofline_us(const CostInput& in) {
  const double rows = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) * kBytesPerToken * rows /
         in.bytes_per_second * 1e6;
}

/// Segments of at most `segment_tokens` behind first ones of `first_tokens`.
struct Cut {
  double segments = 0, behind = 0, tokens_behind = 0;  ///< behind the first one of their sequence
  int64_t most = 1;                                    ///< of a sequence
};
inline Cut cut_of(const CostInput& in, int64_t first_tokens, int64_t segment_tokens) {
  Cut cut;
  for (const int64_t length : in.lengths) {
    const int64_t tokens_behind = std::max<int64_t>(0, length - first_tokens);
    const int64_t behind = (tokens_behind + segment_tokens - 1) / segment_tokens;
    cut.most = std::max(cut.most, behind + 1);
    cut.segments += static_cast<double>(behind + (length > 0));
    cut.behind += static_cast<double>(behind);
    cut.tokens_behind += static_cast<double>(tokens_behind);
  }
  return cut;
}

inline double merge_us(const CostInput& in, const MergeCosts& c, int64_t steps) {
  const double blocks =
      static_cast<double>(in.num_value_heads) *
      std::ceil(static_cast<double>(in.value_dim) / static_cast<double>(c.columns));
  const double size = static_cast<double>(in.key_dim * in.key_dim) / (128.0 * 128.0);
  return static_cast<double>(steps) * c.step_us * size *
             rounds_of(blocks, static_cast<double>(in.num_sms * c.blocks_per_sm)) +
         c.fixed_us;
}

}  // namespace kda::cuda
