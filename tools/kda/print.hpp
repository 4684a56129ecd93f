// SPDX-License-Identifier: Apache-2.0
// What the commands print with: tables, units, a progress bar.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace kda::tools {

/// "1.5 MB"
std::string format_megabytes(std::size_t bytes);

/// Columns as wide as their widest cell; numbers to the right, words to the left.
std::string format_table(const std::vector<std::vector<std::string>>& rows);
/// The same as comma-separated values.
std::string format_csv(const std::vector<std::vector<std::string>>& rows);

std::string format_seconds(double seconds);  ///< "1.23 ms"
std::string format_count(double count);      ///< "1.2 M"
std::string format_error(double error);      ///< "1.23e-07"

/// A bar on stderr, once an operation takes over a second on a terminal. Thread safe.
class Progress {
 public:
  explicit Progress(std::string what);
  Progress(std::string what, bool terminal);  ///< instead of asking whether stderr is one
  ~Progress();
  void update(int64_t done, int64_t total);

 private:
  std::string what_;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_;
  std::mutex mutex_;
};

}  // namespace kda::tools
