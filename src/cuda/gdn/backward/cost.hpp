// SPDX-License-Identifier: Apache-2.0
// Predicted times of the backward of cuda.sm90.gdn (cut_model.hpp), and the cut with the least. All
// constants are in kBackwardCosts.
//
// Where they are from: fitted to times of whole calls on an H200 at K = V = 128, bf16, uncut;
// tests/plan/cost_test.cpp has the times. There chains take as long as their bytes. errors_ns,
// reverse_ns and merge are predictions; of segments docs/design/gdn_backward.md has times beside
// them.
#pragma once

#include "cuda/gdn/backward/cut_model.hpp"
#include "cuda/gdn/cost.hpp"
#include "cuda/recurrent/backward/cost.hpp"

namespace kda::cuda::gdn {

inline constexpr BackwardCosts kBackwardCosts = {
    .intra_ns = 35,
    .intra_value_ns = 18,
    .grad_ns = 17,
    .grad_value_ns = 118,
    .errors_ns = 18.5,
    .reverse_ns = 22.5,
    .round_us = 5,
    .chain_bytes = 768,
    .chain_value_bytes = 3104,
    .bandwidth = 0.99,
    .fixed_us = 5,
    .merge = {.step_us = 1.9, .columns = 8, .blocks_per_sm = 1, .fixed_us = 8},
    .minimum_step = 0.98};

inline BackwardModel backward_model(const CostSizes& sizes, const HeadGroups& groups) {
  const int64_t of_each = sizes.num_value_heads / sizes.num_heads;
  return {.sizes = sizes,
          .costs = kBackwardCosts,
          .least_bytes = cuda::backward::kLeastBytes,
          .most_loss = kCosts.most_loss,
          .memory_tokens = kCosts.memory_tokens,
          .groups = groups,
          .most_behind = kMostBehindAnSm * sizes.num_sms / (groups.heads * of_each)};
}
/// The model where lengths are not known.
inline BackwardModel backward_model_from_bounds(const Problem& p, const DeviceFacts& device,
                                                const HeadGroups& groups) {
  return backward_model(cost_sizes(p, device), groups);
}

inline double whole_backward_us(const CostInput& in, const HeadGroups& groups) {
  return whole_backward_us(backward_model(in, groups), padded(in));
}

/// SegmentPolicy::kAuto, as auto_partition() of the forward has it.
inline plan::Partition auto_backward_partition(const plan::Workload& work,
                                               const DeviceFacts& device, const HeadGroups& groups,
                                               CostEstimate* cost) {
  const CostInput in = cost_input(work, device);
  return cheapest_cut(work, in, backward_model(in, groups), cost);
}

/// Another backend has to beat it: the time of that cut where no head forgets, or without one.
inline double backward_to_beat_us(const plan::Workload& work, const DeviceFacts& device,
                                  const HeadGroups& groups) {
  CostEstimate cost;
  const plan::Partition partition = auto_backward_partition(work, device, groups, &cost);
  if (!partition.on) return cost.serial_us;
  const CostInput in = cost_input(work, device);
  return unforgetting_backward_us(backward_model(in, groups), padded(in),
                                  even_cut(in, partition.segment_chunks * plan::kAutoChunk));
}

}  // namespace kda::cuda::gdn
