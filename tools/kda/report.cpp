// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/report.hpp"

#include <fmt/core.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/text.hpp"

namespace kda::tools {

std::string json_text(const nlohmann::ordered_json& report) {
  return report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

void print_report(const std::string& text, bool to_stderr) {
  FILE* stream = to_stderr ? stderr : stdout;
  if (std::fwrite(text.data(), 1, text.size(), stream) != text.size() || std::fflush(stream) != 0)
    throw Error(invalid(to_stderr ? "standard error" : "standard output", ": writing failed (",
                        std::strerror(errno), ")"));
}

std::string one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    line += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return line;
}

}  // namespace kda::tools
