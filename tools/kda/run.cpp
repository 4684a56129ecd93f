// SPDX-License-Identifier: Apache-2.0
// kda run: inputs in, outputs out.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "tools/kda/commands.hpp"
#include "tools/kda/execute.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {
namespace {

struct RunCommand {
  RunFlags flags;
  std::string output;
  bool json = false, backward = false;

  void operator()() {
    io::OutputFile out(output);
    if (backward) return run_backward(out);
    check::Inputs inputs = flags.load();
    const Execution execution =
        execute(&inputs, flags.output_dtype(inputs.problem), flags.schedule.device_facts(),
                flags.schedule.plan_options());
    io::write_safetensors(out, check::file_from_outputs(inputs.problem, execution.outputs));
    const std::string report =
        json ? to_json(inputs.problem, execution) : to_text(inputs.problem, execution, out.label());
    out.commit();
    print_report(report, out.is_stdout());
  }

  void run_backward(io::OutputFile& out) {
    check::GradientBuffers gradients;
    const check::Inputs inputs = flags.load(&gradients);
    const BackwardExecution execution = execute_backward(inputs, flags.schedule.device_facts(),
                                                         flags.schedule.plan_options(), &gradients);
    const io::SafetensorsFile file = check::file_from_gradients(inputs.problem, gradients);
    io::write_safetensors(out, file);
    std::string names;
    for (const auto& [name, tensor] : file.tensors) names += cat(names.empty() ? "" : " ", name);
    const std::string& implementation = execution.plan.plan.implementation;
    const double rate = tokens(inputs.problem) / execution.seconds;
    const std::string report =
        json ? json_text({{"input", flags.input},
                          {"output", output},
                          {"implementation", implementation},
                          {"gradients", names},
                          {"num_threads", execution.plan.plan.num_threads},
                          {"workspace_bytes", execution.plan.plan.workspace_bytes},
                          {"seconds", execution.seconds},
                          {"tokens_per_second", rate}})
             : fmt::format("{}: backward\n{}: {} ({} tokens/s)\n{}: {}\n", flags.input,
                           implementation, format_seconds(execution.seconds), format_count(rate),
                           out.label(), names);
    out.commit();
    print_report(report, out.is_stdout());
  }

  std::string to_json(const Problem& p, const Execution& execution) const {
    return json_text({{"input", flags.input},
                      {"output", output},
                      {"implementation", execution.plan.implementation},
                      {"batch", p.batch},
                      {"num_tokens", p.num_tokens},
                      {"num_sequences", p.num_sequences},
                      {"num_heads", p.num_heads},
                      {"num_value_heads", p.num_value_heads},
                      {"key_dim", p.key_dim},
                      {"value_dim", p.value_dim},
                      {"out_dtype", dtype_name(p.o.dtype)},
                      {"num_segments", execution.plan.segments.size()},
                      {"num_threads", execution.plan.num_threads},
                      {"seconds", execution.seconds},
                      {"tokens_per_second", tokens(p) / execution.seconds}});
  }

  std::string to_text(const Problem& p, const Execution& execution,
                      const std::string& label) const {
    return fmt::format(
        "{}: B={} T={} N={} H={} HV={} K={} V={}, gate {}\n{}: {} ({} tokens/s){}\n{}: o {}, "
        "final_state {}\n",
        flags.input, p.batch, p.num_tokens, p.num_sequences, p.num_heads, p.num_value_heads,
        p.key_dim, p.value_dim, gate_mode_name(p.gate_mode), execution.plan.implementation,
        format_seconds(execution.seconds), format_count(tokens(p) / execution.seconds),
        execution.plan.segmented ? fmt::format(", {} segments", execution.plan.segments.size())
                                 : "",
        label, dtype_name(p.o.dtype), dtype_name(p.final_state->tensor.dtype));
  }

  static double tokens(const Problem& p) { return static_cast<double>(p.batch * p.num_tokens); }
};

}  // namespace

void add_run(CLI::App& app) {
  auto* sub = app.add_subcommand("run", "Compute o and final_state of a file");
  auto command = std::make_shared<RunCommand>();
  command->flags.add_to(*sub);
  add_path(*sub, "-o,--output", &command->output, "Output file (safetensors); - is standard output")
      ->required();
  add_switch(*sub, "--json", &command->json, "Report as JSON");
  add_switch(*sub, "--backward", &command->backward,
             "Gradients of all inputs, from do and d_final_state of the file");
  sub->footer(cat(kOutputHelp, R"(
Examples:
  kda run data/kda_layer.safetensors -o out.safetensors
  kda run x.safetensors -o y.safetensors --out-dtype fp32 --threads 4
  kda run x.safetensors -o y.safetensors --context-parallel 8 --json
  kda gen -o - --tokens 100 | kda run - -o y.safetensors
  kda gen -o - --tokens 100 --gradients | kda run - --backward -o dx.safetensors)"));
  sub->callback([command] { (*command)(); });
}

}  // namespace kda::tools
