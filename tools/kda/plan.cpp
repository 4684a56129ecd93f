// SPDX-License-Identifier: Apache-2.0
// kda plan: what the planner would do on any device, without one.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "kda/commands.hpp"
#include "kda/flags.hpp"
#include "kda/options.hpp"
#include "kda/report.hpp"

namespace kda::tools {
namespace {

struct PlanCommand {
  std::vector<int64_t> lengths;
  std::string context_parallel = "auto", device = "cuda", gate = "bounded";
  int64_t num_heads = 0, num_value_heads = 0, key_dim = 128, value_dim = 128;
  int32_t num_sms = 132, num_threads = 0;
  bool batch_invariant = false, explain = false, json = false;

  void operator()() const {
    std::vector<int64_t> cu_seqlens = {0};
    for (const int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    Problem p;
    p.num_tokens = cu_seqlens.back();
    p.num_sequences = static_cast<int64_t>(lengths.size());
    p.cu_seqlens = DType::kInt64;
    p.num_heads = num_heads;
    p.num_value_heads = num_value_heads == 0 ? num_heads : num_value_heads;
    p.key_dim = key_dim;
    p.value_dim = value_dim;
    check_multiple("--value-heads", p.num_value_heads, p.num_heads);
    p.qk_l2norm = true;
    if (gate != "log") p.beta_mode = BetaMode::kSigmoid;
    if (gate == "bounded") p.gate_mode = GateMode::kBounded;
    if (gate == "softplus") p.gate_mode = GateMode::kSoftplus;
    if (gate != "log") p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
    p.batch_invariant = batch_invariant;
    const int64_t T = p.num_tokens, HV = p.num_value_heads;
    p.q = p.k = contiguous(DType::kBFloat16, {1, T, num_heads, key_dim});
    p.v = p.o = contiguous(DType::kBFloat16, {1, T, HV, value_dim});
    p.g = contiguous(DType::kBFloat16, {1, T, HV, key_dim});
    p.beta = contiguous(DType::kBFloat16, {1, T, HV});
    PlanOptions options;
    parse_context_parallel(context_parallel, &options);
    options.num_threads = num_threads;
    Plan plan;
    throw_if_error(make_plan(p, cu_seqlens, device == "cpu" ? cpu_facts() : gpu_facts(num_sms),
                             options, &plan));
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
  add_choice(*sub, "--device", &c->device, {"cuda", "cpu"}, "Plan for a GPU or for this CPU")
      ->default_str(c->device);
  add_choice(*sub, "--gate", &c->gate, {"bounded", "softplus", "log"},
             "How gates and beta come, as logits or with log as they are")
      ->default_str(c->gate);
  add_threads(*sub, &c->num_threads);
  add_context_parallel(*sub, &c->context_parallel);
  add_switch(*sub, "--batch-invariant", &c->batch_invariant, "Plan each sequence as if alone");
  add_switch(*sub, "--explain", &c->explain, "Give the reasons, predicted times and segments");
  add_switch(*sub, "--json", &c->json, "The whole plan as JSON");
  sub->footer(R"(Examples:
  kda plan --heads 8 --seq-lens 65536 --sms 132 --explain
  kda plan --heads 4 --seq-lens 128K,10x1K --sms 152 --context-parallel cula --json)");
  sub->callback([c] { (*c)(); });
}

}  // namespace kda::tools
