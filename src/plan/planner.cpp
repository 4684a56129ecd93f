// SPDX-License-Identifier: Apache-2.0
// make_plan(): choose an implementation, cut long sequences, size the workspace. Host only.
#include <algorithm>
#include <string_view>

#include "core/guard.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "kda/plan.hpp"
#include "plan/cost_model.hpp"
#include "plan/ledger.hpp"
#include "plan/one_kernel.hpp"
#include "plan/partition.hpp"
#include "stage/implementation.hpp"

namespace kda {
namespace {

using stage::Implementation;

constexpr double kH200BytesPerSecond = 4.24e12;  // measured copy rate
constexpr int32_t kH200Sms = 132;
constexpr int64_t kMaxSegments = 1 << 20;

bool name_matches(std::string_view name, std::string_view wanted) {
  if (wanted.empty()) return true;
  const std::size_t at = name.find(wanted);
  if (at == std::string_view::npos) return false;
  const bool starts = at == 0 || name[at - 1] == '.';
  const std::size_t end = at + wanted.size();
  return starts && (end == name.size() || name[end] == '.');
}

/// Why a row does not serve; empty if it does.
std::string decline_reason(const Implementation& row, const Plan& plan,
                           const PlanOptions& options) {
  const DeviceFacts& device = plan.device;
  if (row.device != device.kind) return cat("runs on ", device_kind_name(row.device));
  const bool cuda = device.kind == DeviceKind::kCuda;
  if (cuda && device.compute_capability < row.min_compute_capability)
    return cat("needs compute capability ", row.min_compute_capability, ", ", device.name, " has ",
               device.compute_capability);
  if (cuda && device.compute_capability > row.max_compute_capability)
    return cat("is for compute capability ", row.max_compute_capability, ", ", device.name, " has ",
               device.compute_capability);
  if (!name_matches(row.name, options.backend))
    return cat("backend ", options.backend, " asked for");
  // A plan for a GPU can be made on any machine; run() needs the device.
  if (!cuda)
    if (const char* reason = row.unavailable()) return reason;
  std::string reason = row.decline(plan.problem);
  if (reason.empty() && row.yield && options.backend.empty()) reason = row.yield(plan);
  return reason;
}

Status choose_implementation(const PlanOptions& options, Plan* plan,
                             const Implementation** chosen) {
  *chosen = nullptr;
  bool known = false;
  for (const Implementation* row : stage::registry()) {
    known |= row->device == plan->device.kind && name_matches(row->name, options.backend);
    std::string reason = decline_reason(*row, *plan, options);
    const bool serves = reason.empty();
    plan->candidates.push_back({row->name, serves && !*chosen, std::move(reason)});
    if (serves && !*chosen)
      *chosen = row;
    else if (serves)
      plan->candidates.back().reason = "a better one serves";
  }
  if (*chosen) {
    plan->implementation = (*chosen)->name;
    return {};
  }
  if (!options.backend.empty()) {
    for (const Candidate& row : plan->candidates)
      if (known && name_matches(row.name, options.backend))
        return Status(StatusCode::kUnavailable,
                      cat("backend: ", row.name, " cannot serve: ", row.reason));
    return Status(StatusCode::kUnavailable,
                  cat("backend: '", options.backend, "' names no implementation for ",
                      device_kind_name(plan->device.kind), " (see kda info)"));
  }
  return {};  // a plan without an implementation: it can be read, not run
}

Status set_lengths(std::span<const int64_t> cu_seqlens, Plan* plan) {
  const Problem& p = plan->problem;
  const auto N = static_cast<std::size_t>(p.num_sequences);
  plan->lengths_known = true;
  if (!p.cu_seqlens) {
    if (!cu_seqlens.empty())
      return invalid("cu_seqlens: ", cu_seqlens.size(), " lengths given, but the problem has none");
    plan->cu_seqlens.resize(N + 1);
    for (std::size_t n = 0; n <= N; ++n)
      plan->cu_seqlens[n] = static_cast<int64_t>(n) * p.num_tokens;
    return {};
  }
  if (cu_seqlens.size() != N + 1)
    return invalid("cu_seqlens: has ", cu_seqlens.size(), " entries, needs N + 1 = ", N + 1);
  if (cu_seqlens.front() != 0)
    return invalid("cu_seqlens: starts with ", cu_seqlens.front(), ", must start with 0");
  for (std::size_t n = 0; n < N; ++n)
    if (cu_seqlens[n + 1] < cu_seqlens[n])
      return invalid("cu_seqlens: entry ", n + 1, " = ", cu_seqlens[n + 1], " is below entry ", n,
                     " = ", cu_seqlens[n]);
  if (cu_seqlens.back() != p.num_tokens)
    return invalid("cu_seqlens: ends with ", cu_seqlens.back(),
                   ", must end with T = ", p.num_tokens);
  plan->cu_seqlens.assign(cu_seqlens.begin(), cu_seqlens.end());
  return {};
}

Status check_plan_lengths(const Plan& plan) {
  const Problem& p = plan.problem;
  int64_t checkpoints = 0;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n) {
    const int64_t length = plan.cu_seqlens[n + 1] - plan.cu_seqlens[n];
    if (p.operation == Operation::kDecode && length > kMaxDecodeTokens)
      return invalid("cu_seqlens: decode takes at most ", kMaxDecodeTokens,
                     " tokens a sequence, sequence ", n, " has ", length);
    if (p.operation == Operation::kDecode && p.state_index_columns > 1 &&
        length > p.state_index_columns)
      return invalid("state_index_columns: S = ", p.state_index_columns, " is below the ", length,
                     " tokens of sequence ", n);
    checkpoints += num_checkpoints(p, length);
  }
  if (p.checkpoints && !p.checkpoints->indexed && p.checkpoints->num_slots != checkpoints)
    return invalid("checkpoints: num_slots = ", p.checkpoints->num_slots,
                   " is not the number of checkpoints ", checkpoints);
  return {};
}

void count_chunks(Plan* plan) {
  plan->chunk_offsets.assign(plan->cu_seqlens.size(), 0);
  for (std::size_t n = 0; n + 1 < plan->cu_seqlens.size(); ++n) {
    const int64_t length = plan->cu_seqlens[n + 1] - plan->cu_seqlens[n];
    plan->chunk_offsets[n + 1] =
        plan->chunk_offsets[n] + (length + plan->chunk_size - 1) / plan->chunk_size;
  }
}

plan::Workload workload_of(const Plan& plan, std::size_t first, std::size_t last) {
  plan::Workload work;
  for (std::size_t n = first; n < last; ++n)
    work.lengths.push_back(plan.cu_seqlens[n + 1] - plan.cu_seqlens[n]);
  work.num_value_heads = plan.problem.num_value_heads;
  work.key_dim = plan.problem.key_dim;
  work.value_dim = plan.problem.value_dim;
  work.num_sms = plan.device.num_sms;
  return work;
}

plan::Partition apply_policy(const Plan& plan, const plan::Workload& work, bool one_kernel,
                             CostEstimate* cost) {
  switch (plan.options.context_parallel) {
    case ContextParallel::kOff: break;
    case ContextParallel::kFixed: return plan::fixed_partition(work, plan.options.num_segments);
    case ContextParallel::kFlashKda: return plan::flashkda_partition(work);
    case ContextParallel::kCula: return plan::cula_partition(work);
    case ContextParallel::kAuto:
      if (plan.device.kind == DeviceKind::kCuda)
        return plan::auto_partition(work, plan.device, one_kernel, cost);
      return {false, 64, 0, {"auto: the CPU never changes its algorithm by length or threads"}};
  }
  return {false, 64, 0, {"off: asked for"}};
}

/// Cuts sequence n into `count` segments of whole chunks.
void cut_sequence(Plan* plan, std::size_t n, plan::Partition partition, int64_t count) {
  const int64_t begin = plan->cu_seqlens[n];
  const int64_t end = plan->cu_seqlens[n + 1];
  // Policies count in chunks of their own; an implementation on a GPU cuts at its chunks only.
  if (plan->device.kind == DeviceKind::kCuda && count > 1) {
    partition.chunk_tokens = std::max(partition.chunk_tokens, plan->chunk_size);
    count = std::min(count, (end - begin + partition.chunk_tokens - 1) / partition.chunk_tokens);
  }
  const int64_t chunks = (end - begin + partition.chunk_tokens - 1) / partition.chunk_tokens;
  // The first one as it is asked for, the others as even as they go.
  const int64_t first = count > 1 ? partition.first_chunks : 0, even = count - (first > 0);
  const auto boundary = [&](int64_t s) {
    if (s == count) return end;
    const int64_t before = first == 0 ? chunks * s / even
                           : s == 0   ? 0
                                      : first + (chunks - first) * (s - 1) / even;
    return begin + before * partition.chunk_tokens;
  };
  for (int64_t s = 0; s < count; ++s)
    plan->segments.push_back({static_cast<int64_t>(n), boundary(s), boundary(s + 1)});
}

void drop_segments(Plan* plan) {
  plan->segmented = plan->transitions_stop = false;
  plan->segments.clear();
  plan->segment_offsets.clear();
  plan->segment_chunks = 0;
}

/// Tokens between looks at transitions, joined in one pass; 0 where they must not stop, or where
/// whether they do would depend on what else is in the batch.
int64_t look_tokens_of(const Implementation& row, const Plan& plan) {
  const Problem& p = plan.problem;
  return stage::transition_norm_never_grows(p) && !p.batch_invariant ? row.norm_check_tokens : 0;
}

/// One stream of those that stop is all that a cluster takes.
bool transitions_fit(const Plan& plan) {
  const auto behind = static_cast<int64_t>(plan.segments.size()) - plan.problem.num_sequences;
  return 2 * behind * plan.problem.num_value_heads <= plan.device.num_sms;
}

/// Without batch_invariant one decision for the batch; with it one for each sequence alone.
/// `norm_check_tokens`: of the one kernel.
Status make_segments(bool one_kernel, int64_t norm_check_tokens, Plan* plan) {
  const std::size_t N = plan->cu_seqlens.size() - 1;
  const bool alone = plan->problem.batch_invariant;
  const int64_t fixed =
      plan->options.context_parallel == ContextParallel::kFixed ? plan->options.num_segments : 0;
  plan::Partition partition;
  if (!alone || N == 0) {
    plan::Workload work = workload_of(*plan, 0, N);
    work.norm_check_tokens = norm_check_tokens;
    partition = N == 0 ? plan::Partition{false, 64, 0, {"no sequences"}}
                       : apply_policy(*plan, work, one_kernel, &plan->cost);
    plan->reasons = partition.reasons;
    plan->transitions_stop = partition.transitions_stop;
  } else {
    plan->reasons.push_back("batch_invariant: each sequence is planned as if it were alone");
  }
  for (std::size_t n = 0; n < N; ++n) {
    if (alone) {
      CostEstimate cost;
      partition = apply_policy(*plan, workload_of(*plan, n, n + 1), one_kernel, &cost);
      if (plan->reasons.size() < 9)
        for (const std::string& reason : partition.reasons)
          plan->reasons.push_back(cat("sequence ", n, ": ", reason));
    }
    const int64_t tokens = plan->cu_seqlens[n + 1] - plan->cu_seqlens[n];
    const int64_t count = partition.on ? plan::num_segments_of(partition, tokens, fixed) : 1;
    plan->segment_chunks = std::max(plan->segment_chunks, partition.segment_chunks);
    plan->segment_offsets.push_back(static_cast<int64_t>(plan->segments.size()));
    cut_sequence(plan, n, partition, count);
    plan->segmented |=
        static_cast<int64_t>(plan->segments.size()) > plan->segment_offsets.back() + 1;
    if (static_cast<int64_t>(plan->segments.size()) > kMaxSegments && plan->segmented)
      return invalid("context_parallel: more than ", kMaxSegments, " segments");
  }
  plan->segment_offsets.push_back(static_cast<int64_t>(plan->segments.size()));
  plan->transitions_stop = plan->transitions_stop && transitions_fit(*plan);
  if (!plan->segmented) drop_segments(plan);
  return {};
}

void check_intra_form(const Implementation* chosen, Plan* plan) {
  if (plan->options.intra_form != IntraForm::kAuto && chosen && !chosen->stage_sizes)
    plan->reasons.push_back(cat("intra_form: ", chosen->name, " has one form"));
}

/// Why segments are not joined in one pass; empty if they are.
std::string one_pass_declined(const Implementation& row, const Problem& problem) {
  if (!row.segment_correct) return cat(row.name, " has no correction stage");
  if (problem.checkpoints) return "checkpoints need the true start state";
  return row.decline_one_pass ? row.decline_one_pass(problem) : std::string();
}

/// Of segments that were asked for: wherever a transition could stop before its segment ends.
bool transitions_can_stop(const Implementation& row, const Plan& plan) {
  const int64_t norm_check_tokens = look_tokens_of(row, plan);
  if (norm_check_tokens == 0 || !transitions_fit(plan)) return false;
  return std::any_of(plan.segments.begin(), plan.segments.end(), [&](const Segment& segment) {
    return segment.begin > plan.cu_seqlens[static_cast<std::size_t>(segment.sequence)] &&
           segment.end - segment.begin > 2 * norm_check_tokens;
  });
}

void check_segment_method(Plan* plan, const Implementation* chosen) {
  if (!plan->segmented) return;
  if (chosen && !chosen->segment_scan) {
    plan->reasons.push_back(cat(chosen->name, " has no segments: runs serially"));
    drop_segments(plan);
    return;
  }
  if (plan->options.segment_method != SegmentMethod::kOnePass || !chosen) return;
  const std::string reason = one_pass_declined(*chosen, plan->problem);
  if (reason.empty()) {
    plan->transitions_stop = transitions_can_stop(*chosen, *plan);
    return;
  }
  plan->reasons.push_back(cat("one pass declined: ", reason));
  plan->options.segment_method = SegmentMethod::kScanMergeForward;
}

/// The forward in one kernel, cut where that is left to the planner and gains.
Status plan_one_kernel(const Implementation& chosen, Plan* plan) {
  const std::size_t N = plan->cu_seqlens.size() - 1;
  const std::string reason = one_pass_declined(chosen, plan->problem);
  if (plan->options.context_parallel == ContextParallel::kAuto && reason.empty()) {
    KDA_RETURN_IF_ERROR(make_segments(true, look_tokens_of(chosen, *plan), plan));
    if (plan->segmented) plan->options.segment_method = SegmentMethod::kOnePass;
  } else {
    plan->cost = plan::predict_one_kernel(workload_of(*plan, 0, N), plan->device);
    plan->reasons.push_back(reason.empty() ? "off: asked for"
                                           : cat("one pass declined: ", reason, "; not cut"));
  }
  plan->num_v_splits = plan::tiles_of(plan->problem.value_dim);
  return {};
}

void list_stages(const Implementation* chosen, Plan* plan) {
  const Problem& p = plan->problem;
  const int64_t heads = p.num_value_heads;
  if (p.operation == Operation::kDecode) {
    plan->stages.push_back(
        {"decode", p.num_sequences * heads, "one (sequence, value head) a task"});
    return;
  }
  if (chosen && chosen->stage_sizes)
    plan->stages.push_back({"chunk_intra", static_cast<int64_t>(chosen->stage_sizes(*plan).tiles),
                            plan->options.intra_form == IntraForm::kToken
                                ? "factors of one (chunk, value head) a task, by tokens"
                                : "factors of one (chunk, value head) a task"});
  if (!plan->segmented) {
    plan->stages.push_back({"forward", p.num_sequences * heads * plan->num_v_splits,
                            "one (sequence, value head, V part) a task"});
    return;
  }
  const auto segments = static_cast<int64_t>(plan->segments.size());
  const bool one_pass = plan->options.segment_method == SegmentMethod::kOnePass;
  if (one_pass && plan->device.kind == DeviceKind::kCuda) {
    const int64_t behind = segments - p.num_sequences;
    plan->stages.push_back({"segment_scan", (segments + behind) * heads * plan->num_v_splits,
                            cat("outputs from zero, and M with its outputs behind first segments",
                                plan->transitions_stop ? ", until M is small" : "")});
    plan->stages.push_back(
        {"segment_merge", p.num_sequences * heads, "start states of third segments on, in order"});
    plan->stages.push_back({"segment_correct", behind * heads, "o += Qt S_in; final states"});
    return;
  }
  plan->stages.push_back({"segment_scan", 2 * segments * heads,
                          one_pass ? "B with outputs from zero, and M with its outputs"
                                   : "B and M of every segment but the last of its sequence"});
  plan->stages.push_back({"segment_merge", p.num_sequences * heads, "start states, in order"});
  plan->stages.push_back({one_pass ? "segment_correct" : "forward",
                          segments * heads * plan->num_v_splits,
                          one_pass ? "o += Qt S_in" : "every segment from its start state"});
}

Status size_workspace(const Implementation* chosen, Plan* plan) {
  const Problem& p = plan->problem;
  const auto heads = static_cast<std::size_t>(p.num_value_heads);
  const auto K = static_cast<std::size_t>(p.key_dim);
  const auto V = static_cast<std::size_t>(p.value_dim);
  const auto tokens = static_cast<std::size_t>(p.batch * p.num_tokens);
  const std::size_t segments = plan->segments.size();
  bool fits = true;
  const auto add = [&](const char* name, std::size_t count, std::size_t size) {
    fits = fits && plan::add_block(*plan, name, count, size);
  };
  namespace block = plan::block;
  if (chosen) add(block::kThreadScratch, 1, chosen->scratch_bytes(p, plan->num_threads));
  if (chosen && chosen->add_blocks) fits = fits && chosen->add_blocks(*plan);
  const bool decode = p.operation == Operation::kDecode;
  const auto& written = decode && !p.final_state ? p.initial_state : p.final_state;
  // Slots written twice are looked for on the host only.
  const bool cpu = plan->device.kind == DeviceKind::kCpu;
  const bool indexed = cpu && ((p.initial_state && p.initial_state->indexed) ||
                               (p.final_state && p.final_state->indexed) ||
                               (p.checkpoints && p.checkpoints->indexed));
  if (written && indexed)
    add(block::kFinalSlotMarks, static_cast<std::size_t>(written->num_slots), sizeof(int32_t));
  if (p.checkpoints && indexed)
    add(block::kCheckpointSlotMarks, static_cast<std::size_t>(p.checkpoints->num_slots),
        sizeof(int32_t));
  if (plan->segmented) {
    const bool one_pass = plan->options.segment_method == SegmentMethod::kOnePass;
    // GPUs: of the segments behind the first ones of their sequences.
    const std::size_t joined =
        one_pass && !cpu ? segments - static_cast<std::size_t>(p.num_sequences) : segments;
    add(block::kSegmentM, joined * heads, K * K * sizeof(float));
    add(block::kSegmentB, joined * heads, K * V * sizeof(float));
    add(block::kSegmentStates, joined * heads, K * V * sizeof(float));
    if (one_pass && cpu) {
      add(block::kOutputFromZero, tokens * heads, V * sizeof(float));
      add(block::kTransitionOutput, tokens * heads, K * sizeof(float));
      add(block::kExitToken, segments * heads, sizeof(int64_t));
    }
  }
  return fits ? Status{} : invalid("workspace: more than 2^62 bytes");
}

/// GPUs: halves of V go to two SMs while that fills idle ones. (CPU: split at run time.)
int64_t gpu_v_splits(const Plan& plan) {
  const auto units =
      static_cast<int64_t>(plan.segmented ? plan.segments.size() : plan.cu_seqlens.size() - 1) *
      plan.problem.num_value_heads;
  return plan.problem.value_dim >= 128 && 2 * units <= plan.device.num_sms ? 2 : 1;
}

Status check_options(const DeviceFacts& device, const PlanOptions& options) {
  if (device.num_sms < 1 || device.num_sms > 65535)
    return invalid("device: num_sms = ", device.num_sms, " is outside 1..65535");
  if (options.num_threads < 0 || options.num_threads > 1024)
    return invalid("num_threads: ", options.num_threads, " is outside 0..1024");
  const auto policy = static_cast<int32_t>(options.context_parallel);
  if (policy < 0 || policy > static_cast<int32_t>(ContextParallel::kCula))
    return invalid("context_parallel: value ", policy, " is unknown");
  const auto form = static_cast<int32_t>(options.intra_form);
  if (form < 0 || form > static_cast<int32_t>(IntraForm::kToken))
    return invalid("intra_form: value ", form, " is unknown");
  if (options.context_parallel == ContextParallel::kFixed &&
      (options.num_segments < 1 || options.num_segments > kMaxSegments))
    return invalid("num_segments: ", options.num_segments, " is outside 1..", kMaxSegments);
  return {};
}

Status build_plan(const Problem& problem, const std::span<const int64_t>* cu_seqlens,
                  const DeviceFacts& device, const PlanOptions& options, Plan* plan) {
  KDA_RETURN_IF_ERROR(validate(problem));
  KDA_RETURN_IF_ERROR(check_options(device, options));
  plan->problem = problem;
  plan->options = options;
  plan->device = device;
  plan->num_threads = options.num_threads > 0 ? options.num_threads : default_num_threads();
  const Implementation* chosen = nullptr;
  KDA_RETURN_IF_ERROR(choose_implementation(options, plan, &chosen));
  plan->chunk_size = chosen ? chosen->chunk_size : 64;
  if (cu_seqlens) {
    KDA_RETURN_IF_ERROR(set_lengths(*cu_seqlens, plan));
    KDA_RETURN_IF_ERROR(check_plan_lengths(*plan));
    count_chunks(plan);
    if (chosen && chosen->yield && !plan::asks_for_segments(options)) {
      KDA_RETURN_IF_ERROR(plan_one_kernel(*chosen, plan));
    } else if (problem.operation == Operation::kForward) {
      KDA_RETURN_IF_ERROR(make_segments(false, 0, plan));
      check_segment_method(plan, chosen);
      check_intra_form(chosen, plan);
      if (device.kind == DeviceKind::kCuda) plan->num_v_splits = gpu_v_splits(*plan);
    }
  } else {
    plan->reasons.push_back("planned from bounds: lengths unknown, so nothing is cut");
  }
  list_stages(chosen, plan);
  return size_workspace(chosen, plan);
}

Status plan_into(const Problem& problem, const std::span<const int64_t>* cu_seqlens,
                 const DeviceFacts& device, const PlanOptions& options, Plan* plan) noexcept {
  return guarded([&] {
    if (!plan) return invalid("plan: is null");
    Plan made;
    KDA_RETURN_IF_ERROR(build_plan(problem, cu_seqlens, device, options, &made));
    *plan = std::move(made);
    return Status{};
  });
}

}  // namespace

DeviceFacts cpu_facts() { return {}; }

DeviceFacts gpu_facts(int32_t num_sms, int32_t compute_capability) {
  DeviceFacts facts;
  facts.kind = DeviceKind::kCuda;
  facts.name = cat("sm_", compute_capability, ", ", num_sms, " SMs");
  facts.compute_capability = compute_capability;
  facts.num_sms = num_sms;
  facts.memory_bytes_per_second = kH200BytesPerSecond * num_sms / kH200Sms;
  return facts;
}

Status make_plan(const Problem& problem, std::span<const int64_t> cu_seqlens,
                 const DeviceFacts& device, const PlanOptions& options, Plan* plan) noexcept {
  return plan_into(problem, &cu_seqlens, device, options, plan);
}

Status make_plan_from_bounds(const Problem& problem, const DeviceFacts& device,
                             const PlanOptions& options, Plan* plan) noexcept {
  const std::span<const int64_t> none;
  return plan_into(problem, problem.cu_seqlens ? nullptr : &none, device, options, plan);
}

Status supported(const Problem& problem, const DeviceFacts& device) noexcept {
  return guarded([&] {
    Plan plan;
    plan.problem = problem;
    plan.device = device;
    KDA_RETURN_IF_ERROR(validate(problem));
    const Implementation* chosen = nullptr;
    KDA_RETURN_IF_ERROR(choose_implementation({}, &plan, &chosen));
    if (chosen) return Status{};
    std::string reasons;
    for (const Candidate& row : plan.candidates) reasons += cat("; ", row.name, " ", row.reason);
    return Status(StatusCode::kUnsupported,
                  cat("no implementation for ", device_kind_name(device.kind), reasons));
  });
}

std::vector<Candidate> implementations() {
  std::vector<Candidate> rows;
  for (const Implementation* row : stage::registry()) {
    const char* reason = row->unavailable();
    rows.push_back({row->name, reason == nullptr, reason ? reason : ""});
  }
  return rows;
}

}  // namespace kda
