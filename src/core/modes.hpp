// SPDX-License-Identifier: Apache-2.0
// Ranges of the numbers among a call's options, for calls with a plan and without one.
#pragma once

#include <cmath>

#include "core/convert.hpp"
#include "core/text.hpp"
#include "kda/types.hpp"

namespace kda {

/// Numbers that stay finite and keep their digits as fp32, also times the gates' and norms'
/// factors.
inline bool fits_fp32(double x) { return std::fabs(x) >= 1e-35 && std::fabs(x) <= 1e35; }

inline Status check_lower_bound(double bound) {
  if (!(std::isfinite(bound) && bound < 0))
    return invalid("lower_bound: ", bound, " is not a finite number below 0");
  if (fits_fp32(bound)) return {};
  return invalid("lower_bound: ", bound, " is outside -1e35..-1e-35, fp32 is computed in");
}

inline Status check_scale(double scale) {
  if (!std::isfinite(scale)) return invalid("scale: ", scale, " is not finite");
  if (scale == 0 || fits_fp32(scale)) return {};
  return invalid("scale: the size of ", scale, " is outside 1e-35..1e35, fp32 is computed in");
}

/// The greatest A_log whose exp() fp32 can hold, and does not multiply what underflowed there.
inline double most_a_log(GateMode mode) {
  switch (mode) {
    case GateMode::kLog: break;  // it has none
    case GateMode::kSoftplus: return 70;
    case GateMode::kBounded: return 88;
  }
  return 0;
}

/// That the rates of `heads` heads, in memory of the host, have a finite exp().
inline Status check_rates(GateMode mode, const void* A_log, DType dtype, int64_t stride,
                          int64_t heads) {
  const double most = most_a_log(mode);
  for (int64_t j = 0; j < heads; ++j)
    if (const double a_log = load_double(A_log, dtype, j * stride); a_log > most)
      return invalid("A_log: entry ", j, " = ", a_log, " is above ", most, " with gate ",
                     gate_mode_name(mode));
  return {};
}

}  // namespace kda
