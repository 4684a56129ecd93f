// SPDX-License-Identifier: Apache-2.0
// The backwards of cuda.sm80.staged and, for rows in fp16, cuda.sm90.staged: what they serve and
// how it plans. Its launches: cuda/staged/backward/launches.cpp.
#include "cuda/staged/backend.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/rows.hpp"
#include "cuda/staged/backward/backend.hpp"
#include "cuda/staged/backward/cost.hpp"
#include "cuda/staged/backward/kernels.hpp"
#include "cuda/staged/backward/launches.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::staged {
namespace {

std::string decline(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16 || p.k.dtype != p.q.dtype || p.v.dtype != p.q.dtype)
    return cat("q, k, v are ", dtype_name(p.q.dtype), ", ", dtype_name(p.k.dtype), ", ",
               dtype_name(p.v.dtype), "; needs bf16 for all three");
  return decline_inputs(p);
}

std::string decline_gradients(const Gradients& g) {
  if (!g.d_o) return {};
  if (g.d_o->dtype != DType::kBFloat16)
    return cat("d_o is ", dtype_name(g.d_o->dtype), ", needs bf16");
  return decline_alignment("d_o", *g.d_o, 16);
}

bool keeps_chunks(const Plan& plan) { return plan.requested.keep == KeepPolicy::kChunks; }

/// It reads what a forward keeps, whatever the problem.
std::string decline_keep(const Problem&) { return {}; }

void plan_backward(plan::PlanBuilder& builder) {
  plan_backward_within(builder, builder.requested().spans ? kTwoPhaseBytes : kGroupBytes);
}

/// A workspace in two phases holds all heads.
std::string decline_phases(const Plan& plan) {
  if (keeps_chunks(plan))
    return "the forward keeps states and errors of chunks, of whole sequences";
  if (groups_of(plan).count == 1) return {};
  return cat("all heads at once would need more than ", kTwoPhaseBytes / 1e9, " GB");
}

/// Why sequences cannot be cut; empty if they can. Segments are sequences of one row of tokens.
std::string decline_segments(const Problem& p, const Gradients& gradients) {
  if (p.cu_seqlens || p.batch == 1) return {};
  for (const auto& [name, desc] :
       {std::pair{"d_o", &gradients.d_o}, std::pair{"dv", &gradients.dv}})
    if (*desc && (*desc)->strides[0] != p.num_tokens * (*desc)->strides[1])
      return cat("segments declined: the rows of ", name, " do not follow each other");
  return {};
}

/// Cuts sequences by the policy asked for.
void cut(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  std::string declined;
  if (plan.problem.q.dtype == DType::kFloat16)
    declined = "segments declined: they begin from states of bf16 factors";
  else if (builder.gradients())
    declined = decline_segments(plan.problem, *builder.gradients());
  if (!declined.empty()) return builder.reason(std::move(declined));
  builder.cut({.automatic =
                   [&](const plan::Workload& work, CostEstimate* cost) {
                     return auto_backward_partition(work, plan.device, groups,
                                                    builder.requested().spans, keeps_chunks(plan),
                                                    cost);
                   },
               .unit = kChunk});
  // Empty segments alone are not worth it: D is of the chains of whole sequences then.
  if (static_cast<int64_t>(plan.segments.size()) == 2 * plan.problem.num_sequences &&
      builder.requested().spans)
    builder.drop_segments();
  if (plan.segmented) builder.set_segment_method(SegmentMethod::kScanMergeForward);
}

}  // namespace

int64_t kept_group_heads(const Plan& plan) {
  const Problem& p = plan.problem;
  return groups_within(plan, kGroupBytes).heads * (p.num_value_heads / p.num_heads);
}

void save_chunks(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const StageSizes bytes = head_bytes(plan).buffers;
  const auto heads = static_cast<std::size_t>(plan.problem.num_value_heads);
  builder.set_keep(KeepPolicy::kChunks);
  builder.save(block::kKeptChunkStates, heads, bytes.h);
  builder.save(block::kKeptErrors, heads, bytes.vn);
}

void plan_backward_within(plan::PlanBuilder& builder, double group_bytes) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const HeadBytes bytes = head_bytes(plan);
  const HeadGroups groups = groups_within(plan, group_bytes);
  cut(builder, groups);
  const int64_t HV = p.num_value_heads;
  const bool kept = keeps_chunks(plan);
  builder.set_intra_form(IntraForm::kTensor);
  if (groups.count > 1) {
    builder.reason(cat("heads: ", groups.count, " groups of ", groups.heads, " of ", p.num_heads,
                       " q/k heads, one after the other: the workspace holds one"));
  } else {
    builder.reason("heads: one group, the workspace holds all of them");
  }
  list_backward(builder, kernels_of(plan, *builder.gradients()));
  const auto heads = static_cast<std::size_t>(groups.heads * (HV / p.num_heads));
  builder.book(block::kFactorsThenRows, heads, bytes.factors_then_rows());
  if (kept) {
    builder.reason("keep: the forward has kept states before chunks and errors");
    save_chunks(builder);
  } else {
    builder.book(block::kChunkStates, heads, bytes.buffers.h);
    builder.book(block::kBackwardErrors, heads, bytes.buffers.vn);
  }
  builder.book(block::kChunkDStates, heads, bytes.buffers.h);
  builder.book(block::kBackwardDz, heads, bytes.buffers.vn);
  builder.book(block::kParameterSums, heads, bytes.sums);
  if (bytes.scales > 0) builder.book(block::kOperandScales, heads, bytes.scales);
  if (plan.segmented) {
    const std::size_t states = heads * plan.segments.size();
    const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
    builder.book(stage::kSegmentM.name, states, K * K * sizeof(float));
    builder.book(stage::kSegmentB.name, states, K * V * sizeof(float));
    builder.book(stage::kSegmentStates.name, states, K * V * sizeof(float));
    builder.book(block::kSegmentD, states, K * V * sizeof(float));
    builder.book(block::kSegmentDStates, states, K * V * sizeof(float));
    builder.book(block::kSegmentSequences, 1,
                 (2 * (plan.segments.size() + 1)) * sizeof(int64_t) +
                     2 * plan.segments.size() * sizeof(int32_t));
  }
  book_maps(builder);
  if (!plan.lengths_known || p.num_sequences == 0) return;
  const plan::Workload work = builder.workload();
  const CostInput in = cost_input(work, plan.device);
  const BackwardModel model = backward_model(in, plan.device, groups, false, kept);
  builder.predict({.roofline_us = cuda::backward::least_us(in),
                   .serial_us = backward_us(model, in, {}),
                   .segmented_us = plan.cost.segmented_us});
}

namespace {

std::string decline_fp16_rows(const Problem& p) {
  if (built() && !sm90::kBuilt) return kNoSm90a;  // a build without CUDA plans for any GPU
  for (const auto& [name, desc] :
       {std::pair{"q", &p.q}, std::pair{"k", &p.k}, std::pair{"v", &p.v}})
    if (desc->dtype != DType::kFloat16)
      return cat(name, " is ", dtype_name(desc->dtype), ", needs fp16");
  if (std::string reason = decline_inputs(p); !reason.empty()) return reason;
  if (std::string reason = decline_fp16_factors(p); !reason.empty()) return reason;
  if (p.gate_mode == GateMode::kLog) return "gates are logarithms, which may be positive";
  if (p.gate_mode == GateMode::kBounded && p.lower_bound < kLeastFp16Bound)
    return cat("lower_bound = ", p.lower_bound, " is below ", kLeastFp16Bound);
  return {};
}

std::string decline_fp16_gradients(const Gradients& g) {
  for (const auto& [name, desc] :
       {std::pair{"d_o", &g.d_o}, std::pair{"dq", &g.dq}, std::pair{"dk", &g.dk}})
    if (!has_whole_rows(*desc, DType::kFloat16))
      return cat(name, " is not of fp16 rows aligned to 16 bytes");
  if (g.dg && g.dg->strides[3] == 0) return "dg has one gradient a head";
  if (g.d_initial_state) return "d_initial_state is wanted, which may be far below d_o";
  return {};
}

}  // namespace

const registry::BackwardRow kFp16Backward = {.head = {.name = "cuda.sm90.staged",
                                                      .device = DeviceKind::kCuda,
                                                      .chunk_size = kChunk,
                                                      .unavailable = unavailable,
                                                      .plan = plan_backward,
                                                      .decline = decline_fp16_rows,
                                                      .decline_gradients = decline_fp16_gradients,
                                                      .min_compute_capability = 90,
                                                      .max_compute_capability = 90,
                                                      .device_checks = &kDeviceChecks},
                                             .backward = if_built<backward>()};

const registry::BackwardRow kBackward = {.head = {.name = "cuda.sm80.staged",
                                                  .device = DeviceKind::kCuda,
                                                  .chunk_size = kChunk,
                                                  .unavailable = unavailable,
                                                  .plan = plan_backward,
                                                  .decline = decline,
                                                  .decline_gradients = decline_gradients,
                                                  .min_compute_capability = 80,
                                                  .device_checks = &kDeviceChecks,
                                                  .decline_keep = decline_keep},
                                         .backward = if_built<backward>(),
                                         .decline_phases = decline_phases,
                                         .begin = if_built<span_backward_begin>(),
                                         .finish = if_built<span_backward_finish>()};

}  // namespace kda::cuda::staged
