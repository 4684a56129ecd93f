// SPDX-License-Identifier: Apache-2.0
#include "support/arguments.hpp"

#include <algorithm>
#include <cstdio>

namespace kda::test {
namespace {

void print_help(const std::string& about, const std::vector<Argument>& arguments) {
  std::printf("%s\n", about.c_str());
  for (const Argument& each : arguments)
    std::printf("  %-16s%-6s %s\n", each.name.c_str(), each.takes_value ? "VALUE" : "",
                each.help.c_str());
}

}  // namespace

std::optional<int> parse_arguments(int argc, const char* const* argv, const std::string& about,
                                   const std::vector<Argument>& arguments) {
  const auto is_word = [](const std::string& name) { return !name.starts_with("-"); };
  std::vector<const Argument*> words;
  for (const Argument& each : arguments)
    if (is_word(each.name)) words.push_back(&each);
  const auto refuse = [](const std::string& what, const std::string& why) {
    std::fprintf(stderr, "%s: %s\n", what.c_str(), why.c_str());
    return 2;
  };
  std::size_t num_words = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string given = argv[i];
    if (given == "--help" || given == "-h") return print_help(about, arguments), 0;
    if (is_word(given)) {
      if (num_words == words.size() || !words[num_words]->read(given))
        return refuse(given, "not one of the words that --help has");
      ++num_words;
      continue;
    }
    const auto found = std::ranges::find(arguments, given, &Argument::name);
    if (found == arguments.end()) return refuse(given, "no such argument; see --help");
    if (found->takes_value && ++i == argc) return refuse(given, "needs a value");
    if (!found->read(found->takes_value ? argv[i] : ""))
      return refuse(given, std::string("cannot be ") + argv[i]);
  }
  if (num_words < words.size()) return refuse(words[num_words]->name, "is missing; see --help");
  return std::nullopt;
}

}  // namespace kda::test
