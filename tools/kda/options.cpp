// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/options.hpp"

#include <algorithm>
#include <utility>

#include "kda/status.hpp"

namespace kda::tools {
namespace {

/// Hands every value to `read` and turns what it finds wrong into the error.
CLI::callback_t reader(const std::string& names, bool many, ReadValue read) {
  return [names, many, read = std::move(read)](const CLI::results_t& values) {
    if (!many && values.size() > 1)
      throw Error(invalid(names, ": given ", values.size(), " times ('", values[0], "', then '",
                          values[1], "'), takes one value"));
    for (const std::string& value : values) {
      const std::string fault = value.empty() ? "is empty" : read(value);
      if (!fault.empty()) throw Error(invalid(names, ": '", value, "' ", fault));
    }
    return true;
  };
}

CLI::Option* add(CLI::App& app, const std::string& names, const char* type, bool many,
                 ReadValue read, const std::string& help) {
  CLI::Option* option =
      app.add_option(names, reader(names, many, std::move(read)), help)->type_name(type);
  option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  return option;
}

/// "a, b, c"
std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += cat(text.empty() ? "" : ", ", word);
  return text;
}

}  // namespace

CLI::Option* add_value(CLI::App& app, const std::string& names, const char* type, ReadValue read,
                       const std::string& help) {
  return add(app, names, type, /*many=*/false, std::move(read), help);
}

CLI::Option* add_values(CLI::App& app, const std::string& names, const char* type, ReadValue read,
                        const std::string& help) {
  return add(app, names, type, /*many=*/true, std::move(read), help);
}

CLI::Option* add_text(CLI::App& app, const std::string& names, std::string* target,
                      const std::string& help) {
  const auto read = [=](const std::string& text) {
    *target = text;
    return std::string();
  };
  return add_value(app, names, "TEXT", read, help);
}

CLI::Option* add_path(CLI::App& app, const std::string& names, std::string* target,
                      const std::string& help) {
  const auto read = [=](const std::string& text) -> std::string {
    if (text[0] == '=' || (text[0] == '-' && text != "-"))
      return cat("is not taken for a file (write ./", text, " if it is one)");
    *target = text;
    return "";
  };
  return add_value(app, names, "FILE", read, help);
}

CLI::Option* add_choice(CLI::App& app, const std::string& names, std::string* target,
                        const std::vector<std::string>& choices, const std::string& help) {
  const auto read = [=](const std::string& text) -> std::string {
    if (std::find(choices.begin(), choices.end(), text) == choices.end())
      return cat("is not one of ", join(choices));
    *target = text;
    return "";
  };
  return add_value(app, names, "WORD", read, cat(help, ": ", join(choices)));
}

CLI::Option* add_real(CLI::App& app, const std::string& names, double* target, bool negative,
                      const std::string& help) {
  const auto read = [=](const std::string& text) -> std::string {
    double value = 0;
    if (const char* fault = check::parse_real(text, &value)) return fault;
    if (negative && !(value < 0)) return "is not below 0";
    *target = value;
    return "";
  };
  return add_value(app, names, "NUMBER", read, help);
}

CLI::Option* add_switch(CLI::App& app, const std::string& names, bool* target,
                        const std::string& help) {
  const auto read = [=](const CLI::results_t& values) {
    for (const std::string& value : values) {
      if (value != "true" && value != "false")
        throw Error(invalid(names, ": '", value, "' is not true or false"));
      if (value != values[0]) throw Error(invalid(names, ": given as true and as false"));
    }
    *target = values[0] == "true";
    return true;
  };
  CLI::Option* option = app.add_option(names, read, help);
  option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)->expected(0);
  return option->type_name("");
}

}  // namespace kda::tools
