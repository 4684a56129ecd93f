// SPDX-License-Identifier: Apache-2.0
// kda: Kimi Delta Attention on files. Results on stdout, progress and errors on stderr.
#include <fmt/core.h>

#include "kda/commands.hpp"
#include "kda/status.hpp"
#include "kda/version.h"

namespace {

constexpr const char* kExamples = R"(Examples:
  kda gen -o x.safetensors --tokens 4096 --heads 4 --regime trained
  kda run x.safetensors -o y.safetensors
  kda check x.safetensors
  kda inspect x.safetensors --plot memory.svg
  kda plan --heads 8 --seq-lens 64K --sms 132 --explain
  kda bench forward --set cpu

Exit codes: 0 good, 1 outside tolerance, 2 bad usage or input, 3 no such device or backend.
Every subcommand has --help with its own examples.)";

int exit_code_of(const kda::Error& error) {
  return error.code() == kda::StatusCode::kUnavailable ? kda::tools::kExitNoDevice
                                                       : kda::tools::kExitBadInput;
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = kda::tools::kExitGood;
  CLI::App app{"Kimi Delta Attention: run, check, generate, inspect, plan and time it.", "kda"};
  app.footer(kExamples);
  app.set_version_flag("--version", "kda " KDA_VERSION_STRING);
  app.require_subcommand(1);
  kda::tools::add_run(app);
  kda::tools::add_check(app, exit_code);
  kda::tools::add_gen(app);
  kda::tools::add_inspect(app);
  kda::tools::add_plan(app);
  kda::tools::add_bench(app);
  kda::tools::add_info(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kda::tools::kExitGood : kda::tools::kExitBadInput;
  } catch (const kda::Error& error) {
    fmt::print(stderr, "kda: {}\n", error.what());
    return exit_code_of(error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kda: {}\n", error.what());
    return kda::tools::kExitBadInput;
  }
  return exit_code;
}
