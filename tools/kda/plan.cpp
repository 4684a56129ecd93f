// SPDX-License-Identifier: Apache-2.0
// kda plan: what the planner would do on any device, without one.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "kda/commands.hpp"
#include "kda/flags.hpp"

namespace kda::tools {
namespace {

struct PlanCommand {
  std::string seq_lens, context_parallel = "auto", device = "cuda", gate = "bounded";
  int64_t num_heads = 0, num_value_heads = 0, key_dim = 128, value_dim = 128;
  int32_t num_sms = 132, num_threads = 0;
  bool batch_invariant = false, explain = false, json = false;

  void operator()() const {
    const std::vector<int64_t> lengths = parse_lengths(seq_lens);
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
    fmt::print("{}\n", json ? plan.to_json() : plan.to_text(explain));
  }
};

}  // namespace

void add_plan(CLI::App& app) {
  auto* sub = app.add_subcommand("plan", "Show the schedule for given lengths; needs no GPU");
  auto c = std::make_shared<PlanCommand>();
  sub->add_option("--seq-lens", c->seq_lens, "Lengths: 65536 or 128K,10x1K")->required();
  sub->add_option("--heads", c->num_heads, "q/k heads H")->required();
  sub->add_option("--value-heads", c->num_value_heads, "Value heads HV (default: H)");
  sub->add_option("--key-dim", c->key_dim, "K")->capture_default_str();
  sub->add_option("--value-dim", c->value_dim, "V")->capture_default_str();
  sub->add_option("--sms", c->num_sms, "Multiprocessors of the GPU")->capture_default_str();
  sub->add_option("--device", c->device, "Plan for a GPU or for this CPU")
      ->check(CLI::IsMember({"cuda", "cpu"}))
      ->capture_default_str();
  sub->add_option("--gate", c->gate,
                  "How gates and beta come: bounded or softplus logits, or log (beta as it is)")
      ->check(CLI::IsMember({"bounded", "softplus", "log"}))
      ->capture_default_str();
  sub->add_option("--threads", c->num_threads, "CPU threads (sizes the workspace)");
  sub->add_option("--context-parallel", c->context_parallel,
                  "auto, off, flashkda, cula, or segments a sequence")
      ->capture_default_str();
  sub->add_flag("--batch-invariant", c->batch_invariant, "Plan each sequence as if alone");
  sub->add_flag("--explain", c->explain, "Give the reasons, predicted times and segments");
  sub->add_flag("--json", c->json, "The whole plan as JSON");
  sub->footer(R"(Examples:
  kda plan --heads 8 --seq-lens 65536 --sms 132 --explain
  kda plan --heads 4 --seq-lens 128K,10x1K --sms 152 --context-parallel cula --json)");
  sub->callback([c] { (*c)(); });
}

}  // namespace kda::tools
