// SPDX-License-Identifier: Apache-2.0
// make_plan(): check the arguments, choose a row, let it plan. Host only.
#include <algorithm>
#include <string_view>

#include "core/guard.hpp"
#include "core/layout.hpp"
#include "core/lengths.hpp"
#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "plan/builder.hpp"
#include "plan/ledger.hpp"
#include "plan/planner.hpp"

namespace kda {
namespace {

using registry::Head;
using registry::Request;
using Heads = std::span<const Head* const>;

constexpr int64_t kDefaultChunk = 64;  // of a plan without an implementation

bool name_matches(std::string_view name, std::string_view wanted) {
  if (wanted.empty()) return true;
  const std::size_t at = name.find(wanted);
  if (at == std::string_view::npos) return false;
  const bool starts = at == 0 || name[at - 1] == '.';
  const std::size_t end = at + wanted.size();
  return starts && (end == name.size() || name[end] == '.');
}

/// The first tensor in fp64; null: there is none.
const char* float64_tensor(const Request& request) {
  const Problem& p = request.problem;
  const auto is_float64 = [](const auto& desc) { return desc && desc->dtype == DType::kFloat64; };
  const auto state = [](const std::optional<StateDesc>& of) { return of ? &of->tensor : nullptr; };
  for (const auto& [name, desc] :
       {std::pair{"q", &p.q}, std::pair{"k", &p.k}, std::pair{"v", &p.v}, std::pair{"g", &p.g},
        std::pair{"beta", &p.beta}, std::pair{"A_log", p.A_log ? &*p.A_log : nullptr},
        std::pair{"dt_bias", p.dt_bias ? &*p.dt_bias : nullptr},
        std::pair{"initial_state", state(p.initial_state)}})
    if (is_float64(desc)) return name;
  const Gradients* g = request.gradients;
  if (!g) {
    for (const auto& [name, desc] :
         {std::pair{"o", &p.o}, std::pair{"final_state", state(p.final_state)},
          std::pair{"checkpoints", state(p.checkpoints)}})
      if (is_float64(desc)) return name;
    return nullptr;
  }
  for (const auto& [name, desc] :
       {std::pair{"d_o", &g->d_o}, std::pair{"d_final_state", &g->d_final_state},
        std::pair{"dq", &g->dq}, std::pair{"dk", &g->dk}, std::pair{"dv", &g->dv},
        std::pair{"dg", &g->dg}, std::pair{"dbeta", &g->dbeta}, std::pair{"dA_log", &g->dA_log},
        std::pair{"ddt_bias", &g->ddt_bias}, std::pair{"d_initial_state", &g->d_initial_state}})
    if (is_float64(*desc)) return name;
  return nullptr;
}

std::string float64_reason(const char* tensor) {
  return cat(tensor, ": dtype fp64, only backend oracle computes it, on the CPU");
}

/// Why a row does not serve; empty if it does.
std::string decline_reason(const Head& row, const Request& request) {
  const DeviceFacts& device = request.device;
  const PlanOptions& options = request.options;
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
  if (options.keep != KeepPolicy::kNothing && !row.keeps_states && !row.decline_keep)
    return "keeps nothing for a backward";
  if (options.keep == KeepPolicy::kStates && !row.keeps_states)
    return "keeps states and errors of all chunks, or nothing";
  if (request.problem.tail && !row.decline_tail) return "has no tails";
  if (const char* tensor = row.float64 ? nullptr : float64_tensor(request))
    return float64_reason(tensor);
  // A plan for a GPU can be made on any machine; run() needs the device.
  if (!cuda)
    if (const char* reason = row.unavailable()) return reason;
  std::string reason = row.decline_device ? row.decline_device(device) : std::string();
  if (reason.empty() && row.decline) reason = row.decline(request.problem);
  if (reason.empty() && request.problem.tail) reason = row.decline_tail(request);
  if (reason.empty() && row.decline_options) reason = row.decline_options(options);
  if (reason.empty() && row.decline_keep && options.keep == KeepPolicy::kChunks)
    reason = row.decline_keep(request.problem);
  if (reason.empty() && row.decline_gradients && request.gradients)
    reason = row.decline_gradients(*request.gradients);
  if (reason.empty() && row.defer && options.backend.empty()) reason = row.defer(request);
  return reason;
}

/// Why no row serves the backend that was asked for.
Status backend_unavailable(Heads rows, const Request& request,
                           const std::vector<Candidate>& candidates) {
  const std::string& backend = request.options.backend;
  const auto meant = [&](const Head& row) {
    return row.device == request.device.kind && name_matches(row.name, backend);
  };
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (meant(*rows[i]))
      return Status(StatusCode::kUnavailable,
                    cat("backend: ", rows[i]->name, " cannot serve: ", candidates[i].reason));
  for (const Operation other : registry::kOperations)
    for (const Head* row : registry::heads(other))
      if (meant(*row))
        return Status(
            StatusCode::kUnavailable,
            cat("backend: ", row->name, " cannot serve: it has no ",
                request.gradients ? "backward" : operation_name(request.problem.operation)));
  return Status(StatusCode::kUnavailable,
                cat("backend: '", backend, "' names no implementation for ",
                    device_kind_name(request.device.kind), " (see kda info)"));
}

/// Why no row of the device serves a problem with a tail.
std::string why_no_tail(Heads rows, const Request& request,
                        const std::vector<Candidate>& candidates) {
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i]->device == request.device.kind && rows[i]->decline_tail)
      return candidates[i].reason;
  return cat("tail: ", operation_name(request.problem.operation), " has none on ",
             device_kind_name(request.device.kind));
}

/// The first row that serves; null: none does, in a build that can still print the plan.
Status choose(Heads rows, const Request& request, std::vector<Candidate>* candidates,
              const Head** chosen) {
  *chosen = nullptr;
  for (const Head* row : rows) {
    std::string reason = decline_reason(*row, request);
    const bool serves = reason.empty();
    if (serves && *chosen) reason = "a better one serves";
    candidates->push_back({row->name, serves && !*chosen, std::move(reason)});
    if (serves && !*chosen) *chosen = row;
  }
  if (!*chosen && !request.options.backend.empty())
    return backend_unavailable(rows, request, *candidates);
  if (const char* tensor = *chosen ? nullptr : float64_tensor(request))
    return Status(StatusCode::kUnsupported, float64_reason(tensor));
  if (!*chosen && request.problem.tail)
    return Status(StatusCode::kUnsupported, why_no_tail(rows, request, *candidates));
  return {};
}

/// Ok where keeping what the request asks for is worth it.
Status reason_to_keep_nothing(const Head& row, const Request& request) {
  const PlanOptions& options = request.options;
  if (options.keep != KeepPolicy::kChunks || !options.backend.empty() || !row.defer_keep) return {};
  const std::string reason = row.defer_keep(request);
  return reason.empty() ? Status{} : Status(StatusCode::kUnsupported, cat("keep: ", reason));
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
  KDA_RETURN_IF_ERROR(check_lengths(p.num_sequences, p.num_tokens, [&](int64_t n) {
    return cu_seqlens[static_cast<std::size_t>(n)];
  }));
  plan->cu_seqlens.assign(cu_seqlens.begin(), cu_seqlens.end());
  return {};
}

Status check_plan_lengths(const Plan& plan) {
  const Problem& p = plan.problem;
  int64_t checkpoints = 0;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n) {
    const int64_t length = plan.cu_seqlens[n + 1] - plan.cu_seqlens[n];
    if (const int64_t most = most_decode_tokens(p);
        p.operation == Operation::kDecode && length > most)
      return invalid(
          "cu_seqlens: ", p.tail ? cat("a tail of R = ", p.tail->rows, " rows") : "decode",
          " takes at most ", most, " tokens a sequence, sequence ", n, " has ", length);
    if (p.operation == Operation::kDecode && has_token_columns(p) && length > p.state_index_columns)
      return invalid("state_index_columns: S = ", p.state_index_columns, " is below the ", length,
                     " tokens of sequence ", n);
    checkpoints += num_checkpoints(p, length);
  }
  if (p.checkpoints && !p.checkpoints->indexed && p.checkpoints->num_slots != checkpoints)
    return invalid("checkpoints: num_slots = ", p.checkpoints->num_slots,
                   " is not the number of checkpoints ", checkpoints);
  return {};
}

void book_checkpoint_places(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  if (!p.checkpoint_offsets) return;
  int64_t places = p.batch * p.num_tokens / p.checkpoint_every;  // at most, without lengths
  if (plan.lengths_known) {
    places = 0;
    for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
      places += num_checkpoints(p, plan.cu_seqlens[n + 1] - plan.cu_seqlens[n]);
  }
  builder.book(plan::block::kCheckpointPlaces, static_cast<std::size_t>(places), sizeof(int32_t));
}

void count_chunks(Plan* plan) {
  plan->chunk_offsets.assign(plan->cu_seqlens.size(), 0);
  for (std::size_t n = 0; n + 1 < plan->cu_seqlens.size(); ++n) {
    const int64_t length = plan->cu_seqlens[n + 1] - plan->cu_seqlens[n];
    plan->chunk_offsets[n + 1] =
        plan->chunk_offsets[n] + (length + plan->chunk_size - 1) / plan->chunk_size;
  }
}

Status check_options(const Problem& problem, const DeviceFacts& device,
                     const PlanOptions& options) {
  if (device.num_sms < 1 || device.num_sms > 65535)
    return invalid("device: num_sms = ", device.num_sms, " is outside 1..65535");
  // Predicted times are divided by rates.
  const auto is_rate = [](double x, double least, double most) {
    return x == 0 || (x >= least && x <= most);
  };
  if (const double rate = device.memory_bytes_per_second; !is_rate(rate, 1e6, 1e18))
    return invalid("device: memory_bytes_per_second = ", rate, " is neither 0 nor in 1e6..1e18");
  if (const double clock = device.gigahertz; !is_rate(clock, 1e-3, 1e3))
    return invalid("device: gigahertz = ", clock, " is neither 0 nor in 0.001..1000");
  if (options.num_threads < 0 || options.num_threads > 1024)
    return invalid("num_threads: ", options.num_threads, " is outside 0..1024");
  const auto policy = static_cast<int32_t>(options.context_parallel);
  if (policy < 0 || policy > static_cast<int32_t>(SegmentPolicy::kCula))
    return invalid("context_parallel: value ", policy, " is unknown");
  const auto form = static_cast<int32_t>(options.intra_form);
  if (form < 0 || form > static_cast<int32_t>(IntraForm::kToken))
    return invalid("intra_form: value ", form, " is unknown");
  const auto keep = static_cast<int32_t>(options.keep);
  if (keep < 0 || keep > static_cast<int32_t>(KeepPolicy::kChunks))
    return invalid("keep: value ", keep, " is unknown");
  const int64_t every = options.kept_state_every;
  if (every < 0 || every > INT32_MAX || every % kKeptStateMultiple != 0)
    return invalid("kept_state_every: ", every, " is not a positive multiple of ",
                   kKeptStateMultiple, " (0: ", kKeptStateEvery, ")");
  if (options.most_cut_bytes < 0)
    return invalid("most_cut_bytes: ", options.most_cut_bytes, " is negative");
  if (options.context_parallel == SegmentPolicy::kFixed &&
      (options.num_segments < 1 || options.num_segments > plan::kMaxSegments))
    return invalid("num_segments: ", options.num_segments, " is outside 1..", plan::kMaxSegments);
  if (problem.operation == Operation::kDecode && options.keep != KeepPolicy::kNothing)
    return invalid("keep: belongs to forward, decode has no backward");
  if (problem.tail && options.keep != KeepPolicy::kNothing)
    return invalid("keep: a forward with a tail has no backward");
  return {};
}

Status no_phases(const Plan& plan, const char* operation, const std::string& why) {
  return Status(StatusCode::kUnsupported, cat("spans: ", plan.implementation, " has no ", operation,
                                              " in two phases", why.empty() ? "" : "; ", why));
}

/// That the gradients behind sequences may come later, where they do.
Status check_backward_spans(const Plan& plan, const Gradients& gradients) {
  if (!gradients.d_final_state) return invalid("spans: belongs to a backward with d_final_state");
  if (!plan.lengths_known) return invalid("spans: needs lengths that are known");
  const registry::BackwardRow* row =
      registry::find_row(registry::backward_rows(), plan.implementation);
  if (!row || !row->decline_phases) return no_phases(plan, "backward", "");
  const std::string why = row->decline_phases(plan);
  return why.empty() ? Status{} : no_phases(plan, "backward", why);
}

/// That the states before sequences may come later, where they do.
Status check_spans(const Plan& plan, const Gradients* gradients) {
  if (!plan.requested.spans) return {};
  if (gradients) return check_backward_spans(plan, *gradients);
  if (plan.problem.operation != Operation::kForward || plan.problem.initial_state)
    return invalid("spans: belongs to a forward without initial states");
  if (!plan.lengths_known) return invalid("spans: needs lengths that are known");
  const registry::ForwardRow* row =
      registry::find_row(registry::forward_rows(), plan.implementation);
  if (row && row->spans && row->spans->begin && plan.segmented &&
      plan.resolved.segment_method == SegmentMethod::kOnePass)
    return {};
  return no_phases(plan, "forward", plan.reasons.empty() ? "" : plan.reasons.back());
}

/// Says what is left to say once the row has planned.
void resolve_options(Plan* plan) {
  plan->resolved.backend = plan->implementation;
  if (!plan->segmented) {
    plan->resolved.context_parallel = SegmentPolicy::kOff;
    plan->resolved.num_segments = 0;
  }
}

/// How the device has a forward with a tail, where that is around one without; else null.
const registry::TailForward* tail_forward(const Problem& p, const DeviceFacts& device) {
  return p.tail && p.operation == Operation::kForward ? registry::tail_forward(device.kind)
                                                      : nullptr;
}

Status build_plan(Heads rows, const Problem& problem, const std::span<const int64_t>* cu_seqlens,
                  const DeviceFacts& device, const PlanOptions& options, Plan* plan,
                  const Gradients* gradients);

/// Plans the forward inside, from bounds, for `plan`, which has all that does not depend on a row.
/// The row that is chosen for it serves both.
Status plan_around(const registry::TailForward& tail, Heads rows, const Request& request,
                   Plan* plan) {
  if (std::string reason = tail.decline(request); !reason.empty())
    return Status(StatusCode::kUnsupported, std::move(reason));
  auto inner = std::make_shared<Plan>();
  KDA_RETURN_IF_ERROR(build_plan(rows, tail.inner(request.problem), nullptr, request.device,
                                 request.options, inner.get(), nullptr));
  plan->implementation = inner->implementation;
  plan->resolved = inner->resolved;
  plan->candidates = inner->candidates;
  plan->chunk_size = inner->chunk_size;
  plan->device_cut = inner->device_cut;
  plan->reasons = inner->reasons;
  plan->inner = inner;
  if (plan->lengths_known) count_chunks(plan);
  const auto chosen = std::find_if(
      rows.begin(), rows.end(), [&](const Head* row) { return row->name == plan->implementation; });
  if (chosen == rows.end()) return {};
  plan::PlanBuilder builder(**chosen, nullptr, plan);
  tail.plan(builder, *inner);
  return builder.status();
}

Status build_plan(Heads rows, const Problem& problem, const std::span<const int64_t>* cu_seqlens,
                  const DeviceFacts& device, const PlanOptions& options, Plan* plan,
                  const Gradients* gradients) {
  KDA_RETURN_IF_ERROR(validate(problem));
  KDA_RETURN_IF_ERROR(check_options(problem, device, options));
  plan->problem = problem;
  plan->requested = plan->resolved = options;
  plan->device = device;
  plan->num_threads = options.num_threads > 0 ? options.num_threads : default_num_threads();
  plan->resolved.num_threads = plan->num_threads;
  if (options.keep == KeepPolicy::kChunks) plan->resolved.keep = KeepPolicy::kStates;
  if (options.kept_state_every == 0) plan->resolved.kept_state_every = kKeptStateEvery;
  if (cu_seqlens) {
    KDA_RETURN_IF_ERROR(set_lengths(*cu_seqlens, plan));
    KDA_RETURN_IF_ERROR(check_plan_lengths(*plan));
  } else {
    plan->reasons.push_back("planned from bounds: lengths unknown");
  }
  const Request request{problem, device, options, gradients, plan->cu_seqlens};
  if (const auto* tail = tail_forward(problem, device))
    return plan_around(*tail, rows, request, plan);
  const Head* chosen = nullptr;
  KDA_RETURN_IF_ERROR(choose(rows, request, &plan->candidates, &chosen));
  plan->chunk_size = chosen ? chosen->chunk_size : kDefaultChunk;
  if (cu_seqlens) count_chunks(plan);
  if (chosen) {
    plan->implementation = chosen->name;
    plan::PlanBuilder builder(*chosen, gradients, plan);
    chosen->plan(builder);
    if (!plan->lengths_known && !plan->device_cut.on)
      builder.reason(gradients == nullptr && plan::asks_for_segments(plan->requested)
                         ? "segments that are asked for need lengths on the host; nothing is cut"
                         : "nothing is cut");
    if (gradients == nullptr && !chosen->takes_offsets) book_checkpoint_places(builder);
    KDA_RETURN_IF_ERROR(builder.status());
    KDA_RETURN_IF_ERROR(check_spans(*plan, gradients));
    if (const char* tensor = float64_tensor(request)) builder.reason(float64_reason(tensor));
  }
  resolve_options(plan);
  return {};
}

}  // namespace

namespace plan {

Status plan_with(std::span<const registry::Head* const> rows, const Problem& problem,
                 const std::span<const int64_t>* cu_seqlens, const DeviceFacts& device,
                 const PlanOptions& options, Plan* plan, const Gradients* gradients) noexcept {
  return guarded([&] {
    if (!plan) return invalid("plan: is null");
    Plan made;
    KDA_RETURN_IF_ERROR(build_plan(rows, problem, cu_seqlens, device, options, &made, gradients));
    *plan = std::move(made);
    return Status{};
  });
}

}  // namespace plan

DeviceFacts cpu_facts() { return {}; }

Status make_plan(const Problem& problem, std::span<const int64_t> cu_seqlens,
                 const DeviceFacts& device, const PlanOptions& options, Plan* plan) noexcept {
  return plan::plan_with(registry::heads(problem.operation), problem, &cu_seqlens, device, options,
                         plan);
}

Status make_plan_from_bounds(const Problem& problem, const DeviceFacts& device,
                             const PlanOptions& options, Plan* plan) noexcept {
  const std::span<const int64_t> none;
  return plan::plan_with(registry::heads(problem.operation), problem,
                         problem.cu_seqlens ? nullptr : &none, device, options, plan);
}

Status supported(const Problem& problem, const DeviceFacts& device,
                 const PlanOptions& options) noexcept {
  return guarded([&] {
    KDA_RETURN_IF_ERROR(validate(problem));
    PlanOptions asked;
    asked.backend = options.backend;
    asked.keep = options.keep, asked.kept_state_every = options.kept_state_every;
    KDA_RETURN_IF_ERROR(check_options(problem, device, asked));
    const auto* tail = tail_forward(problem, device);
    if (tail)
      if (std::string reason = tail->decline({problem, device, asked}); !reason.empty())
        return Status(StatusCode::kUnsupported, std::move(reason));
    const Problem served = tail ? tail->inner(problem) : problem;
    const Request request{served, device, asked};
    std::vector<Candidate> candidates;
    const Head* chosen = nullptr;
    KDA_RETURN_IF_ERROR(choose(registry::heads(problem.operation), request, &candidates, &chosen));
    if (chosen) return reason_to_keep_nothing(*chosen, request);
    std::string reasons;
    for (const Candidate& row : candidates) reasons += cat("; ", row.name, " ", row.reason);
    return Status(StatusCode::kUnsupported,
                  cat("no implementation for ", device_kind_name(device.kind), reasons));
  });
}

std::vector<Candidate> implementations() {
  std::vector<Candidate> rows;
  for (const Operation operation : registry::kOperations)
    for (const Head* row : registry::heads(operation)) {
      const auto same = [&](const Candidate& seen) { return seen.name == row->name; };
      if (std::any_of(rows.begin(), rows.end(), same)) continue;
      const char* reason = row->unavailable();
      rows.push_back({row->name, reason == nullptr, reason ? reason : ""});
    }
  return rows;
}

}  // namespace kda
