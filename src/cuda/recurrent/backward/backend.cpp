// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.smxx.recurrent: how it plans; it serves everything. Its launches:
// cuda/recurrent/backward/launches.cpp.
#include <algorithm>

#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/recurrent/backward/cost.hpp"
#include "cuda/recurrent/backward/launches.hpp"
#include "cuda/recurrent/backward/sizes.hpp"
#include "cuda/rows.hpp"

namespace kda::cuda::recurrent {
namespace {

/// It makes states and errors itself, in fp32, whatever a forward has kept.
std::string decline_keep(const Problem&) { return {}; }

void plan_backward(plan::PlanBuilder& builder) {
  builder.set_keep(KeepPolicy::kNothing);
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const BackwardSizes sizes = backward_sizes(plan);
  const BackwardTile tile = backward_tile(p.key_dim);
  const int64_t HV = p.num_value_heads, chains = p.num_sequences * HV * sizes.tiles;
  if (sizes.windows > 1) {
    builder.stage("backward_starts", chains, "states at the starts of windows, left to right");
    builder.reason(cat("windows: ", sizes.windows, " of ", sizes.window,
                       " tokens, from right to left: the workspace holds the states of one"));
  } else {
    builder.reason("windows: one, the workspace holds the states of all tokens");
  }
  builder.stage("backward_states", chains, "of each window: the state every 16 tokens, errors");
  builder.stage("backward_reverse", chains, "of each window: dS, dv, dbeta, right to left");
  builder.stage("backward_chunk_grad",
                (p.batch * p.num_tokens + kBackwardTokens - 1) / kBackwardTokens * HV,
                "of all windows: dq, dk, dg of 16 tokens and a value head");
  builder.stage("backward_gradients", sizes.pieces * p.num_heads,
                "of all windows: sums over value heads; norms, gates, steps");
  const Gradients* wanted = builder.gradients();
  if (has_parameters(p) && (!wanted || wanted->dA_log || wanted->ddt_bias))
    builder.stage("backward_parameters", HV, "sums for A_log and dt_bias, in order");
  plan_expand_bias(builder, plan.stages.front().name.c_str());
  for (const StagePlan& stage : plan.stages) builder.kernel(stage.name.c_str(), stage.name.c_str());
  list_sum_bias(builder, "backward_parameters");
  const auto book = [&](const char* name, int64_t floats) {
    builder.book(name, static_cast<std::size_t>(floats), sizeof(float));
  };
  book(block::kBackwardStates, sizes.states(HV));
  book(block::kBackwardDStates, sizes.d_states(HV));
  book(block::kBackwardStarts, sizes.starts(HV));
  book(block::kBackwardCarry, sizes.carry(HV));
  const int64_t values = sizes.tokens() * HV * sizes.tiles * tile.columns;
  book(block::kBackwardErrors, values);
  book(block::kBackwardDz, values);
  book(block::kBackwardRows, sizes.tokens() * HV * backward_row(tile.rows));
  if (has_parameters(p))
    builder.book(block::kParameterSums,
                 static_cast<std::size_t>(std::max<int64_t>(sizes.pieces, 1) * HV),
                 static_cast<std::size_t>(p.key_dim + 1) * sizeof(double));
  book_maps(builder);
  if (!plan.lengths_known || p.num_sequences == 0) return;
  const plan::Workload work = builder.workload();
  const CostInput in = cost_input(work, plan.device);
  builder.predict({.roofline_us = kda::cuda::backward::least_us(in),
                   .serial_us = kda::cuda::backward::serial_us(in, sizes)});
}

}  // namespace

const registry::BackwardRow kBackward = {.head = {.name = "cuda.smxx.recurrent",
                                                  .device = DeviceKind::kCuda,
                                                  .chunk_size = kBackwardTokens,
                                                  .unavailable = unavailable,
                                                  .plan = plan_backward,
                                                  .min_compute_capability = 80,
                                                  .device_checks = &kDeviceChecks,
                                                  .decline_keep = decline_keep},
                                         .backward = if_built<backward>()};

}  // namespace kda::cuda::recurrent
