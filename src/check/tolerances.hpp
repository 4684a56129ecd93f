// SPDX-License-Identifier: Apache-2.0
// Every tolerance of libkda. Errors are measured per (sequence, value head) as
//   |x - ref|_2 / max(|ref|_2, 1e-3 magnitude)     (compare.hpp, docs/accuracy.md)
// Loosening one needs a CHANGELOG line.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kda/types.hpp"

namespace kda::check {

/// fp32 arithmetic, fp32 stored: worst head of any problem.
inline constexpr double kFp32Worst = 1e-5;
/// and the median over heads.
inline constexpr double kFp32Median = 1e-6;
/// beta > 1.9 with repeated keys and next to no decay: every step nearly reflects the error of the
/// one before; a plain serial fp32 loop grows alike.
inline constexpr double kMarginalPerToken = 1e-7;

/// Rounding a value once: at most 2^-9 (bf16) or 2^-12 (fp16) of it, 1.66e-3 and 2.07e-4 in the
/// mean square over many values. Few values (< 256) may sit near the maximum together.
inline double output_rounding(DType stored, int64_t values) {
  if (stored == DType::kBFloat16) return values >= 256 ? 1.8e-3 : 0x1p-9;
  if (stored == DType::kFloat16) return values >= 256 ? 2.25e-4 : 0x1p-12;
  return 0;
}

/// Allowed error of an output of one head. `marginal`: see kMarginalPerToken.
inline double forward_tolerance(DType stored, int64_t values, int64_t tokens, bool marginal) {
  const double arithmetic =
      marginal ? std::max(kFp32Worst, kMarginalPerToken * static_cast<double>(tokens)) : kFp32Worst;
  const double rounding = output_rounding(stored, values);
  return rounding > 0 && values >= 256 && !marginal ? rounding : rounding + arithmetic;
}

/// Context parallelism: error relative to the serial run's.
inline constexpr double kSegmented16BitRatio = 1.1;
inline constexpr double kSegmentedFp32Ratio = 2.0;

}  // namespace kda::check
