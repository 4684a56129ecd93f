// SPDX-License-Identifier: Apache-2.0
// kda plan: what the planner would do on any device, without one.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "plan/builder.hpp"
#include "plan/cards.hpp"
#include "tools/kda/commands.hpp"
#include "tools/kda/execute.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {
namespace {

constexpr KeepPolicy kPolicies[] = {KeepPolicy::kNothing, KeepPolicy::kStates, KeepPolicy::kChunks};

struct PlanCommand {
  std::vector<int64_t> lengths;
  std::string device = "cuda", dtype = "bf16", gate_dtype, states = "fp32";
  int64_t num_heads = 0, num_value_heads = 0, key_dim = 128, value_dim = 128, tail = 0;
  int64_t most_cut_bytes = kMostCutBytes;
  int32_t num_sms = 132, compute_capability = 90;
  int32_t bandwidth = 0, megahertz = 0;  // 0: as gpu_facts() assumes
  OperationFlags operation;
  ScheduleFlags schedule;
  std::string keep = "states";
  bool explain = false, json = false, backward = false, bounds = false;

  /// A packed forward of dense tensors. Gates and beta come as logits, unless gates are log decays;
  /// q and k are normalised unless that is turned off.
  Problem problem(int64_t num_tokens) const {
    Problem p;
    p.num_tokens = num_tokens;
    p.num_sequences = static_cast<int64_t>(lengths.size());
    p.cu_seqlens = DType::kInt64;
    p.num_heads = num_heads;
    p.num_value_heads = num_value_heads == 0 ? num_heads : num_value_heads;
    p.key_dim = key_dim;
    p.value_dim = value_dim;
    check_multiple("--value-heads", p.num_value_heads, p.num_heads);
    const check::Overrides overrides = operation.overrides();
    p.qk_l2norm = true;
    p.gate_mode = GateMode::kBounded;
    if (overrides.gate != "log") p.beta_mode = BetaMode::kSigmoid;
    check::apply(overrides, &p);
    if (p.gate_mode != GateMode::kLog) p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
    p.batch_invariant = schedule.batch_invariant;
    const int64_t T = p.num_tokens, HV = p.num_value_heads;
    const DType type = check::parse_dtype(dtype);
    p.q = p.k = contiguous(type, {1, T, num_heads, key_dim});
    p.v = contiguous(type, {1, T, HV, value_dim});
    const DType gates = gate_dtype.empty() ? type : check::parse_dtype(gate_dtype);
    p.g =
        operation.head_gates ? head_gates(gates, 1, T, HV) : contiguous(gates, {1, T, HV, key_dim});
    p.beta = contiguous(type, {1, T, HV});
    p.o = contiguous(operation.output_dtype(p), {1, T, HV, value_dim});
    if (tail > 0) {
      p.initial_state = kda::states(p, DType::kFloat32, p.num_sequences);
      add_tails(&p, tail, parse_boundary_states(states));
    }
    return p;
  }

  DeviceFacts facts() const {
    if (device == "cpu") return cpu_facts();
    DeviceFacts card = gpu_facts(num_sms, compute_capability);
    if (bandwidth > 0) card.memory_bytes_per_second = plan::kCopyShare * bandwidth * 1e9;
    if (megahertz > 0) card.gigahertz = megahertz * 1e-3;
    return card;
  }

  PlanOptions plan_options() const {
    PlanOptions options = schedule.plan_options();
    options.most_cut_bytes = most_cut_bytes;
    return options;
  }

  Status forward_plan(const Problem& p, const std::vector<int64_t>& cu_seqlens,
                      const DeviceFacts& facts, const PlanOptions& options, Plan* plan) const {
    return bounds ? make_plan_from_bounds(p, facts, options, plan)
                  : make_plan(p, cu_seqlens, facts, options, plan);
  }

  /// Every gradient but those of states, dense, each of the type of its input, for a forward that
  /// keeps what `policy` says.
  Status backward_plan(const std::vector<int64_t>& cu_seqlens, const DeviceFacts& facts,
                       KeepPolicy policy, BackwardPlan* plan) const {
    const Problem p = problem(cu_seqlens.back());
    PlanOptions options = plan_options();
    options.keep = policy;
    Plan forward;
    KDA_RETURN_IF_ERROR(forward_plan(p, cu_seqlens, facts, options, &forward));
    const Gradients gradients{.d_o = p.o,
                              .d_final_state = {},
                              .dq = p.q,
                              .dk = p.k,
                              .dv = p.v,
                              .dg = p.g,
                              .dbeta = p.beta,
                              .dA_log = p.A_log,
                              .ddt_bias = {},
                              .d_initial_state = {}};
    return make_backward_plan(forward, gradients, plan_options(), plan);
  }

  void plan_backward(const std::vector<int64_t>& cu_seqlens, const DeviceFacts& facts) const {
    KeepPolicy chosen = KeepPolicy::kNothing;
    for (const KeepPolicy policy : kPolicies)
      if (plan::keep_name(policy) == keep) chosen = policy;
    BackwardPlan plan;
    throw_if_error(backward_plan(cu_seqlens, facts, chosen, &plan));
    if (json || !explain) return print_report((json ? plan.to_json() : plan.to_text()) + "\n");
    std::vector<std::vector<std::string>> rows = {
        {"kept by a forward", "bytes a token and head", "kept", "workspace", "together"}};
    for (const KeepPolicy policy : kPolicies) {
      const char* name = plan::keep_name(policy);
      BackwardPlan other;
      if (!backward_plan(cu_seqlens, facts, policy, &other).ok()) continue;  // not on this device
      const Plan& made = other.plan;
      rows.push_back({made.resolved.keep == policy
                          ? name
                          : cat(name, " (as ", plan::keep_name(made.resolved.keep), ")"),
                      fmt::format("{:.1f}", plan::bytes_a_token(made, made.saved_bytes)),
                      format_megabytes(made.saved_bytes), format_megabytes(made.workspace_bytes),
                      format_megabytes(made.saved_bytes + made.workspace_bytes)});
    }
    print_report(cat(plan.to_text(true), "\n", format_table(rows)));
  }

  void operator()() const {
    std::vector<int64_t> cu_seqlens = {0};
    for (const int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    const DeviceFacts facts = this->facts();
    if (backward) return plan_backward(cu_seqlens, facts);
    const Problem p = problem(cu_seqlens.back());
    const PlanOptions options = plan_options();
    Plan plan;
    throw_if_error(forward_plan(p, cu_seqlens, facts, options, &plan));
    print_report((json ? plan.to_json() : plan.to_text(explain)) + "\n");
  }
};

}  // namespace

void add_plan(CLI::App& app) {
  auto* sub = app.add_subcommand("plan", "Show the schedule for given lengths; needs no GPU");
  auto c = std::make_shared<PlanCommand>();
  add_seq_lens(*sub, &c->lengths)->required();
  add_heads(*sub, &c->num_heads)->required();
  add_value_heads(*sub, &c->num_value_heads);
  add_head_dim(*sub, "--key-dim", "K", &c->key_dim);
  add_head_dim(*sub, "--value-dim", "V", &c->value_dim);
  add_whole<int32_t>(*sub, "--sms", &c->num_sms, 1, 65535, "Multiprocessors of the GPU")
      ->default_str(cat(c->num_sms));
  add_whole<int32_t>(*sub, "--compute-capability", &c->compute_capability, 1, 999,
                     "Of the GPU, 10 major + minor")
      ->default_str(cat(c->compute_capability));
  add_whole<int32_t>(*sub, "--bandwidth", &c->bandwidth, 1, 100000,
                     "Of the GPU's memory in GB/s, as its data sheet has it (default: that of a "
                     "card of the compute capability, by multiprocessors)");
  add_whole<int32_t>(*sub, "--megahertz", &c->megahertz, 1, 100000,
                     "Clock of the GPU under load (default: that of such a card)");
  add_choice(*sub, "--device", &c->device, {"cuda", "cpu"}, "Plan for a GPU or for this CPU")
      ->default_str(c->device);
  add_choice(*sub, "--dtype", &c->dtype, kFloatTypes, "Of q, k, v, g, beta")->default_str(c->dtype);
  add_choice(*sub, "--gate-dtype", &c->gate_dtype, kFloatTypes, "Of g (default that of q)");
  c->operation.add_to(*sub);
  c->schedule.add_options_to(*sub);
  add_switch(*sub, "--explain", &c->explain, "Give the reasons, predicted times and segments");
  add_switch(*sub, "--json", &c->json, "The whole plan as JSON");
  auto* backward = add_switch(*sub, "--backward", &c->backward,
                              "Plan the backward, on this CPU unless --device says else");
  auto* bounds =
      add_switch(*sub, "--bounds", &c->bounds,
                 "Plan as if lengths were on the device alone: from their number and their sum");
  add_whole<int64_t>(*sub, "--most-cut-bytes", &c->most_cut_bytes, 0, INT64_MAX,
                     "Memory that segments may take there")
      ->needs(bounds)
      ->default_str(cat(c->most_cut_bytes));
  auto* tail = add_whole<int64_t>(
      *sub, "--tail", &c->tail, kTailBoundary, kMaxTailRows,
      "Plan a prefill into a pool of boundary states, with tails of so many rows");
  tail->excludes(backward);
  add_choice(*sub, "--boundary-states", &c->states, {"fp32", "bf16", "split"},
             "What the pool has in front of a tail; split: bf16, and 16 bits that folds read")
      ->needs(tail)
      ->default_str(c->states);
  add_choice(*sub, "--keep", &c->keep, {"nothing", "states", "chunks"},
             "What the forward keeps for its backward; on a GPU nothing, unless this says else")
      ->needs(backward)
      ->default_str(c->keep);
  sub->footer(R"(Examples:
  kda plan --heads 8 --seq-lens 65536 --sms 132 --explain
  kda plan --heads 4 --seq-lens 128K,10x1K --sms 152 --context-parallel cula --json
  kda plan --heads 8 --seq-lens 32K,1K --bounds --explain
  kda plan --heads 32 --seq-lens 64K --bounds --most-cut-bytes 500000000 --explain
  kda plan --heads 64 --seq-lens 8192 --compute-capability 86 --sms 84 --bandwidth 768 --explain
  kda plan --heads 4 --seq-lens 32K --backward --device cuda --bounds --explain
  kda plan --heads 16 --seq-lens 8192 --backend staged --gate softplus --gate-dtype fp32
  kda plan --heads 16 --value-heads 32 --seq-lens 8192 --head-gates --head-map tiled --explain)");
  sub->callback([c, sub] {
    if (c->backward && sub->count("--device") == 0) c->device = "cpu";
    if (c->device == "cuda" && sub->count("--keep") == 0) c->keep = "nothing";
    (*c)();
  });
}

}  // namespace kda::tools
