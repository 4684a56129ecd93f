// SPDX-License-Identifier: Apache-2.0
// Parts that the predictions of the CUDA backends share: the work, its roofline, cuts, the merge of
// segments. The constants of a backend are in its cost.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "cuda/common/cost_sizes.hpp"
#include "plan/partition.hpp"

namespace kda::cuda {

using plan::kMinimumGain;
/// The clock that times and cycles of an H200 are taken with.
inline constexpr double kH200Gigahertz = 1.75;
/// Facts without a clock are those of an H200.
inline double gigahertz_of(const DeviceFacts& device) {
  return device.gigahertz > 0 ? device.gigahertz : kH200Gigahertz;
}
/// A large copy of an H200, of facts without a rate.
inline constexpr double kH200BytesPerSecond = 4.24e12;
inline double bytes_per_second_of(const DeviceFacts& device) {
  return device.memory_bytes_per_second > 0 ? device.memory_bytes_per_second : kH200BytesPerSecond;
}

/// q, k, v, o, g in bf16 and beta, of a token and value head at K = V = 128.
inline constexpr double kBytesPerToken = 1282;

struct CostInput : CostSizes {
  std::span<const int64_t> lengths;  ///< tokens of each sequence; the workload's
};

/// Without lengths.
inline CostSizes cost_sizes(const Problem& p, const DeviceFacts& device) {
  return {.sums = {},
          .num_heads = p.num_heads,
          .num_value_heads = p.num_value_heads,
          .key_dim = p.key_dim,
          .value_dim = p.value_dim,
          .num_sms = device.num_sms,
          .bytes_per_second = bytes_per_second_of(device)};
}

inline CostInput cost_input(const plan::Workload& work, const DeviceFacts& device) {
  CostInput in{{.sums = {},
                .num_heads = work.num_heads,
                .num_value_heads = work.num_value_heads,
                .key_dim = work.key_dim,
                .value_dim = work.value_dim,
                .num_sms = work.num_sms,
                .bytes_per_second = bytes_per_second_of(device)},
               work.lengths};
  for (const int64_t length : work.lengths) in.sums.add(length);
  return in;
}
CostInput cost_input(plan::Workload&& work,
                     const DeviceFacts& device) = delete;  // its lengths stay

inline double roofline_us(const CostSizes& in) {
  return memory_us(in, kBytesPerToken, in.bytes_per_second);
}

/// Segments of at most `segment_tokens` behind first ones of `first_tokens`.
inline Cut cut_of(const CostInput& in, int64_t first_tokens, int64_t segment_tokens) {
  Cut cut;
  for (const int64_t length : in.lengths) cut.add(length, first_tokens, segment_tokens);
  return cut;
}

}  // namespace kda::cuda
