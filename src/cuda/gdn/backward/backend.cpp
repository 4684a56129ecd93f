// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm90.gdn: what it serves and how it plans. Its launches:
// cuda/gdn/backward/launches.cpp.
#include <algorithm>
#include <cmath>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/gdn/backward/backend.hpp"
#include "cuda/gdn/backward/cost.hpp"
#include "cuda/gdn/backward/launches.hpp"
#include "cuda/gdn/backward/sizes.hpp"
#include "cuda/gdn/device_cut_plan.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/rows.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/staged/backward/backend.hpp"
#include "cuda/staged/backward/cost.hpp"
#include "cuda/staged/backward/kernels.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::gdn {
namespace {

/// Its kernels have tiles of 128 channels, whatever K is.
std::string decline(const Problem& p) { return kForward.head.decline(p); }

std::string decline_gradients(const Gradients& g) {
  for (const auto& [name, desc] :
       {std::pair{"d_o", &g.d_o}, std::pair{"dq", &g.dq}, std::pair{"dk", &g.dk}})
    if (!staged::has_whole_rows(*desc, DType::kBFloat16))
      return cat(name, " is not of bf16 rows aligned to 16 bytes");
  if (g.dg && g.dg->strides[3] != 0) return "dg has a gradient a channel; g has one gate a head";
  if (g.ddt_bias && g.ddt_bias->strides[1] != 0)
    return "ddt_bias has a gradient a channel; dt_bias has one bias a head";
  return {};
}

constexpr const char* kDropsM =
    "M is dropped where the gates bound it by 2^-20, for gradients by 2^-40";

/// Bytes that a cut takes for each segment.
std::size_t segment_bytes(const Problem& p, const HeadGroups& groups) {
  return static_cast<std::size_t>(value_heads_of(p, groups) * p.key_dim *
                                  (p.key_dim + 4 * p.value_dim)) *
         sizeof(float);
}

void cut_on_device(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  gdn::cut_on_device(builder, backward_model_from_bounds(p, plan.device, groups),
                     segment_bytes(p, groups));
  if (plan.early_exit) builder.reason(kDropsM);
}

/// Cuts sequences by the policy asked for.
void cut(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  const bool invariant = plan.problem.batch_invariant;
  if (!plan.lengths_known) return cut_on_device(builder, groups);
  if (invariant && plan.requested.context_parallel == SegmentPolicy::kAuto)
    return builder.reason("batch_invariant: auto cuts no backward");
  builder.cut({.automatic =
                   [&](const plan::Workload& work, CostEstimate* cost) {
                     return auto_backward_partition(work, plan.device, groups, cost);
                   },
               .unit = kChunk});
  if (!plan.segmented) return;
  builder.set_segment_method(SegmentMethod::kScanMergeForward);
  builder.set_early_exit(!invariant);
  if (plan.early_exit) builder.reason(kDropsM);
}

/// By the plan, or as a kernel likes.
bool is_cut(const Plan& plan) { return plan.segmented || plan.device_cut.on; }

/// `each`: how texts of stages begin.
void list_segments(plan::PlanBuilder& builder, const std::string& each, bool tokens) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t HV = p.num_value_heads, states = p.num_sequences * HV;
  const bool hopper = merges_on_hopper(plan.device, p.key_dim);
  builder.stage("segment_scan", places_of(plan) * HV,
                each + "B, M and D of segments, of what is not forgotten");
  builder.kernel("segment_scan", "gdn_backward_scan_sm90", "both directions at once");
  if (tokens) {
    builder.stage("segment_merge", states, each + "states before segments, in order");
    builder.kernel("segment_merge",
                   hopper ? "gdn_both_merges_sm90" : merge_kernel(plan.device, p.key_dim));
  }
  builder.stage("reverse_merge", states, each + "dS behind segments, right to left");
  builder.kernel("reverse_merge", hopper ? "gdn_both_merges_sm90" : "reverse_merge");
}

void list(plan::PlanBuilder& builder, const HeadGroups& groups, int64_t chunks, bool tokens) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t HV = p.num_value_heads,
                sequences = is_cut(plan) ? places_of(plan) : p.num_sequences,
                chains = sequences * HV * tiles_of(p.value_dim);
  const std::string each = groups.count > 1 ? "of each group: " : "";
  builder.stage("chunk_intra", chunks * p.num_heads,
                each + "factors of one chunk and all value heads of a q/k head a task");
  builder.kernel("chunk_intra", "gdn_intra_sm90, backward");
  list_device_cut(builder);
  const char* stage = tokens ? "chunk_delta_h" : "chunk_reverse";
  if (plan.device_cut.on)
    builder.kernel(stage, "gdn_backward_chains_sm90", "whole sequences, where nothing is cut");
  if (is_cut(plan)) list_segments(builder, each, tokens);
  if (tokens)
    builder.stage("chunk_delta_h", chains, each + "states before chunks and their errors");
  builder.stage("chunk_reverse", chains, each + "dS behind chunks, dv, right to left");
  builder.kernel(stage, "gdn_backward_chains_sm90");
  if (!tokens) return;
  builder.kernel("chunk_reverse", "gdn_backward_chains_sm90", "both directions at once");
  builder.stage("chunk_grad", chunks * HV,
                each + "dq, dk, dg, dbeta of a chunk, with norms, gates, steps");
  builder.kernel("chunk_grad", "gdn_chunk_grad_sm90");
  const Gradients& wanted = *builder.gradients();
  if (!wanted.dA_log && !wanted.ddt_bias) return;
  builder.stage("backward_parameters", HV, each + "sums for A_log and dt_bias, in order");
  builder.kernel("backward_parameters", "backward_parameters");
}

/// M, B, D, the states before segments and dS behind them; a word for each direction.
void book_segments(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  if (!is_cut(plan)) return;
  const Problem& p = plan.problem;
  const auto states = static_cast<std::size_t>(places_of(plan) * value_heads_of(p, groups));
  const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
  builder.book(stage::kSegmentM.name, states, K * K * sizeof(float));
  for (const char* name : {stage::kSegmentB.name, stage::kSegmentStates.name, block::kSegmentD,
                           block::kSegmentDStates})
    builder.book(name, states, K * V * sizeof(float));
  book_device_cut(builder);
  builder.book(block::kGdnForgotten, plan.early_exit ? 2 * states : 0, sizeof(int32_t));
}

/// Whether a kernel has room for a cut where only the device knows the lengths. Else all is whole.
bool has_room_for_cut(const registry::Request& request) {
  const Problem& p = request.problem;
  const HeadGroups groups = backward_groups(p);
  const int64_t behind = most_behind_of(p, backward_model_from_bounds(p, request.device, groups));
  return static_cast<std::size_t>(p.num_sequences + behind) * segment_bytes(p, groups) <=
         static_cast<std::size_t>(request.options.most_cut_bytes);
}

/// The staged backend is the next one.
std::string defer(const registry::Request& request) {
  const Problem& p = request.problem;
  const registry::Head& staged = staged::kBackward.head;
  if (!request.gradients || !staged.decline(p).empty() ||
      !staged.decline_gradients(*request.gradients).empty())
    return {};
  if (request.options.spans) return "spans: it has no two phases";
  // Uncut it was measured to be the faster one, whatever the lengths, which may not decide here.
  if (p.batch_invariant || request.options.context_parallel != SegmentPolicy::kAuto) return {};
  const HeadGroups groups = backward_groups(p);
  plan::Workload work = plan::workload_of(p, request.cu_seqlens, request.device);
  if (request.cu_seqlens.empty()) work.lengths = {p.num_tokens};
  const double own = request.cu_seqlens.empty() && !has_room_for_cut(request)
                         ? whole_backward_us(cost_input(work, request.device), groups)
                         : backward_to_beat_us(work, request.device, groups);
  Plan of_staged;
  of_staged.problem = p;
  const double other = staged::backward_to_beat_us(
      work, request.device, staged::groups_within(of_staged, staged::kGroupBytes));
  if (own <= other) return {};
  return cat("predicted: ", std::llround(own), " us where heads forget nothing",
             request.cu_seqlens.empty() ? ", of one sequence" : "", "; cuda.sm80.staged ",
             std::llround(other), " us");
}

void predict(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  if (!plan.lengths_known || plan.problem.num_sequences == 0) return;
  const plan::Workload work = builder.workload();
  const CostInput in = cost_input(work, plan.device);
  builder.predict({.roofline_us = cuda::backward::least_us(in),
                   .serial_us = whole_backward_us(in, groups),
                   .segmented_us = plan.cost.segmented_us});
}

void plan_backward(plan::PlanBuilder& builder) {
  plan_backward_within(builder, kBackwardGroupBytes);
}

}  // namespace

void plan_backward_within(plan::PlanBuilder& builder, double group_bytes) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const HeadGroups groups = backward_groups(p, group_bytes);
  const int64_t chunks = most_chunks(plan);
  const auto tiles = static_cast<std::size_t>(chunks * value_heads_of(p, groups));
  const auto rows = static_cast<std::size_t>(chunks * groups.heads);
  const auto values = tiles * static_cast<std::size_t>(tiles_of(p.value_dim));
  const bool tokens = staged::wants_tokens(*builder.gradients());
  cut(builder, groups);
  staged::explain_groups(builder, groups);
  list(builder, groups, chunks, tokens);
  book_maps(builder);
  book_segments(builder, groups);
  predict(builder, groups);
  builder.book(block::kGdnQ, rows, kRowBytes);
  builder.book(block::kGdnK, rows, kRowBytes);
  builder.book(block::kGdnInverse, tiles, kSquareBytes);
  builder.book(block::kGdnScores, tiles, kSquareBytes);
  builder.book(block::kGdnNumbers, tiles, sizeof(Numbers));
  builder.book(block::kGdnBackwardNumbers, tiles, sizeof(BackwardNumbers));
  if (!tokens) return;
  builder.book(block::kChunkStates, values, kStateBytes);
  builder.book(block::kChunkDStates, values, kStateBytes);
  builder.book(block::kBackwardErrors, values, kValueBytes);
  builder.book(block::kBackwardDz, values, kValueBytes);
  // Without a chunk too: the sums of none are written as zeros.
  if (has_parameters(p))
    builder.book(block::kParameterSums, std::max<std::size_t>(tiles, 1), 2 * sizeof(double));
}

const registry::BackwardRow kBackward = {.head = {.name = "cuda.sm90.gdn",
                                                  .device = DeviceKind::kCuda,
                                                  .chunk_size = kChunk,
                                                  .unavailable = sm90::unavailable,
                                                  .plan = plan_backward,
                                                  .decline = decline,
                                                  .decline_gradients = decline_gradients,
                                                  .defer = defer,
                                                  .min_compute_capability = 90,
                                                  .max_compute_capability = 90,
                                                  .device_checks = &kDeviceChecks},
                                         .backward = if_built<backward>()};

}  // namespace kda::cuda::gdn
