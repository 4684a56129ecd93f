// SPDX-License-Identifier: Apache-2.0
// The subcommands of `kda`. Each adds itself to the application; what it throws (kda::Error)
// becomes a message on stderr and an exit code in run_command().
#pragma once

#include <memory>
#include <string>

namespace CLI {
class App;
}

namespace kda::tools {

enum ExitCode : int {
  kExitGood = 0,
  kExitOutsideTolerance = 1,
  kExitBadInput = 2,
  kExitNoDevice = 3,
};

/// Set by a command whose result is not kExitGood although nothing failed.
using ExitSlot = int;

void add_run(CLI::App& app);
void add_check(CLI::App& app, ExitSlot& exit_code);
void add_gen(CLI::App& app);
void add_inspect(CLI::App& app);
void add_plan(CLI::App& app);
/// `command`: the line that its results name.
void add_bench(CLI::App& app, const std::string& command);
void add_info(CLI::App& app);

/// The application with all of them; a command that runs sets `exit_code`, which must outlive it.
/// `line`: what is to be parsed, for results to name.
std::unique_ptr<CLI::App> make_app(ExitSlot& exit_code, const std::string& line = "");

/// main() of `kda`: what it returns is the exit code.
int run_command(int argc, char** argv);

}  // namespace kda::tools
