// SPDX-License-Identifier: Apache-2.0
// kda gen: random inputs of a gate regime.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "kda/commands.hpp"
#include "kda/flags.hpp"

namespace kda::tools {

void add_gen(CLI::App& app) {
  auto* sub = app.add_subcommand("gen", "Write random inputs of a gate regime");
  struct State {
    GenerateFlags flags;
    std::string output;
  };
  auto state = std::make_shared<State>();
  state->flags.add_to(*sub);
  sub->add_option("-o,--output", state->output, "Output file (safetensors)")->required();
  sub->footer(
      R"(docs/files.md says what each regime is built to provoke. The same seed gives the same file
everywhere.
Examples:
  kda gen -o x.safetensors --tokens 4096 --heads 4 --regime trained --seed 1
  kda gen -o x.safetensors --seq-lens 1300,547,10x1K --heads 8 --value-heads 16 --dtype fp32)");
  sub->callback([sub, state] {
    if (sub->count("--tokens") == 0 && sub->count("--seq-lens") == 0)
      throw CLI::RequiredError("--tokens or --seq-lens");
    const check::Inputs inputs = check::generate(state->flags.resolve());
    io::write_safetensors(state->output, check::file_from_inputs(inputs));
    const Problem& p = inputs.problem;
    fmt::print("{}: B={} T={} N={} H={} HV={} K={} V={} {}, regime {}, seed {}\n", state->output,
               p.batch, p.num_tokens, p.num_sequences, p.num_heads, p.num_value_heads, p.key_dim,
               p.value_dim, state->flags.dtype, state->flags.regime, state->flags.options.seed);
  });
}

}  // namespace kda::tools
