// SPDX-License-Identifier: Apache-2.0
// Parts of predicted times that the host and kernels share: sizes of the work, and the merge of
// segments. Files that call them are compiled without contraction of products and sums, so that a
// cut that a kernel makes is the planner's, bit for bit (plan/cut_search.hpp).
#pragma once

#include <cmath>
#include <cstdint>

#include "plan/cut_search.hpp"

namespace kda::cuda {

/// A problem and a card, as far as times depend on them.
struct CostSizes {
  plan::LengthSums<int64_t> sums;
  int64_t num_heads, num_value_heads;
  int64_t key_dim, value_dim;
  int64_t num_sms;
  double bytes_per_second;
};

using Cut = plan::Cut<int64_t>;

/// q/k heads, with their value heads, in groups of `heads`; the last group may have fewer.
struct HeadGroups {
  int64_t heads = 1;
  int64_t count = 1;
};

/// Stage segment_merge: S' = M S + B, step by step, a block `columns` columns of V.
struct MergeCosts {
  double step_us;  ///< of each round of blocks
  int64_t columns;
  int64_t blocks_per_sm;
  double fixed_us;  ///< with the launches that segments add
};

KDA_HOST_DEVICE inline int64_t tiles_of(int64_t columns) { return (columns + 63) / 64; }
KDA_HOST_DEVICE inline double rounds_of(double blocks, double at_once) {
  return ceil(blocks / at_once);
}
KDA_HOST_DEVICE inline double total_tokens(const CostSizes& in) {
  return static_cast<double>(in.sums.tokens);
}
KDA_HOST_DEVICE inline int64_t longest_of(const CostSizes& in) { return in.sums.longest; }
/// Time that memory needs for `bytes` a token and value head at K = V = 128.
KDA_HOST_DEVICE inline double memory_us(const CostSizes& in, double bytes,
                                        double bytes_per_second) {
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) * bytes * size /
         bytes_per_second * 1e6;
}

KDA_HOST_DEVICE inline double merge_us(const CostSizes& in, const MergeCosts& c, int64_t steps) {
  const double blocks = static_cast<double>(in.num_value_heads) *
                        ceil(static_cast<double>(in.value_dim) / static_cast<double>(c.columns));
  const double size = static_cast<double>(in.key_dim * in.key_dim) / (128.0 * 128.0);
  return static_cast<double>(steps) * c.step_us * size *
             rounds_of(blocks, static_cast<double>(in.num_sms * c.blocks_per_sm)) +
         c.fixed_us;
}

}  // namespace kda::cuda
