// SPDX-License-Identifier: Apache-2.0
// Errors of long sequences on a pool of boundary states and tails: fp32, bf16 and split states, in
// eight regimes of gates and step sizes, against the float64 recurrence.
#pragma once

#include <cstdint>

namespace kda::soak {

/// Decodes so many tokens on the CPU, one after the other, and prints a table. Returns whether all
/// errors are within their marks (docs/design/decode.md, "Split states").
bool measure_tail_errors(int64_t tokens);

}  // namespace kda::soak
