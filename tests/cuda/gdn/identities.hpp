// SPDX-License-Identifier: Apache-2.0
// Equations between inputs, outputs and gradients of Gated DeltaNet that need no reference, so they
// are checked at sizes for which the oracle takes too long. q and k are not normalised and steps
// are plain: gradients are those of the recurrence itself. E is what the step of a token finds
// wrong, v - S^T k with S in front of the step; sums are over the value heads of a q/k head.
//
//   queries:  q . dq = sum of o . d_o
//   keys:     k . dk = sum of 2 dv . E - dv . v
//   steps:    beta dbeta = dv . E
//   gates:    dg = <S, dS> of the state S in front of a token
//   values:   sum over tokens of o . d_o + <S_end, dS_end> = sum of dv . v + <S_begin, dS_begin>
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gdn/inputs.hpp"
#include "support/backward.hpp"

namespace kda::test::gdn {

/// The sides of an equation, and how far they are apart: relative L2.
struct Sides {
  double difference = 0, size = 0;
  void add(double left, double right) {
    difference += (left - right) * (left - right), size += right * right;
  }
  double error() const { return std::sqrt(difference / size); }
};

/// One sequence with steps of less than 1, K = V = 128.
inline check::Inputs of_the_recurrence(Gates gates, int64_t tokens, int64_t H, int64_t HV) {
  check::Inputs inputs =
      inputs_of({.lengths = {tokens}, .H = H, .HV = HV, .K = 128, .V = 128, .gates = gates});
  Problem& p = inputs.problem;
  p.qk_l2norm = false;
  p.beta_mode = BetaMode::kPlain;
  for (io::Buffer* rows : {&inputs.q, &inputs.k})
    scale_by(rows, p.q.dtype, [](int64_t) { return 1 / std::sqrt(128.0); });
  check::Random random(3);
  for (int64_t i = 0; i < tokens * HV; ++i)
    store_double(inputs.beta.data(), p.beta.dtype, i, random.uniform(0.05, 0.6));
  return inputs;
}

/// A forward and a backward of such a sequence.
class Training {
 public:
  check::Inputs inputs;
  check::GradientBuffers buffers;
  check::Outputs outputs;

  Training(const check::Inputs& x, check::GradientBuffers gradients, const std::string& backend,
           int64_t segments = 0)
      : inputs(x), buffers(std::move(gradients)) {
    RunOptions forward{.plan = segments ? fixed_segments(segments) : PlanOptions{},
                       .out_dtype = DType::kBFloat16};
    forward.plan.backend = backend;
    outputs = run_inputs(x, forward).outputs;
    run_backward(x, &buffers, {.backend = backend, .segments = segments});
  }

  double of_queries() const {
    return over_q_heads(inputs.q, buffers.dq, [&](int64_t t, int64_t head) {
      return dot(outputs.o, buffers.d_o, t, head, HV());
    });
  }

  double of_keys(const std::vector<double>& E) const {
    return over_q_heads(inputs.k, buffers.dk, [&](int64_t t, int64_t head) {
      return 2 * dot(buffers.dv, E, t, head) - dot(buffers.dv, inputs.v, t, head, HV());
    });
  }

  double of_steps(const std::vector<double>& E) const {
    Sides sides;
    for (int64_t i = 0; i < inputs.problem.num_tokens * HV(); ++i)
      sides.add(beta(i) * load_double(buffers.dbeta.data(), buffers.gradients.dbeta->dtype, i),
                dot(buffers.dv, E, i / HV(), i % HV()));
    return sides.error();
  }

  /// E from a forward whose queries are its keys: o = v - E + beta |k|^2 E.
  std::vector<double> what_steps_find(const std::string& backend) const {
    check::Inputs asking = inputs;
    asking.q = asking.k;
    asking.problem.scale = 1;
    const io::Buffer o =
        run_inputs(asking, {.plan = with_backend(backend), .out_dtype = DType::kBFloat16})
            .outputs.o;
    const int64_t H = inputs.problem.num_heads, of_each = HV() / H;
    std::vector<double> E;
    for (int64_t i = 0; i < inputs.problem.num_tokens * HV(); ++i) {
      const double square = dot(inputs.k, inputs.k, i / HV(), i % HV() / of_each, H);
      for (int64_t c = i * 128; c < i * 128 + 128; ++c)
        E.push_back((bf16(inputs.v, c) - bf16(o, c)) / (1 - beta(i) * square));
    }
    return E;
  }

  /// Relative to the terms, not to their sums, in which they may cancel.
  double of_all_values() const {
    Sides sides;
    for (int64_t head = 0; head < HV(); ++head) {
      double left = 0;
      const auto add = [&](double term) { left += term, sides.size += term * term; };
      add(dot_of_states(outputs.final_state, buffers.d_final_state, head));
      add(-dot_of_states(inputs.initial_state, buffers.d_initial_state, head));
      for (int64_t t = 0; t < inputs.problem.num_tokens; ++t) {
        add(dot(outputs.o, buffers.d_o, t, head, HV()));
        add(-dot(buffers.dv, inputs.v, t, head, HV()));
      }
      sides.difference += left * left;
    }
    return sides.error();
  }

  /// Adds dg of token `t`, and <S, dS> of a training whose first token it is.
  void add_gates_of(int64_t t, const Training& behind, Sides* sides) const {
    for (int64_t head = 0; head < HV(); ++head)
      sides->add(buffers.dg.as<float>()[t * HV() + head],
                 dot_of_states(behind.inputs.initial_state, behind.buffers.d_initial_state, head));
  }

  /// The tokens from `t` on, behind the state that those in front of it leave.
  Training behind(int64_t t, const std::string& backend) const {
    check::Inputs rest = slice(inputs, t, inputs.problem.num_tokens);
    rest.initial_state =
        run_inputs(slice(inputs, 0, t), {.plan = with_backend(backend)}).outputs.final_state;
    check::GradientBuffers gradients = check::make_gradients(rest, {.d_o_dtype = DType::kBFloat16});
    gradients.d_final_state = buffers.d_final_state;
    std::memcpy(
        gradients.d_o.data(),
        buffers.d_o.data() + static_cast<std::size_t>(t) * row_bytes(inputs.problem.v, HV(), 128),
        gradients.d_o.size());
    return {rest, std::move(gradients), backend};
  }

 private:
  int64_t HV() const { return inputs.problem.num_value_heads; }

  double beta(int64_t i) const {
    return load_double(inputs.beta.data(), inputs.problem.beta.dtype, i);
  }
  static double bf16(const io::Buffer& rows, int64_t i) {
    return load_double(rows.data(), DType::kBFloat16, i);
  }

  static double dot(const io::Buffer& a, const io::Buffer& b, int64_t t, int64_t head,
                    int64_t heads) {
    double sum = 0;
    for (int64_t i = (t * heads + head) * 128; i < (t * heads + head + 1) * 128; ++i)
      sum += bf16(a, i) * bf16(b, i);
    return sum;
  }
  double dot(const io::Buffer& a, const std::vector<double>& b, int64_t t, int64_t head) const {
    double sum = 0;
    for (int64_t i = (t * HV() + head) * 128; i < (t * HV() + head + 1) * 128; ++i)
      sum += bf16(a, i) * b[static_cast<std::size_t>(i)];
    return sum;
  }

  static double dot_of_states(const io::Buffer& a, const io::Buffer& b, int64_t head) {
    double sum = 0;
    for (int64_t i = head * 128 * 128; i < (head + 1) * 128 * 128; ++i)
      sum += double{a.as<float>()[i]} * double{b.as<float>()[i]};
    return sum;
  }

  template <typename OfValueHead>
  double over_q_heads(const io::Buffer& rows, const io::Buffer& gradients,
                      OfValueHead&& right) const {
    const int64_t H = inputs.problem.num_heads, of_each = HV() / H;
    Sides sides;
    for (int64_t t = 0; t < inputs.problem.num_tokens; ++t)
      for (int64_t head = 0; head < H; ++head) {
        double sum = 0;
        for (int64_t j = head * of_each; j < (head + 1) * of_each; ++j) sum += right(t, j);
        sides.add(dot(rows, gradients, t, head, H), sum);
      }
    return sides.error();
  }
};

}  // namespace kda::test::gdn
