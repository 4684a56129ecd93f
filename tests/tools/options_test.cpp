// SPDX-License-Identifier: Apache-2.0
// Odd values in every option of every subcommand. The options are those of the application itself:
// a new one is swept without a word here. A value gives what it says or exit code 2 (3 for a
// backend that does not exist) with one line on stderr that names the option and the value, nothing
// on stdout and no file.
#include "tools/kda/options.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "support/temporary_folder.hpp"
#include "tools/kda/commands.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

struct Ran {
  int exit_code = -1;
  std::string out, err;
};

/// A standard stream of this process that is a file for a while.
class Redirected {
 public:
  Redirected(FILE* stream, const char* path, int flags)
      : stream_(stream), before_(::dup(::fileno(stream))) {
    std::fflush(stream);
    const int file = ::open(path, flags | O_CLOEXEC, 0600);
    ::dup2(file, ::fileno(stream));
    ::close(file);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;
  ~Redirected() {
    std::fflush(stream_);
    ::dup2(before_, ::fileno(stream_));
    ::close(before_);
  }

 private:
  FILE* stream_;
  int before_;
};

/// What every option is tried with.
const Words kValues = {"",
                       "7",
                       "-1",
                       "9223372036854775807",
                       "99999999999999999999",
                       "-99999999999999999999",
                       "nan",
                       "-nan",
                       "inf",
                       "-inf",
                       "1e39",
                       "-1e39",
                       "1e-50",
                       "010",
                       "-010",
                       "0x10",
                       "12x",
                       "7K7",
                       " 12",
                       "12 ",
                       "+12",
                       "1,2",
                       "1\n2",
                       "\xff",
                       "-",
                       "--json",
                       "=7"};

/// Where the way of writing them, --name=value, is what is new.
const Words kFewValues = {"", "7", "-1", "010", "0x10", "12x", " 12", "nan"};

/// Values of the options that a command cannot do without.
const std::map<std::string, std::string> kGood = {
    {"input", "x.safetensors"}, {"--output", "y"},
    {"--tokens", "3"},          {"--seq-lens", "8"},
    {"--heads", "1"},           {"what", "forward"},
    {"--milliseconds", "1"},    {"--case", "--tokens 3 --heads 1 --key-dim 8 --value-dim 8"}};
/// Needed as one of several, or for a bench that takes no longer.
const std::set<std::string> kChosen = {"gen --tokens", "bench --case", "bench --milliseconds"};

bool is_one_of(const std::string& text, const Words& list) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

class Options : public test::TemporaryFolder {
 protected:
  void SetUp() override {
    streams_ = folder_.string() + "_streams";
    fs::create_directories(streams_);
    // With one gate a head: --head-gates is good for every command.
    ASSERT_EQ(kda({"gen", "-o", "x.safetensors", "--tokens", "5", "--key-dim", "8", "--value-dim",
                   "8", "--gradients", "--head-gates"})
                  .exit_code,
              0);
    app_ = make_app(exit_code_);
  }
  void TearDown() override { fs::remove_all(streams_); }

  /// What the command does in the folder, in this process: thousands of new ones take minutes.
  Ran kda(const Words& words) const {
    const fs::path out = streams_ / "out", err = streams_ / "err", before = fs::current_path();
    Words copy = words;
    std::vector<char*> argv = {const_cast<char*>("kda")};
    for (std::string& word : copy) argv.push_back(word.data());
    argv.push_back(nullptr);
    int exit_code = kExitGood;
    {
      const Redirected streams[] = {{stdin, "/dev/null", O_RDONLY},
                                    {stdout, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC},
                                    {stderr, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC}};
      fs::current_path(folder_);
      exit_code = run_command(static_cast<int>(argv.size()) - 1, argv.data());
      fs::current_path(before);
    }
    return {exit_code, read(out.string()), read(err.string())};
  }

  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_))
      names.insert(entry.path().filename().string());
    return names;
  }

  /// The words that `command` needs, without those of `option`.
  static Words needed(const CLI::App& command, const CLI::Option* option) {
    Words words = {command.get_name()};
    for (const CLI::Option* other : command.get_options()) {
      const std::string name = other->get_name();
      if (other == option) continue;
      // --seq-lens and --tokens, --set and --case exclude each other.
      const bool replaced = option && option->get_excludes().count(const_cast<CLI::Option*>(other));
      if (!other->get_required() && (!kChosen.count(command.get_name() + " " + name) || replaced))
        continue;
      EXPECT_TRUE(kGood.count(name)) << name << " is required: kGood needs a value for it";
      if (!other->get_positional()) words.push_back(name);
      const bool decodes = option && option->get_name() == "--tail" && name == "what";
      words.push_back(decodes ? "decode" : kGood.at(name));
    }
    if (option)  // switches without which it is refused
      for (const CLI::Option* other : option->get_needs())
        if (other->get_items_expected_max() == 0) words.push_back(other->get_name());
    return words;
  }

  /// Whether `value` is one that the option takes, by its type.
  static bool takes(const std::string& command, const CLI::Option& option,
                    const std::string& value) {
    const std::string type = option.get_type_name(), name = option.get_name();
    if (type == "INT")
      return (value == "7" && name != "--tail") ||
             (is_one_of(name, {"--seed", "--most-cut-bytes"}) && value == "9223372036854775807") ||
             (name == "--batch" && value == "7");
    if (type == "NUMBER") {
      if (name == "--lower-bound") return is_one_of(value, {"-1", "-99999999999999999999"});
      return is_one_of(value, {"7", "-1", "9223372036854775807", "99999999999999999999",
                               "-99999999999999999999"});
    }
    if (type == "LENGTHS") return is_one_of(value, {"7", "1,2"});
    if (type == "WORD") return name == "--context-parallel" && value == "7";
    if (type == "FILE" && command != "" && name != "input")
      return !value.empty() && value[0] != '=' && (value[0] != '-' || value == "-");
    return false;
  }

  void expect_refused(const Ran& ran, const Words& words, const Words& names,
                      const std::string& value) {
    std::string line;
    for (const std::string& word : words) line += " '" + one_line(word) + "'";
    EXPECT_EQ(ran.out, "") << line;
    EXPECT_EQ(ran.err.rfind("kda: ", 0), 0u) << line << ": " << ran.err;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << line << ": " << ran.err;
    EXPECT_TRUE(std::any_of(
        names.begin(), names.end(),
        [&](const std::string& name) { return ran.err.find(name) != std::string::npos; }))
        << line << ": " << ran.err;
    EXPECT_NE(ran.err.find(one_line(value)), std::string::npos) << line << ": " << ran.err;
    EXPECT_EQ(files(), std::set<std::string>{"x.safetensors"}) << line;
  }

  fs::path streams_;  // beside the folder, in which files are counted
  ExitSlot exit_code_ = 0;
  std::unique_ptr<CLI::App> app_;
};

/// Every n-th value where the environment says so, another first one for each option.
int stride_of_values() {
  const char* text = std::getenv("KDA_TEST_ONE_VALUE_OF");
  return text ? std::atoi(text) : 1;
}

TEST_F(Options, OddValuesInEveryOptionOfEveryCommand) {
  const int stride = stride_of_values();
  int refused = 0, taken = 0, options = 0;
  const auto try_words = [&](const CLI::App& command, const CLI::Option& option, const Words& words,
                             const Words& names, const std::string& value, bool good) {
    const Ran ran = kda(words);
    if (good) {
      ++taken;
      EXPECT_EQ(ran.exit_code, 0) << command.get_name() << " " << option.get_name() << " '"
                                  << one_line(value) << "': " << ran.err;
      if (option.get_type_name() == "FILE" && value != "-") {
        EXPECT_GT(fs::file_size(folder_ / value), 10u);
      }
      for (const std::string& name : files())
        if (name != "x.safetensors") fs::remove(folder_ / name);
      return;
    }
    ++refused;
    const int expected =
        option.get_name() == "--backend" && ran.err.find("names no") != std::string::npos
            ? kExitNoDevice
            : kExitBadInput;
    EXPECT_EQ(ran.exit_code, expected)
        << command.get_name() << " " << option.get_name() << " '" << one_line(value) << "'";
    expect_refused(ran, words, names, value);
  };
  for (const CLI::App* command : app_->get_subcommands([](const CLI::App*) { return true; }))
    for (const CLI::Option* option : command->get_options()) {
      const std::string name = option->get_name(), type = option->get_type_name();
      if (name == "--help") continue;
      ++options;
      const bool positional = option->get_positional();
      const Words base = needed(*command, option);
      Words names;
      for (const std::string& word : option->get_lnames()) names.push_back("--" + word);
      for (const std::string& word : option->get_snames()) names.push_back("-" + word);
      const auto with = [&](Words more) {
        Words words = base;
        words.insert(words.end(), more.begin(), more.end());
        return words;
      };
      if (option->get_items_expected_max() == 0) {  // a switch
        for (const std::string& value : kFewValues)
          try_words(*command, *option, with({name + "=" + value}), {name}, value, false);
        try_words(*command, *option, with({name, name + "=false"}), {name}, "false", false);
        for (const Words& good : {Words{name + "=true"}, Words{name + "=false"}, Words{name, name}})
          try_words(*command, *option, with(good), {name}, "", true);
        continue;
      }
      for (std::size_t i = options % stride; i < kValues.size(); i += stride) {
        const std::string& value = kValues[i];
        const bool good = takes(command->get_name(), *option, value);
        if (positional) {
          // A word with a dash is no positional one; it is refused by its own name.
          if (value.rfind("-", 0) != 0 || value == "-")
            try_words(*command, *option, with({value}), {name, one_line(value), "standard input"},
                      value == "-" && name == "input" ? "standard input" : value, good);
          continue;
        }
        for (const std::string& word : names)
          try_words(*command, *option, with({word, value}), {word}, value, good);
        if (type != "FILE" && type != "TEXT" && is_one_of(value, kFewValues))
          try_words(*command, *option, with({name + "=" + value}), {name}, value, good);
      }
      const std::string fine = kGood.count(name) ? kGood.at(name) : "7";
      if (positional) {
        try_words(*command, *option, with({fine, "extra"}), {"extra"}, "extra", false);
        try_words(*command, *option, base, {name}, "", false);
        continue;
      }
      for (const std::string& word : names) {
        try_words(*command, *option, with({word}), names, "", false);
        if (name != "--case")
          try_words(*command, *option, with({word, fine, word, fine}), {word}, fine, false);
      }
      try_words(*command, *option, with({name + "="}), {name}, "''", false);
    }
  std::printf("%d options, %d cases: %d refused, %d taken\n", options, refused + taken, refused,
              taken);
  EXPECT_GE(refused + taken, 1500 / stride);
  EXPECT_GE(taken, 100 / stride);
}

TEST_F(Options, OfTheCommandItself) {
  for (const Words& words :
       {Words{"--version=7"}, Words{"--help=7"}, Words{"gen", "--help=7"}, Words{"--version="},
        Words{""}, Words{"7"}, Words{"--json"}, Words{"gen", "run"}}) {
    const Ran ran = kda(words);
    EXPECT_EQ(ran.exit_code, kExitBadInput) << words[0];
    expect_refused(ran, words, {""}, "");
  }
}

}  // namespace
}  // namespace kda::tools
