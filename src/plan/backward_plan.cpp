// SPDX-License-Identifier: Apache-2.0
// make_backward_plan(): a plan over the rows that have a backward, for a forward's plan.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/guard.hpp"
#include "core/json_writer.hpp"
#include "core/text.hpp"
#include "kda/backward.hpp"
#include "plan/builder.hpp"
#include "plan/planner.hpp"

namespace kda {
namespace {

/// Returns what the backward reads of a forward's problem: no outputs.
Problem inputs_of(const Problem& forward) {
  Problem p = forward;
  p.final_state.reset();
  p.checkpoints.reset();
  p.checkpoint_every = 0;
  p.checkpoint_offsets = false;
  if (!p.initial_state || !p.initial_state->indexed) p.first_slot = 0;
  return p;
}

/// Says what a forward of this problem can keep on its device; empty: no forward runs there.
std::string kept_there(const Plan& forward) {
  std::vector<std::string> names;
  for (const KeepPolicy policy : {KeepPolicy::kNothing, KeepPolicy::kStates, KeepPolicy::kChunks}) {
    PlanOptions options = forward.requested;
    options.keep = policy;
    const bool lengths = forward.lengths_known && forward.problem.cu_seqlens;
    Plan other;
    const Status status =
        lengths ? make_plan(forward.problem, forward.cu_seqlens, forward.device, options, &other)
                : make_plan_from_bounds(forward.problem, forward.device, options, &other);
    if (status.ok() && !other.implementation.empty()) names.emplace_back(plan::keep_name(policy));
  }
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i)
    text += cat(i == 0 ? "" : i + 1 < names.size() ? ", " : " and ", names[i]);
  return text;
}

/// Why a forward's plan has no implementation: the option, its value, and what is served.
Status not_served(const Plan& forward) {
  const DeviceFacts& device = forward.device;
  if (const std::string others = kept_there(forward); !others.empty())
    return Status(StatusCode::kUnsupported,
                  cat("keep: ", plan::keep_name(forward.requested.keep),
                      " cannot be kept for this problem on ", device.name, "; ", others, " can"));
  int32_t least = INT32_MAX;
  std::string reasons;
  for (const registry::Head* row : registry::heads(forward.problem.operation))
    if (row->device == device.kind) least = std::min(least, row->min_compute_capability);
  if (device.compute_capability < least)
    return Status(StatusCode::kUnsupported,
                  cat("compute_capability: ", device.compute_capability,
                      " is served by no forward; ", least, " and above are"));
  for (const Candidate& row : forward.candidates) reasons += cat("; ", row.name, " ", row.reason);
  return Status(StatusCode::kUnsupported,
                cat("forward: no implementation serves it on ", device.name, reasons));
}

class Hash {  // FNV-1a
 public:
  template <class Value>
  void add(const Value& value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < sizeof(value); ++i) value_ = (value_ ^ bytes[i]) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace

double plan::bytes_a_token(const Plan& plan, std::size_t bytes) {
  const int64_t tokens = plan.problem.batch * plan.problem.num_tokens;
  const int64_t all = tokens * plan.problem.num_value_heads;
  return all > 0 ? static_cast<double>(bytes) / static_cast<double>(all) : 0;
}

uint64_t plan_id(const Plan& forward) noexcept {
  const Problem& p = forward.problem;
  Hash hash;
  for (const int64_t size : {p.batch, p.num_tokens, p.num_heads, p.num_value_heads, p.key_dim,
                             p.value_dim, p.num_sequences, plan::kept_every(forward)})
    hash.add(size);
  for (const TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g, &p.beta}) hash.add(desc->dtype);
  hash.add(forward.resolved.keep);
  hash.add(p.head_map);
  hash.add(p.gate_mode);
  hash.add(p.beta_mode);
  hash.add(p.qk_l2norm);
  hash.add(effective_scale(p));
  hash.add(p.lower_bound);
  hash.add(p.A_log.has_value());
  hash.add(p.dt_bias.has_value());
  hash.add(p.initial_state.has_value());
  hash.add(p.initial_state_mask);
  hash.add(p.first_slot);
  for (const int64_t offset : forward.cu_seqlens) hash.add(offset);
  for (const char letter : forward.implementation) hash.add(letter);
  return hash.value();
}

Status make_backward_plan(const Plan& forward, const Gradients& gradients,
                          const PlanOptions& options, BackwardPlan* plan) noexcept {
  return guarded([&] {
    if (!plan) return invalid("plan: is null");
    KDA_RETURN_IF_ERROR(validate(BackwardProblem{forward.problem, gradients}));
    if (forward.implementation.empty()) return not_served(forward);
    PlanOptions wanted;
    wanted.backend = options.backend;
    wanted.num_threads = options.num_threads;
    wanted.keep = forward.resolved.keep;
    wanted.kept_state_every = forward.resolved.kept_state_every;
    wanted.context_parallel = forward.requested.context_parallel;
    wanted.num_segments = forward.requested.num_segments;
    wanted.spans = options.spans;
    wanted.most_cut_bytes = forward.requested.most_cut_bytes;
    const Problem p = inputs_of(forward.problem);
    const bool lengths = forward.lengths_known || !p.cu_seqlens;
    const std::span<const int64_t> cu_seqlens =
        p.cu_seqlens ? std::span<const int64_t>(forward.cu_seqlens) : std::span<const int64_t>();
    BackwardPlan made;
    KDA_RETURN_IF_ERROR(plan::plan_with(registry::backward_heads(), p,
                                        lengths ? &cu_seqlens : nullptr, forward.device, wanted,
                                        &made.plan, &gradients));
    if (made.plan.implementation.empty())
      return Status(StatusCode::kUnsupported, cat("backward: no implementation of this build for ",
                                                  device_kind_name(forward.device.kind)));
    made.gradients = gradients;
    made.forward_id = plan_id(forward);
    *plan = std::move(made);
    return Status{};
  });
}

std::string BackwardPlan::to_text(bool explain) const {
  return cat("backward, keep ", plan::keep_name(plan.resolved.keep), ": ",
             plan::bytes_a_token(plan, plan.saved_bytes), " bytes a token and head kept, ",
             plan::bytes_a_token(plan, plan.workspace_bytes), " of workspace\n",
             plan.to_text(explain));
}

std::string BackwardPlan::to_json() const {
  JsonWriter json;
  json.begin_object();
  json.member("keep", plan::keep_name(plan.resolved.keep));
  json.member("kept_state_every", plan.resolved.kept_state_every);
  json.member("saved_bytes", plan.saved_bytes);
  json.member("saved_bytes_per_token_head", plan::bytes_a_token(plan, plan.saved_bytes));
  json.member("workspace_bytes", plan.workspace_bytes);
  json.member("implementation", plan.implementation);
  json.member("num_threads", plan.num_threads);
  return json.end_object().take();
}

}  // namespace kda
