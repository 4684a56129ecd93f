// SPDX-License-Identifier: Apache-2.0
// The application: its subcommands, and what becomes of errors.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <sstream>

#include "core/text.hpp"
#include "kda/status.hpp"
#include "kda/version.h"
#include "tools/kda/commands.hpp"
#include "tools/kda/report.hpp"

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

/// `--name=` as CLI11 has it takes the next word for its value.
void refuse_empty_values(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--") return;
    const std::size_t equals = word.find('=');
    if (word.rfind("--", 0) == 0 && equals + 1 == word.size())
      throw Error(invalid(word.substr(0, equals), ": '' is empty"));
  }
}

/// The library names what it refuses as its own arguments: as options, if they were given.
std::string as_options(const CLI::App& app, const std::string& message) {
  for (const CLI::App* command : app.get_subcommands())
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() == 0 || option->get_lnames().empty()) continue;
      std::string name = option->get_lnames()[0];
      std::replace(name.begin(), name.end(), '-', '_');
      if (name == "threads") name = "num_threads";
      if (message.rfind(name + ":", 0) == 0)
        return cat(option->get_name(), message.substr(name.size()));
    }
  return message;
}

int fail(const std::string& message, int exit_code) {
  fmt::print(stderr, "kda: {}\n", one_line(message));
  return exit_code;
}

int fail(const CLI::App& app, const Error& error) {
  return fail(as_options(app, error.what()),
              error.code() == StatusCode::kUnavailable ? kExitNoDevice : kExitBadInput);
}

/// What CLI11 has to say: --help and --version too.
int finish(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream out, ignored;
  if (app.exit(error, out, ignored) != 0) return fail(error.what(), kExitBadInput);
  print_report(out.str());
  return kExitGood;
}

}  // namespace

std::unique_ptr<CLI::App> make_app(ExitSlot& exit_code, const std::string& line) {
  auto app = std::make_unique<CLI::App>(
      "Kimi Delta Attention: run, check, generate, inspect, plan and time it.", "kda");
  app->footer(kExamples);
  app->set_version_flag("--version", "kda " KDA_VERSION_STRING);
  app->require_subcommand(1);
  add_run(*app);
  add_check(*app, exit_code);
  add_gen(*app);
  add_inspect(*app);
  add_plan(*app);
  add_bench(*app, line);
  add_info(*app);
  app->get_version_ptr()->disable_flag_override();
  app->get_help_ptr()->disable_flag_override();
  for (CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; }))
    command->get_help_ptr()->disable_flag_override();
  return app;
}

int run_command(int argc, char** argv) {
  // A limit on the size of files is an error like a full disk.
  std::signal(SIGXFSZ, SIG_IGN);  // NOLINT(cert-err33-c)
  int exit_code = kExitGood;
  const std::unique_ptr<CLI::App> app = make_app(exit_code, command_text(argc, argv));
  try {
    refuse_empty_values(argc, argv);
    try {
      app->parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return finish(*app, error);
    }
  } catch (const Error& error) {
    return fail(*app, error);
  } catch (const std::bad_alloc&) {
    return fail("out of memory", kExitBadInput);
  } catch (const std::exception& error) {
    return fail(error.what(), kExitBadInput);
  }
  return exit_code;
}

}  // namespace kda::tools
