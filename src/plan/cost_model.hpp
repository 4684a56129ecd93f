// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged GPU schedule (chunk_intra, then one chain of chunks a state tile),
// from named constants measured on an H200 at K = V = 128, bf16 (docs/planning.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kda::plan {

/// Times of a token are those of one block, which has 64 columns of a state. `_latency`: a block
/// with an SM for itself; `_work`: SM time, with as many blocks as fit.
struct CostConstants {
  double bytes_per_token = 1282;  ///< q, k, v, o, g in bf16 and beta, a value head
  double intra_work_ns = 160;     ///< chunk_intra: SM time of a token and value head
  double forward_latency_ns = 38;
  double forward_work_ns = 40;
  double scan_latency_ns = 30;
  double scan_work_ns = 18.5;
  double merge_step_us = 3.4;  ///< S' = M S + B, one step of the serial prefix
  double merge_step_head_us =
      0.28;                   ///< of each value head: every block of 8 columns reads all of M
  double kernel_us = 8;       ///< ramp of a kernel: launch, first loads, last stores
  double minimum_gain = 1.1;  ///< segments must win by this factor
};

struct CostInput {
  std::vector<int64_t> lengths;  ///< tokens of each sequence
  int64_t num_value_heads;
  int64_t key_dim, value_dim;
  int64_t num_sms;
  double bytes_per_second;
};

inline double tiles_of(int64_t columns) {
  const int64_t tiles = (columns + 63) / 64;
  return static_cast<double>(tiles);
}

inline double total_tokens(const CostInput& in) {
  double total = 0;
  for (const int64_t length : in.lengths) total += static_cast<double>(length);
  return total;
}

inline double roofline_us(const CostInput& in, const CostConstants& c) {
  const double rows = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) * c.bytes_per_token * rows /
         in.bytes_per_second * 1e6;
}

inline double intra_us(const CostInput& in, const CostConstants& c) {
  const double size = static_cast<double>(in.key_dim * (in.key_dim + in.value_dim)) / (128.0 * 256);
  return total_tokens(in) * static_cast<double>(in.num_value_heads) /
             static_cast<double>(in.num_sms) * c.intra_work_ns * size * 1e-3 +
         c.kernel_us;
}

/// Chains of `longest` tokens and `total` tokens a value head in all, `tiles` blocks a head: the
/// longest one, or the work spread evenly, whichever is more.
inline double chains_us(const CostInput& in, const CostConstants& c, double longest, double total,
                        double tiles, double latency_ns, double work_ns) {
  const double size = static_cast<double>(in.key_dim) / 128;
  const double even =
      total * static_cast<double>(in.num_value_heads) * tiles / static_cast<double>(in.num_sms);
  return std::max(longest * latency_ns, even * work_ns) * size * 1e-3 + c.kernel_us;
}

inline double forward_us(const CostInput& in, const CostConstants& c, int64_t longest) {
  return chains_us(in, c, static_cast<double>(longest), total_tokens(in), tiles_of(in.value_dim),
                   c.forward_latency_ns, c.forward_work_ns);
}

inline double serial_us(const CostInput& in, const CostConstants& c) {
  const int64_t longest = *std::max_element(in.lengths.begin(), in.lengths.end());
  return std::max(roofline_us(in, c), intra_us(in, c) + forward_us(in, c, longest));
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
  const double scan =
      chains_us(in, c, static_cast<double>(segment_tokens), scanned,
                tiles_of(in.value_dim) + tiles_of(in.key_dim), c.scan_latency_ns, c.scan_work_ns);
  const double size = static_cast<double>(in.key_dim * in.key_dim) / (128.0 * 128.0);
  const double step = std::max(
      c.merge_step_us, c.merge_step_head_us * size * static_cast<double>(in.num_value_heads));
  const double merge = step * static_cast<double>(most_segments - 1) + c.kernel_us;
  return std::max(roofline_us(in, c),
                  intra_us(in, c) + scan + merge + forward_us(in, c, segment_tokens));
}

}  // namespace kda::plan
