// SPDX-License-Identifier: Apache-2.0
// How long calls of this backend take on one core, roughly: says whether another thread is worth
// it. Rates are of AVX-512; where they are too high a call stays on one thread a little longer.
#pragma once

#include "stage/call.hpp"

namespace kda::cpu::blocked {

/// Values of all states that a call reads.
inline double state_values(const stage::Call& call) {
  const Problem& p = call.problem;
  return static_cast<double>(call.sequences.count() * p.num_value_heads) *
         static_cast<double>(p.key_dim * p.value_dim);
}

/// Multiply-adds of a token with its states, over all tokens.
inline double token_values(const stage::Call& call) {
  const Problem& p = call.problem;
  return static_cast<double>(p.batch * p.num_tokens * p.num_value_heads) *
         static_cast<double>(p.key_dim * p.value_dim);
}

inline double decode_microseconds(const stage::Call& call) {
  return state_values(call) / 5000 + token_values(call) / 20000;
}
inline double tail_microseconds(const stage::Call& call) {
  return state_values(call) / 10000 + token_values(call) / 10000;
}
inline double forward_microseconds(const stage::Call& call) {
  return state_values(call) / 8000 + token_values(call) / 20000;
}
inline double backward_microseconds(const stage::Call& call) {
  return state_values(call) / 2000 + token_values(call) / 5000;
}

}  // namespace kda::cpu::blocked
