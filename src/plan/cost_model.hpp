// SPDX-License-Identifier: Apache-2.0
// Predicted times of the fused and staged GPU schedules, from named constants. Everything is in
// nanoseconds a token and value head on one SM, for K = V = 128, measured on an H200
// (docs/planning.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace kda::plan {

struct CostConstants {
  double bytes_per_token = 1282;      ///< q, k, v, o, g in bf16 and beta
  double scan_bytes_per_token = 770;  ///< q is not read, o not written
  double chain_ns = 26.6;             ///< serial chain with outputs, C = 32, one CTA an SM
  double scan_ns = 36.6;              ///< B and M, C = 64: two 128-column halves of 18.3
  double merge_us_per_segment = 1.0;  ///< M S + B, one step of the serial prefix
  double launch_us = 5.0;             ///< each further kernel
  double minimum_gain = 1.1;          ///< segments must win by this factor
};

struct CostInput {
  std::vector<int64_t> lengths;  ///< tokens of each sequence
  int64_t num_value_heads;
  double size_ratio;  ///< K V / 128^2: work of a token relative to the constants
  double row_ratio;   ///< (K + V) / 256: bytes likewise
  int64_t num_sms;
  double bytes_per_second;
};

/// Time of `streams` independent chains of given lengths on num_sms SMs: the longest one, or the
/// work spread evenly, whichever is more (a list schedule, longest first, comes close).
inline double makespan_us(const CostInput& in, int64_t longest, double total, double ns) {
  const double even =
      total * static_cast<double>(in.num_value_heads) / static_cast<double>(in.num_sms);
  return std::max(static_cast<double>(longest), even) * ns * in.size_ratio * 1e-3;
}

inline double memory_us(const CostInput& in, double tokens, double bytes) {
  return tokens * static_cast<double>(in.num_value_heads) * bytes * in.row_ratio /
         in.bytes_per_second * 1e6;
}

inline double total_tokens(const CostInput& in) {
  double total = 0;
  for (const int64_t length : in.lengths) total += static_cast<double>(length);
  return total;
}

inline double roofline_us(const CostInput& in, const CostConstants& c) {
  return memory_us(in, total_tokens(in), c.bytes_per_token);
}

inline double serial_us(const CostInput& in, const CostConstants& c) {
  const int64_t longest = *std::max_element(in.lengths.begin(), in.lengths.end());
  return std::max(roofline_us(in, c), makespan_us(in, longest, total_tokens(in), c.chain_ns));
}

/// Scan, merge, forward with segments of at most `segment_tokens`.
inline double segmented_us(const CostInput& in, const CostConstants& c, int64_t segment_tokens) {
  double scanned = 0;
  int64_t most_segments = 1;
  for (const int64_t length : in.lengths) {
    const int64_t segments = (length + segment_tokens - 1) / segment_tokens;
    most_segments = std::max(most_segments, segments);
    if (segments > 1) scanned += static_cast<double>(length - segment_tokens);
  }
  const double scan = std::max(memory_us(in, scanned, c.scan_bytes_per_token),
                               makespan_us(in, segment_tokens, scanned, c.scan_ns));
  const double forward =
      std::max(roofline_us(in, c), makespan_us(in, segment_tokens, total_tokens(in), c.chain_ns));
  const double merge = c.merge_us_per_segment * static_cast<double>(most_segments - 1);
  return scan + merge + forward + 2 * c.launch_us;
}

}  // namespace kda::plan
