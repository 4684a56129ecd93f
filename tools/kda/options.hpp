// SPDX-License-Identifier: Apache-2.0
// Options whose values are read strictly: nothing empty, nothing twice, no number with anything
// around it. Errors are a kda::Error that names the option, what came and what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <concepts>
#include <functional>
#include <string>
#include <vector>

#include "check/numbers.hpp"
#include "core/text.hpp"

namespace kda::tools {

/// Takes a value, or says what is wrong with it ("is not ..."): an empty text for a good one.
using ReadValue = std::function<std::string(const std::string&)>;

/// `names` as CLI11 takes them: "-o,--output", or a word for a positional one.
CLI::Option* add_value(CLI::App& app, const std::string& names, const char* type, ReadValue read,
                       const std::string& help);
/// The same, any number of times.
CLI::Option* add_values(CLI::App& app, const std::string& names, const char* type, ReadValue read,
                        const std::string& help);

CLI::Option* add_text(CLI::App& app, const std::string& names, std::string* target,
                      const std::string& help);
/// A path. A word like --json or =name is an option that lost its value, not a file.
CLI::Option* add_path(CLI::App& app, const std::string& names, std::string* target,
                      const std::string& help);
CLI::Option* add_choice(CLI::App& app, const std::string& names, std::string* target,
                        const std::vector<std::string>& choices, const std::string& help);
/// A number that fp32 holds; with `negative` one below 0.
CLI::Option* add_real(CLI::App& app, const std::string& names, double* target, bool negative,
                      const std::string& help);
/// On, also --name=true; --name=false is off.
CLI::Option* add_switch(CLI::App& app, const std::string& names, bool* target,
                        const std::string& help);

/// A whole number in low..high.
template <std::integral Integer>
CLI::Option* add_whole(CLI::App& app, const std::string& names, Integer* target, Integer low,
                       Integer high, const std::string& help) {
  const auto read = [=](const std::string& text) -> std::string {
    Integer value = 0;
    if (check::parse_whole(text, &value) && value >= low && value <= high) {
      *target = value;
      return "";
    }
    return cat("is not a whole number in ", low, "..", high);
  };
  return add_value(app, names, "INT", read, help);
}

}  // namespace kda::tools
