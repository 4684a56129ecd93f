// SPDX-License-Identifier: Apache-2.0
// Command lines of test programs: a word, --name VALUE, --name. Those of kda are in
// tools/kda/options.hpp; CLI11 is 20 s a file to compile.
#pragma once

#include <concepts>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "check/numbers.hpp"

namespace kda::test {

struct Argument {
  std::string name;
  std::string help;
  bool takes_value = true;
  std::function<bool(const std::string&)> read;  ///< false if it may not have this value
};

/// Without dashes in its name it is a word, which must come.
inline Argument text(const std::string& name, std::string* target, const std::string& help) {
  return {name, help, true, [=](const std::string& value) { return *target = value, true; }};
}

template <std::integral Integer>
Argument whole(const std::string& name, Integer* target, const std::string& help) {
  return {name, help, true, [=](const std::string& value) {
            return check::parse_whole(value, target) && *target >= 0;
          }};
}

inline Argument flag(const std::string& name, bool* target, const std::string& help) {
  return {name, help, false, [=](const std::string&) { return *target = true; }};
}

/// Fills the targets of `arguments`. The program ends with what comes back, if anything: 0 after
/// --help, 2 after an argument that is not good, which the standard error names.
std::optional<int> parse_arguments(int argc, const char* const* argv, const std::string& about,
                                   const std::vector<Argument>& arguments);

}  // namespace kda::test
