// SPDX-License-Identifier: Apache-2.0
// kda gen: random inputs of a gate regime.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "check/backward.hpp"
#include "tools/kda/commands.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {

void add_gen(CLI::App& app) {
  auto* sub = app.add_subcommand("gen", "Write random inputs of a gate regime");
  struct State {
    GenerateFlags flags;
    std::string output;
    bool gradients = false;
  };
  auto state = std::make_shared<State>();
  state->flags.add_to(*sub);
  add_path(*sub, "-o,--output", &state->output, "Output file (safetensors); - is standard output")
      ->required();
  add_switch(*sub, "--gradients", &state->gradients,
             "Also write do and d_final_state, N(0, 1), for kda run --backward");
  sub->footer(cat(
      R"(docs/files.md says what each regime is built to provoke. The same seed gives the same file
everywhere.
)",
      kOutputHelp, R"(
Examples:
  kda gen -o x.safetensors --tokens 4096 --heads 4 --regime trained --seed 1
  kda gen -o x.safetensors --seq-lens 1300,547,10x1K --heads 8 --value-heads 16 --dtype fp32
  kda gen -o x.safetensors --tokens 4096 --heads 2 --value-heads 4 --head-gates --head-map tiled
  kda gen -o - --tokens 100 | kda check -)"));
  sub->callback([state] {
    const check::GenerateOptions options = state->flags.resolve();
    io::OutputFile out(state->output);
    const check::Inputs inputs = check::generate(options);
    io::SafetensorsFile file = check::file_from_inputs(inputs);
    if (state->gradients)
      check::add_gradients_to_file(
          inputs.problem,
          check::make_gradients(inputs, {.seed = options.seed, .d_o_dtype = options.dtype}), &file);
    io::write_safetensors(out, file);
    out.commit();
    const Problem& p = inputs.problem;
    print_report(
        fmt::format("{}: B={} T={} N={} H={} HV={} K={} V={} {}, regime {}, seed {}\n", out.label(),
                    p.batch, p.num_tokens, p.num_sequences, p.num_heads, p.num_value_heads,
                    p.key_dim, p.value_dim, state->flags.dtype, state->flags.regime, options.seed),
        out.is_stdout());
  });
}

}  // namespace kda::tools
