// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/report.hpp"

#include <fmt/core.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>

#include "core/text.hpp"

namespace kda::tools {

std::string json_text(const nlohmann::ordered_json& report) {
  return report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

namespace {

/// Within single quotes: a quote ends them, is escaped and begins them again.
std::string escaped(const std::string& word) {
  std::string text;
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text;
}

}  // namespace

std::string command_text(int argc, const char* const* argv) {
  std::string text;
  for (int i = 0; i < argc; ++i) {
    const std::string word = argv[i];
    if (i == 0)
      text = word.starts_with('/') ? word.substr(word.rfind('/') + 1) : word;
    else if (word.empty() || word.find_first_of(" '\"$\\*?;&|<>()") != std::string::npos)
      text += cat(" '", escaped(word), "'");
    else
      text += cat(" ", word);
  }
  return text;
}

nlohmann::ordered_json provenance(const std::string& command) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  return {
      {"date", fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday)},
      {"cpu", cpu_model()},
      {"command", command}};
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
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
