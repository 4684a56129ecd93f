// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/print.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace kda::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kQuietTime = std::chrono::seconds(1);
constexpr auto kRedrawTime = std::chrono::milliseconds(100);

bool is_number(const std::string& cell) {
  return !cell.empty() && (std::isdigit(static_cast<unsigned char>(cell[0])) ||
                           (cell.size() > 1 && (cell[0] == '-' || cell[0] == '<') &&
                            std::isdigit(static_cast<unsigned char>(cell[1]))));
}

}  // namespace

std::string format_megabytes(std::size_t bytes) {
  return fmt::format("{:.1f} MB", 1e-6 * static_cast<double>(bytes));
}

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> width;
  std::vector<bool> numeric;
  for (std::size_t r = 0; r < rows.size(); ++r)
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      if (c == width.size()) {
        width.push_back(0);
        numeric.push_back(true);
      }
      width[c] = std::max(width[c], rows[r][c].size());
      if (r > 0 && rows[r][c] != "-" && !is_number(rows[r][c])) numeric[c] = false;
    }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c)
      line += numeric[c] ? fmt::format("  {:>{}}", row[c], width[c])
                         : fmt::format("  {:<{}}", row[c], width[c]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string format_csv(const std::vector<std::vector<std::string>>& rows) {
  std::string text;
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      std::string cell;
      for (const char letter : row[c]) cell += letter == '"' ? "\"\"" : std::string(1, letter);
      const bool quoted = cell.find_first_of(",\"\n") != std::string::npos;
      text += fmt::format("{}{}{}{}", c ? "," : "", quoted ? "\"" : "", cell, quoted ? "\"" : "");
    }
    text += "\n";
  }
  return text;
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string format_count(double count) {
  static constexpr std::array<const char*, 5> kUnits = {"", " k", " M", " G", " T"};
  std::size_t unit = 0;
  while (count >= 1000 && unit + 1 < kUnits.size()) {
    count /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f}", count) : fmt::format("{:.1f}{}", count, kUnits[unit]);
}

std::string format_error(double error) { return fmt::format("{:.2e}", error); }

Progress::Progress(std::string what) : Progress(std::move(what), ::isatty(STDERR_FILENO) != 0) {}

Progress::Progress(std::string what, bool terminal)
    : what_(std::move(what)), terminal_(terminal), start_(Clock::now()), last_(start_) {}

Progress::~Progress() {
  if (drawn_) fmt::print(stderr, "\r\033[K");
}

void Progress::update(int64_t done, int64_t total) {
  if (!terminal_ || total <= 0) return;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (now - start_ < kQuietTime || now - last_ < kRedrawTime) return;
  last_ = now;
  drawn_ = true;
  constexpr int64_t kCells = 30;
  const auto filled = static_cast<std::size_t>(kCells * done / total);
  fmt::print(stderr, "\r{} [{}{}] {}/{}", what_, std::string(filled, '#'),
             std::string(kCells - filled, '.'), done, total);
  std::fflush(stderr);
}

}  // namespace kda::tools
