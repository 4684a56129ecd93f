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
#include "cuda/staged/backward/device_cut.hpp"
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

constexpr const char* kNoFp16Segments = "segments declined: they begin from states of bf16 factors";

/// Why sequences cannot be cut; empty if they can. Segments are sequences of one row of tokens.
std::string decline_segments(const Problem& p, const Gradients& gradients) {
  if (p.cu_seqlens || p.batch == 1) return {};
  for (const auto& [name, desc] :
       {std::pair{"d_o", &gradients.d_o}, std::pair{"dv", &gradients.dv}})
    if (*desc && (*desc)->strides[0] != p.num_tokens * (*desc)->strides[1])
      return cat("segments declined: the rows of ", name, " do not follow each other");
  return {};
}

/// Bytes that so many segments take.
std::size_t segment_bytes(const Problem& p, std::size_t heads, std::size_t segments) {
  const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
  return heads * segments * (K * K + 4 * K * V) * sizeof(float);
}

/// Segments behind first ones that a kernel may make.
int64_t most_behind_of(const Plan& plan, const BackwardModel& model) {
  const Problem& p = plan.problem;
  const int64_t fixed = fixed_segments(plan);
  return fixed > 0 ? std::min(p.num_sequences * (fixed - 1), p.num_tokens / kChunk)
                   : model.most_behind;
}

/// Chunks of a sequence times the segments that are asked for, as far as it has chunks: at most.
int64_t most_chunks_times_segments(const Plan& plan) {
  const int64_t chunks = plan.problem.num_tokens / kChunk + 1;
  return chunks * std::min(fixed_segments(plan), chunks);
}

/// Why a kernel that knows the lengths does not cut; empty: it cuts where that is predicted to
/// gain. By bounds alone, so that lengths never change what is launched.
std::string decline_device_cut(const Plan& plan, const HeadGroups& groups) {
  const Problem& p = plan.problem;
  if (plan.requested.context_parallel == SegmentPolicy::kOff) return "off: asked for";
  if (plan::asks_for_segments(plan.requested) && fixed_segments(plan) == 0)
    return "segments of this policy need lengths on the host; not cut";
  if (p.q.dtype == DType::kFloat16) return kNoFp16Segments;
  if (p.batch_invariant) return "batch_invariant: not cut where only the device knows the lengths";
  if (p.num_tokens > kMostDeviceCutTokens)
    return cat(p.num_tokens, " tokens are more than a kernel counts; not cut");
  if (most_chunks_times_segments(plan) > INT32_MAX)
    return cat("num_segments: ", fixed_segments(plan), " segments of ", p.num_tokens,
               " tokens are more than a kernel counts; not cut");
  const BackwardModel model = model_from_bounds(plan, groups);
  if (fixed_segments(plan) == 1 || p.num_tokens == 0 || p.num_sequences == 0)
    return "no sequence can be cut";
  if (fixed_segments(plan) == 0 && !may_cut(model, p.num_tokens, p.num_sequences))
    return cat("auto: no table of ", p.num_tokens, " tokens gains by a cut");
  const std::size_t bytes =
      segment_bytes(p, static_cast<std::size_t>(groups.heads * (p.num_value_heads / p.num_heads)),
                    static_cast<std::size_t>(p.num_sequences + most_behind_of(plan, model)));
  const auto most = static_cast<std::size_t>(plan.requested.most_cut_bytes);
  if (bytes > most)
    return cat("segments declined: a cut on the device takes ", bytes,
               " bytes, more than most_cut_bytes = ", most, "; not cut");
  return {};
}

/// Lets the device cut, with room for all that it may cut.
void cut_on_device(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  std::string declined = decline_device_cut(plan, groups);
  if (!declined.empty()) return builder.reason(std::move(declined));
  const int64_t behind = most_behind_of(plan, model_from_bounds(plan, groups));
  builder.cut_on_device(behind);
  builder.reason(cat(fixed_segments(plan) > 0
                         ? cat(fixed_segments(plan),
                               " segments a sequence asked for (fewer where it has fewer chunks)")
                         : "auto: a kernel cuts where that is predicted to gain",
                     ", at most ", behind, " segments behind first ones"));
}

/// Cuts sequences by the policy asked for.
void cut(plan::PlanBuilder& builder, const HeadGroups& groups) {
  const Plan& plan = builder.plan();
  if (!plan.lengths_known) return cut_on_device(builder, groups);
  std::string declined;
  if (plan.problem.q.dtype == DType::kFloat16)
    declined = kNoFp16Segments;
  else if (plan.problem.batch_invariant && plan.requested.context_parallel == SegmentPolicy::kAuto)
    declined = "batch_invariant: not cut, since groups of heads and factors follow from the batch";
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
      builder.requested().spans && !plan.problem.batch_invariant)
    builder.drop_segments();
  if (plan.segmented) builder.set_segment_method(SegmentMethod::kScanMergeForward);
}

/// Segments, or places for those that a kernel may make.
void book_cut(plan::PlanBuilder& builder, std::size_t heads) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t N = p.num_sequences, places = N + plan.device_cut.most_behind;
  if (!plan.segmented && !plan.device_cut.on) return;
  const std::size_t segments =
      plan.device_cut.on ? static_cast<std::size_t>(places) : plan.segments.size();
  const std::size_t states = heads * segments;
  const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
  builder.book(stage::kSegmentM.name, states, K * K * sizeof(float));
  for (const char* name : {stage::kSegmentB.name, stage::kSegmentStates.name, block::kSegmentD,
                           block::kSegmentDStates})
    builder.book(name, states, K * V * sizeof(float));
  builder.book(block::kSegmentSequences, 1,
               plan.device_cut.on
                   ? static_cast<std::size_t>(cut_maps_words(N, places)) * sizeof(int64_t)
                   : 2 * (segments + 1) * sizeof(int64_t) + 2 * segments * sizeof(int32_t));
}

}  // namespace

int64_t kept_group_heads(const Plan& plan) {
  const Problem& p = plan.problem;
  return groups_within(plan, kGroupBytes).heads * (p.num_value_heads / p.num_heads);
}

void explain_groups(plan::PlanBuilder& builder, const HeadGroups& groups) {
  if (groups.count == 1) return builder.reason("heads: one group, the workspace holds all of them");
  builder.reason(cat("heads: ", groups.count, " groups of ", groups.heads, " of ",
                     builder.plan().problem.num_heads,
                     " q/k heads, one after the other: the workspace holds one"));
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
  explain_groups(builder, groups);
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
  book_cut(builder, heads);
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
