// SPDX-License-Identifier: Apache-2.0
// The truth about gradients: the adjoint of the recurrence of one (sequence, value head) in
// float64, token by token, in plain loops that read like the formulas (src/stage/backward.hpp).
#pragma once

#include <vector>

#include "cpu/oracle/oracle.hpp"

namespace kda::cpu::oracle {

/// A gradient, and the same sums with every term taken by its absolute value.
struct Gradient {
  std::vector<double> value;
  std::vector<double> magnitude;

  void resize(std::size_t count) {
    value.assign(count, 0);
    magnitude.assign(count, 0);
  }
};

/// Gradients of the inputs as given, of one value head: other heads of its group add their own dq
/// and dk, other sequences their own dA_log and ddt_bias. L is the length of the span.
struct HeadGradients {
  Gradient dq, dk;           // [L, K]
  Gradient dv;               // [L, V]
  Gradient dg;               // [L, K]
  Gradient dbeta;            // [L]
  Gradient dA_log;           // [1]; zero without A_log
  Gradient ddt_bias;         // [K]; zero without dt_bias
  Gradient d_initial_state;  // [K, V]
};

/// `initial_state`, `d_final_state`: [K, V]; `d_o`: [L, V]; empty means zero.
HeadGradients backward_head(const Problem& problem, const Tensors& tensors, Span span,
                            int64_t value_head, const std::vector<double>& initial_state,
                            const std::vector<double>& d_o,
                            const std::vector<double>& d_final_state);

}  // namespace kda::cpu::oracle
