// SPDX-License-Identifier: Apache-2.0
// The truth: the recurrence of one (sequence, value head) in float64, token by token, in plain
// loops that read like the formula. Every backend is measured against it; it shares none of
// their arithmetic. (Formulas: docs/operation.md.)
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kda/problem.hpp"
#include "kda/run.hpp"
#include "stage/call.hpp"

namespace kda::cpu::oracle {

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Tokens [begin, end) of the flattened [B * T].
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

/// Results of one value head. A magnitude is the same sum with every term taken by its absolute
/// value: the scale on which rounding errors are judged (docs/accuracy.md).
struct HeadResult {
  std::vector<double> o;                // [L, V]
  std::vector<double> o_magnitude;      // [L, V]
  std::vector<double> state;            // [K, V] after the last token
  std::vector<double> state_magnitude;  // [K, V]
  std::vector<double> token_states;     // [L, K, V] if asked for
  std::vector<double> v_new;            // [L, V]
};

/// `initial_state`: [K, V] as doubles, or empty for zero.
/// `keep_states`: also fill token_states, the state after every token.
HeadResult run_head(const Problem& problem, const Tensors& tensors, Span span, int64_t value_head,
                    const std::vector<double>& initial_state, bool keep_states = false);

/// `size` elements of row (token, head) of a [B, T, heads, ..] tensor.
std::vector<double> load_row(const Problem& problem, const TensorDesc& desc, const void* base,
                             int64_t flat_token, int64_t head, int64_t size);

/// Loads the rows of `span`, one after the other.
std::vector<double> load_rows(const Problem& problem, const TensorDesc& desc, const void* base,
                              Span span, int64_t head, int64_t size);

/// exp(A_log) of a head, 1 without A_log; dt_bias of a channel, 0 without it.
double gate_rate(const Problem& problem, const Tensors& tensors, int64_t value_head);
double gate_bias(const Problem& problem, const Tensors& tensors, int64_t value_head,
                 int64_t channel);

/// Log decay of one token and head, [K]: the gate transform alone.
std::vector<double> log_decay(const Problem& problem, const Tensors& tensors, int64_t flat_token,
                              int64_t value_head);

/// Log decays of a row of raw gates.
std::vector<double> log_decay(const Problem& problem, const Tensors& tensors,
                              std::vector<double> raw, int64_t value_head);

/// x / sqrt(sum x^2 + 1e-6)
void l2_normalize(std::vector<double>& x);

/// beta of one token and head after its transform.
double step_size(const Problem& problem, const Tensors& tensors, int64_t flat_token,
                 int64_t value_head);

/// beta after its transform.
double step_size(const Problem& problem, double raw);

/// Writes a state; a negative slot is none.
void store_state(const Problem& problem, const StateDesc& desc, void* base, int64_t slot,
                 int64_t value_head, const double* state);

/// Writes o of the tokens of `span`, one after the other.
void store_outputs(const stage::Call& call, Span span, int64_t value_head,
                   const std::vector<double>& o);

/// State `slot` of a buffer as [K, V] doubles.
std::vector<double> load_state(const Problem& problem, const StateDesc& desc, const void* base,
                               int64_t slot, int64_t value_head);

}  // namespace kda::cpu::oracle
