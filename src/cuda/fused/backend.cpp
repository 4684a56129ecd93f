// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm90.fused: what it serves and how it plans. Its launches: cuda/fused/launches.cpp.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/fused/backend.hpp"
#include "cuda/fused/cost.hpp"
#include "cuda/fused/device_cut.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/fused/kernels.hpp"
#include "cuda/fused/launches.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/zero_rows.hpp"
#include "cuda/rows.hpp"
#include "cuda/segments/device_cut.hpp"
#include "cuda/staged/backward/backend.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::fused {

// -- What it serves

namespace {

std::string decline_types(const Problem& p) {
  const bool fp16 = p.q.dtype == DType::kFloat16;
  if (!fp16 && p.q.dtype != DType::kBFloat16)
    return cat("q is ", dtype_name(p.q.dtype), "; needs bf16 or fp16");
  for (const auto& [name, desc] :
       {std::pair{"k", &p.k}, std::pair{"v", &p.v}, std::pair{"o", &p.o}, std::pair{"g", &p.g}})
    if (desc->dtype != p.q.dtype && (desc != &p.g || fp16 || desc->dtype != DType::kFloat32))
      return cat(name, " is ", dtype_name(desc->dtype), ", q ", dtype_name(p.q.dtype),
                 desc == &p.g && !fp16 ? "; needs the same, or fp32" : "; needs the same");
  if (fp16 && !has_fp16_operands(p))
    return "q is fp16, for which it needs gates and beta of the call and q, k normalised by it";
  return {};
}

/// Why its kernel of one gate a head does not serve.
std::string decline_head_gate(const Problem& p) {
  if (p.key_dim != 128) return cat("g has one gate a head and K = ", p.key_dim, "; needs 128");
  if (p.g.dtype != DType::kFloat32)
    return cat("g has one gate a head, in ", dtype_name(p.g.dtype), "; needs fp32");
  if (p.gate_mode != GateMode::kLog)
    return cat("g has one gate a head, gate ", gate_mode_name(p.gate_mode), "; needs log");
  return {};
}

}  // namespace

std::string decline_problem(const Problem& p) {
  if (std::string reason = decline_types(p); !reason.empty()) return reason;
  if (p.key_dim != p.value_dim || (p.key_dim != 64 && p.key_dim != 128))
    return cat("K = ", p.key_dim, ", V = ", p.value_dim, "; needs 64 for both, or 128");
  if (p.checkpoints && p.checkpoint_every % sm90::kSubchunk != 0)
    return cat("checkpoint_every = ", p.checkpoint_every, " is not a multiple of ",
               sm90::kSubchunk);
  if (has_head_gate(p)) {
    if (std::string reason = decline_head_gate(p); !reason.empty()) return reason;
  } else if (p.head_map != HeadMap::kGrouped) {
    return "head_map is tiled; with a gate a channel its value heads of a q/k head are neighbours";
  }
  for (const auto& [name, desc, needed] :
       {std::tuple{"q", &p.q, 16}, std::tuple{"k", &p.k, 16}, std::tuple{"v", &p.v, 16},
        std::tuple{"g", &p.g, has_head_gate(p) ? 4 : 16}, std::tuple{"o", &p.o, 16}})
    if (std::string reason = decline_alignment(name, *desc, needed); !reason.empty()) return reason;
  return {};
}

plan::Workload typical_work(const Problem& p, const DeviceFacts& device) {
  return {.lengths = {kTypicalTokens},
          .num_value_heads = p.num_value_heads,
          .key_dim = p.key_dim,
          .value_dim = p.value_dim,
          .num_sms = device.num_sms};
}
std::string typical_times(const plan::Workload& work, double fused_us, double stages_us) {
  return cat("a sequence of ", kTypicalTokens, " tokens and ", work.num_value_heads,
             " value heads is predicted to take ", std::llround(fused_us), " us in one kernel, ",
             std::llround(stages_us), " us in stages");
}

namespace {

std::string decline(const Problem& p) {
  if (built() && !sm90::kBuilt) return kNoSm90a;  // a build without CUDA plans for any GPU
  return decline_problem(p);
}

/// Why segments are not joined in one pass; empty if they are.
std::string decline_one_pass(const Problem& p) {
  if (p.checkpoints && !p.checkpoint_offsets)
    return "checkpoints at all multiples need the true start state";
  const double scale = effective_scale(p);
  if (has_fp16_operands(p) && !(std::abs(scale) >= 0x1p-24 && std::abs(scale) <= 0x1p24))
    return cat("scale = ", scale, " is not 2^-24 to 2^24 in size, as outputs in fp16 need");
  const auto& strides = p.o.strides;
  const int64_t row = p.num_value_heads * p.value_dim;
  const bool dense = strides[2] == p.value_dim && strides[1] == row &&
                     (p.batch == 1 || strides[0] == p.num_tokens * row);
  return dense ? "" : "o is not dense";
}

// -- Whether stages are predicted to be faster

double typical_us_in_stages(const plan::Workload& work, const DeviceFacts& device, bool may_cut) {
  CostEstimate cost;
  if (may_cut)
    staged::auto_partition(work, device, &cost);
  else
    cost = predict(work, device);
  return cost.segmented_us > 0 ? cost.segmented_us : cost.serial_us;
}

/// Its kernels that keep are of the problems that cuda.sm80.staged has a backward for.
std::string decline_keep(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16)
    return cat("q is ", dtype_name(p.q.dtype), "; keeps states and errors of bf16 alone");
  if (has_head_gate(p)) return "g has one gate a head; keeps states and errors of a gate a channel";
  return {};
}

/// It keeps whole chains. Where they leave much of the card idle, a forward that cuts sequences,
/// and so keeps nothing, gains more than the backward loses.
std::string defer_keep(const registry::Request& request) {
  const Problem& p = request.problem;
  const int64_t chains = p.num_sequences * p.num_value_heads;
  const int64_t busy = chains * tiles_of(p.key_dim), sms = request.device.num_sms;
  if (busy * 4 >= sms * 3) return {};
  return cat(chains, " chains of K = ", p.key_dim, " keep ", busy, " of ", sms,
             " SMs busy, fewer than three quarters; a forward that cuts them gains more");
}

std::string defer(const registry::Request& request) {
  if (request.options.keep == KeepPolicy::kChunks) return {};  // no other row keeps
  if (plan::asks_for_segments(request.options)) return "context_parallel asks for segments";
  if (request.options.intra_form != IntraForm::kAuto) return "intra_form asks for a form of stages";
  const Problem& p = request.problem;
  const bool may_cut = decline_one_pass(p).empty();
  const plan::Workload typical = typical_work(p, request.device);
  const double fused =
      may_cut ? predicted_us(typical, request.device) : predict(typical, request.device).fused_us;
  const double stages = typical_us_in_stages(typical, request.device, may_cut);
  return fused <= stages ? "" : typical_times(typical, fused, stages);
}

// -- How it plans

int64_t num_behind_first(const Plan& plan) {
  return static_cast<int64_t>(plan.segments.size()) - plan.problem.num_sequences;
}

bool transitions_fit(const Plan& plan) {
  return fused::transitions_fit(num_behind_first(plan) * plan.problem.num_value_heads,
                                plan.device.num_sms);
}

/// Where segments were asked for: some transition could exit before its segment ends.
bool could_exit_early(const Plan& plan) {
  const int64_t check_tokens = check_tokens_of(plan.problem);
  if (check_tokens == 0 || !transitions_fit(plan)) return false;
  for (std::size_t n = 1; n < plan.segments.size(); ++n) {
    const Segment& segment = plan.segments[n];
    if (segment.sequence == plan.segments[n - 1].sequence &&
        segment.end - segment.begin > 2 * check_tokens)
      return true;
  }
  return false;
}

/// By the policy that was asked for, and joined as was asked for.
void cut_as_asked(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  builder.cut({.automatic = {}, .unit = kChunk});  // the policy is not kAuto
  builder.join(decline_one_pass(plan.problem));
  builder.set_early_exit(plan.segmented &&
                         plan.resolved.segment_method == SegmentMethod::kOnePass &&
                         could_exit_early(plan));
  note_one_intra_form(builder);
  builder.set_v_splits(v_splits(plan));
}

/// Left to the planner: cut where that is predicted to gain, and joined in one pass.
void cut_where_it_gains(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const std::string declined = decline_one_pass(plan.problem);
  if (builder.requested().context_parallel == SegmentPolicy::kAuto && declined.empty()) {
    builder.cut({.automatic =
                     [&](const plan::Workload& work, CostEstimate* cost) {
                       const int64_t check_tokens = check_tokens_of(plan.problem);
                       return plan.requested.spans
                                  ? span_partition(work, plan.device, check_tokens, cost)
                                  : auto_partition(work, plan.device, check_tokens, cost);
                     },
                 .unit = kChunk});
    builder.set_early_exit(plan.early_exit && transitions_fit(plan));
    if (plan.segmented) builder.set_segment_method(SegmentMethod::kOnePass);
  } else {
    builder.predict(predict(builder.workload(), plan.device));
    builder.reason(declined.empty() ? "off: asked for"
                                    : cat("one pass declined: ", declined, "; not cut"));
  }
  builder.set_v_splits(tiles_of(plan.problem.value_dim));
}

bool joins_in_one_pass(const Plan& plan) {
  return plan.segmented && plan.resolved.segment_method == SegmentMethod::kOnePass;
}

const char* states_corrected(const Problem& p) {
  return p.checkpoint_offsets ? "o += Qt S_in; final states, checkpoints from M and B up to them"
                              : "o += Qt S_in; final states";
}

void list_one_pass(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const int64_t heads = plan.problem.num_value_heads, behind = num_behind_first(plan);
  const auto segments = static_cast<int64_t>(plan.segments.size());
  builder.stage("segment_scan", (segments + behind) * heads * plan.num_v_splits,
                cat("outputs from zero, and M with its outputs behind first segments",
                    plan.early_exit ? ", until M is small" : ""));
  builder.stage("segment_merge", plan.problem.num_sequences * heads,
                "start states of third segments on, in order");
  builder.stage("segment_correct", behind * heads, states_corrected(plan.problem));
}

/// Bytes that segments behind first ones need, `behind` of them: outputs of transitions with their
/// residuals, states and maps; M or B up to checkpoints.
struct OnePassBytes {
  std::size_t output = 0, residual = 0, checkpoints = 0, states = 0;
  std::size_t all() const { return output + residual + 2 * checkpoints + states; }
};
OnePassBytes one_pass_bytes(const Problem& p, int64_t behind) {
  const auto heads = static_cast<std::size_t>(p.num_value_heads);
  const auto tokens = static_cast<std::size_t>(p.batch * p.num_tokens);
  const auto rows = static_cast<std::size_t>(behind) * heads;
  const bool residuals = has_fp16_operands(p) && p.o.dtype == DType::kBFloat16;
  const std::size_t subchunks =  // fused/output_residual.cuh
      residuals ? tokens / sm90::kSubchunk + 2 * (static_cast<std::size_t>(behind) + 1) : 0;
  const auto matrix = static_cast<std::size_t>(p.key_dim * p.value_dim) * sizeof(float);
  return {.output = tokens * heads * sm90::fused_row_bytes(p.value_dim),
          .residual = subchunks * heads * sm90::residual_bytes(p.value_dim),
          .checkpoints = p.checkpoint_offsets ? rows * matrix : 0,
          .states = 3 * rows * matrix};
}

/// It counts tokens, twice over, in 32 bits.
constexpr int64_t kMostDeviceCutTokens = int64_t{1} << 30;

/// Why a kernel that knows the lengths does not cut; empty: it cuts where that is predicted to
/// gain. By bounds alone, so that lengths never change the kernels.
std::string decline_device_cut(const Plan& plan) {
  const Problem& p = plan.problem;
  if (plan.requested.context_parallel == SegmentPolicy::kOff) return "off: asked for";
  if (p.batch_invariant)  // each sequence as if it were alone: N times the segments of one
    return "batch_invariant: whether a kernel has room for all cuts would depend on the batch; not "
           "cut";
  if (std::string declined = decline_one_pass(p); !declined.empty())
    return cat("one pass declined: ", declined, "; not cut");
  const CutModel model = model_from_bounds(p, plan.device, check_tokens_of(p));
  if (model.most_behind == 0)
    return cat(p.num_value_heads, " value heads are more than all clusters take; not cut");
  if (p.num_tokens > kMostDeviceCutTokens)
    return cat(p.num_tokens, " tokens are more than a kernel counts; not cut");
  if (p.num_sequences > sm90::kMostDeviceCutSequences)
    return cat(p.num_sequences, " sequences are more than shared memory holds; not cut");
  if (!may_cut(model, p.num_tokens, p.num_sequences))
    return cat("auto: no table of ", p.num_tokens, " tokens gains by a cut");
  const std::size_t bytes = one_pass_bytes(p, model.most_behind).all();
  const auto most = static_cast<std::size_t>(plan.requested.most_cut_bytes);
  if (bytes > most)
    return cat("auto: a cut on the device takes ", bytes,
               " bytes, more than most_cut_bytes = ", most, "; not cut");
  return {};
}

/// The cut where one sequence has all tokens.
plan::Partition whole_cut(const Plan& plan) {
  const Problem& p = plan.problem;
  CostEstimate unused;
  return auto_partition(plan::workload_of(p, std::vector{int64_t{0}, p.num_tokens}, plan.device),
                        plan.device, check_tokens_of(p), &unused);
}

/// Lets the device cut, with room for all that it may cut.
void cut_on_device(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  if (plan::asks_for_segments(plan.requested)) return;
  const std::string declined = decline_device_cut(plan);
  if (!declined.empty()) return builder.reason(declined);
  const int64_t behind = model_from_bounds(plan.problem, plan.device, 0).most_behind;
  builder.cut_on_device(behind,
                        plan.problem.num_sequences == 1 ? whole_cut(plan) : plan::Partition());
  builder.reason(cat("auto: a kernel cuts where that is predicted to gain, at most ", behind,
                     " segments behind first ones"));
}

void list_device_cut(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const int64_t heads = plan.problem.num_value_heads, behind = plan.device_cut.most_behind;
  builder.stage("segment_cut", 1, "segments by lengths on the device");
  builder.stage("segment_scan", (plan.problem.num_sequences + 2 * behind) * heads,
                "at most; outputs from zero, and M with its outputs behind first segments");
  builder.stage("segment_merge", behind * heads,
                "at most; start states of third segments on, in order");
  builder.stage("segment_correct", behind * heads,
                cat("at most; ", states_corrected(plan.problem)));
}

/// Books the units of so many segments, `behind` of them behind first ones and each of these with a
/// transition.
void book_units(plan::PlanBuilder& builder, int64_t segments, int64_t transitions) {
  const auto units = static_cast<std::size_t>(segments + transitions + 1);
  const auto N = static_cast<std::size_t>(builder.problem().num_sequences);
  builder.book(block::kSegmentUnits, N + 1 + units * sm90::kWorkUnitWords, sizeof(int64_t));
}

/// Books outputs of transitions, in one pass.
void book_one_pass(plan::PlanBuilder& builder, int64_t behind, bool early_exit) {
  const Problem& p = builder.problem();
  const OnePassBytes bytes = one_pass_bytes(p, behind);
  builder.book(stage::kExitToken.name,
               early_exit ? static_cast<std::size_t>(behind * p.num_value_heads) : 0,
               sizeof(int64_t));
  builder.book(stage::kTransitionOutput.name, bytes.output, 1);
  builder.book(block::kOutputResidual, bytes.residual, 1);
  builder.book(block::kCheckpointM, bytes.checkpoints, 1);
  builder.book(block::kCheckpointB, bytes.checkpoints, 1);
}

void book_cut(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const int64_t N = plan.problem.num_sequences, most = plan.device_cut.most_behind;
  if (plan.device_cut.on) {
    builder.book(block::kDeviceCut, static_cast<std::size_t>(device_cut_words(most)),
                 sizeof(int64_t));
    book_units(builder, N + most, most);
    return book_one_pass(builder, most, /*early_exit=*/true);
  }
  const auto segments = static_cast<int64_t>(plan.segments.size());
  book_units(builder, segments, segments);
  if (joins_in_one_pass(plan)) book_one_pass(builder, num_behind_first(plan), plan.early_exit);
}

/// States that one cluster hands to the next, where there are more chains than clusters.
void book_handoffs(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const auto units =
      plan.segmented ? 2 * static_cast<int64_t>(plan.segments.size()) : p.num_sequences;
  const int64_t chains = plan.device_cut.on ? INT64_MAX : units * p.num_value_heads;
  const int64_t clusters = sm90::fused_clusters(chains, plan.device.num_sms, p.key_dim);
  const auto handoffs = static_cast<std::size_t>(clusters < chains ? clusters : 0);
  builder.book(block::kHandoffStates, handoffs, sm90::handoff_state_bytes(p.key_dim));
  builder.book(block::kHandoffFlags, handoffs, sm90::handoff_flag_bytes(p.key_dim));
}

/// Keeps the chains of whole sequences.
void keep_whole(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  builder.predict(predict(builder.workload(), plan.device));
  builder.reason("keep: states and errors need the true start state; not cut");
  builder.set_v_splits(tiles_of(plan.problem.value_dim));
}

void cut(plan::PlanBuilder& builder) {
  if (builder.requested().keep == KeepPolicy::kChunks) return keep_whole(builder);
  plan::asks_for_segments(builder.requested()) ? cut_as_asked(builder)
                                               : cut_where_it_gains(builder);
}

void plan_forward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const bool keeps = builder.requested().keep == KeepPolicy::kChunks;
  if (plan.lengths_known)
    cut(builder);
  else if (!keeps)
    cut_on_device(builder);
  if (keeps) staged::save_chunks(builder);
  const bool one_pass = joins_in_one_pass(plan);
  if (plan.device_cut.on)
    list_device_cut(builder);
  else if (one_pass)
    list_one_pass(builder);
  else
    plan.segmented ? list_scan_merge_forward(builder) : list_forward(builder);
  list_kernels(builder);
  book_maps(builder);
  if (plan.segmented || plan.device_cut.on) book_cut(builder);
  if (plan.requested.spans && !keeps)
    builder.reason("spans: an empty segment in front of each sequence, whose start comes later");
  book_handoffs(builder);
  if (plan.device_cut.on)
    book_segments(builder, static_cast<std::size_t>(plan.device_cut.most_behind));
  if (plan.segmented)
    book_segments(builder, one_pass ? static_cast<std::size_t>(num_behind_first(plan))
                                    : plan.segments.size());
}

/// The kernel that makes the maps zeroes rows of no sequence.
const registry::DeviceChecks kChecks = {.call = if_built<check_device>(),
                                        .pointer = if_built<check_pointer>(),
                                        .zero_rows = if_built<zero_rows_without_slot>()};

}  // namespace

const registry::ForwardRow kForward = {
    .head = {.name = "cuda.sm90.fused",
             .device = DeviceKind::kCuda,
             .chunk_size = kChunk,
             .unavailable = sm90::unavailable,
             .plan = plan_forward,
             .decline = decline,
             .defer = defer,
             .min_compute_capability = 90,
             .max_compute_capability = 90,
             .device_checks = &kChecks,
             .decline_keep = decline_keep,
             .defer_keep = defer_keep,
             .takes_offsets = true},
    .forward = if_built<forward>(),
    .segments = registry::SegmentStages{.scan = if_built<segment_scan>(),
                                        .merge = if_built<segment_merge>(),
                                        .correct = if_built<segment_correct>(),
                                        .one_pass_rows = stage::SegmentRows::kBehindFirst},
    .chunk_stages = {},
    .spans =
        registry::SpanStages{.begin = if_built<span_begin>(), .finish = if_built<span_finish>()}};

}  // namespace kda::cuda::fused
