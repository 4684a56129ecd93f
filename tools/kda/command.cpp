// SPDX-License-Identifier: Apache-2.0
// The application: its subcommands, and what becomes of errors.
#include <fmt/core.h>

#include <CLI/CLI.hpp>

#include "kda/commands.hpp"
#include "kda/status.hpp"
#include "kda/version.h"

namespace kda::tools {
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

int exit_code_of(const Error& error) {
  return error.code() == StatusCode::kUnavailable ? kExitNoDevice : kExitBadInput;
}

}  // namespace

int run_command(int argc, char** argv) {
  int exit_code = kExitGood;
  CLI::App app{"Kimi Delta Attention: run, check, generate, inspect, plan and time it.", "kda"};
  app.footer(kExamples);
  app.set_version_flag("--version", "kda " KDA_VERSION_STRING);
  app.require_subcommand(1);
  add_run(app);
  add_check(app, exit_code);
  add_gen(app);
  add_inspect(app);
  add_plan(app);
  add_bench(app);
  add_info(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitGood : kExitBadInput;
  } catch (const Error& error) {
    fmt::print(stderr, "kda: {}\n", error.what());
    return exit_code_of(error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kda: {}\n", error.what());
    return kExitBadInput;
  }
  return exit_code;
}

}  // namespace kda::tools
