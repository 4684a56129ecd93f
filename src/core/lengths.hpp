// SPDX-License-Identifier: Apache-2.0
// Lengths of packed sequences.
#pragma once

#include <cstdint>

#include "core/text.hpp"

namespace kda {

/// Refuses cu_seqlens whose N + 1 entries, of which `entry(n)` reads one, do not begin with 0,
/// fall, or do not end with T.
template <class Entry>
Status check_lengths(int64_t N, int64_t T, const Entry& entry) {
  if (const int64_t first = entry(0); first != 0)
    return invalid("cu_seqlens: starts with ", first, ", must start with 0");
  for (int64_t n = 0; n < N; ++n)
    if (const int64_t begin = entry(n), end = entry(n + 1); end < begin)
      return invalid("cu_seqlens: entry ", n + 1, " = ", end, " is below entry ", n, " = ", begin);
  if (const int64_t last = entry(N); last != T)
    return invalid("cu_seqlens: ends with ", last, ", must end with T = ", T);
  return {};
}

}  // namespace kda
