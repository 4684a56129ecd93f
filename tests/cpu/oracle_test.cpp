// SPDX-License-Identifier: Apache-2.0
// The oracle against cases worked out by hand and against the other form of the recurrence.
#include "cpu/oracle/oracle.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "support/harness.hpp"

namespace kda::cpu::oracle {
namespace {

using check::Inputs;

/// One head, fp32, plain options, so that numbers can be written down.
Inputs by_hand(int64_t T, int64_t K, int64_t V) {
  check::GenerateOptions options = test::shape(T, 1, K, V);
  options.regime = check::Regime::kLog;
  Inputs inputs = check::generate(options);
  inputs.problem.qk_l2norm = false;
  inputs.problem.beta_mode = BetaMode::kPlain;
  inputs.problem.scale = 1;
  return inputs;
}

void fill(io::Buffer& buffer, std::initializer_list<float> values) {
  float* to = buffer.as<float>();
  for (const float value : values) *to++ = value;
}

TEST(Oracle, TwoTokensByHand) {
  Inputs in = by_hand(2, 1, 1);
  fill(in.q, {2, 3});
  fill(in.k, {1, 0.5f});
  fill(in.v, {4, 1});
  fill(in.g, {0, std::log(0.5f)});
  fill(in.beta, {0.5f, 1});
  const HeadResult r = run_head(in.problem, in.tensors(), {0, 2}, 0, {});
  // S1 = 0.5 * 1 * 4 = 2, o1 = 4.  S2' = 1, e = 1 - 0.5 = 0.5, S2 = 1 + 0.25 = 1.25, o2 = 3.75.
  EXPECT_NEAR(r.o[0], 4, 1e-6);
  EXPECT_NEAR(r.o[1], 3.75, 1e-6);
  EXPECT_NEAR(r.state[0], 1.25, 1e-6);
}

TEST(Oracle, InitialStateDecaysAndIsRead) {
  Inputs in = by_hand(1, 2, 1);
  fill(in.q, {1, 10});
  fill(in.k, {0, 0});
  fill(in.v, {7});
  fill(in.g, {std::log(0.5f), std::log(0.25f)});
  fill(in.beta, {1});
  const HeadResult r = run_head(in.problem, in.tensors(), {0, 1}, 0, {8, 4});
  EXPECT_NEAR(r.state[0], 4, 1e-6);
  EXPECT_NEAR(r.state[1], 1, 1e-6);
  EXPECT_NEAR(r.o[0], 4 + 10, 1e-5);
}

TEST(Oracle, UnitKeyWithBetaOneOverwrites) {
  // beta = 1, |k| = 1: the state's row along k is replaced by v, whatever it was.
  Inputs in = by_hand(2, 2, 2);
  fill(in.q, {1, 0, 1, 0});
  fill(in.k, {1, 0, 1, 0});
  fill(in.v, {5, 6, -1, 2});
  fill(in.g, {0, 0, 0, 0});
  fill(in.beta, {1, 1});
  const HeadResult r = run_head(in.problem, in.tensors(), {0, 2}, 0, {9, 9, 3, 4});
  EXPECT_EQ(r.o[0], 5);
  EXPECT_EQ(r.o[2], -1);
  EXPECT_EQ(r.state[0], -1);
  EXPECT_EQ(r.state[1], 2);
  EXPECT_EQ(r.state[2], 3);  // orthogonal rows are kept
}

TEST(Oracle, MatchesTransitionMatrices) {
  // S_t = (I - beta k k^T) Diag(exp g) S + beta k v^T, as written, with explicit matrices.
  constexpr int K = 5, V = 3, T = 7;
  Inputs in = by_hand(T, K, V);
  const auto* k = in.k.as<float>();
  const auto* g = in.g.as<float>();
  const auto* v = in.v.as<float>();
  const auto* beta = in.beta.as<float>();
  std::vector<double> S(K * V, 0);
  for (int t = 0; t < T; ++t) {
    std::vector<double> next(K * V, 0);
    for (int i = 0; i < K; ++i)
      for (int c = 0; c < V; ++c) {
        for (int j = 0; j < K; ++j) {
          const double A = ((i == j) - static_cast<double>(beta[t]) * k[t * K + i] * k[t * K + j]) *
                           std::exp(static_cast<double>(g[t * K + j]));
          next[static_cast<std::size_t>(i * V + c)] += A * S[static_cast<std::size_t>(j * V + c)];
        }
        next[static_cast<std::size_t>(i * V + c)] +=
            static_cast<double>(beta[t]) * k[t * K + i] * v[t * V + c];
      }
    S = next;
  }
  const HeadResult r = run_head(in.problem, in.tensors(), {0, T}, 0, {});
  for (std::size_t i = 0; i < S.size(); ++i) EXPECT_NEAR(r.state[i], S[i], 1e-12);
}

TEST(Oracle, GateModes) {
  Inputs in = by_hand(1, 1, 1);
  fill(in.g, {0.3f});
  Problem& p = in.problem;
  const auto decay = [&] { return log_decay(p, in.tensors(), 0, 0)[0]; };
  EXPECT_NEAR(decay(), 0.3, 1e-7);
  in.A_log = io::Buffer(4);
  in.dt_bias = io::Buffer(4);
  fill(in.A_log, {0.5f});
  fill(in.dt_bias, {-0.1f});
  p.gate_mode = GateMode::kBounded;
  p.lower_bound = -4;
  EXPECT_NEAR(decay(), -4 / (1 + std::exp(-0.3)), 1e-6);
  p.dt_bias = contiguous(DType::kFloat32, {1, 1});
  EXPECT_NEAR(decay(), -4 / (1 + std::exp(-0.2)), 1e-6);
  p.A_log = contiguous(DType::kFloat32, {1});
  EXPECT_NEAR(decay(), -4 / (1 + std::exp(-0.2 * std::exp(0.5))), 1e-6);
  p.gate_mode = GateMode::kSoftplus;
  EXPECT_NEAR(decay(), -std::exp(0.5) * std::log1p(std::exp(0.2)), 1e-6);
}

TEST(Oracle, StepSizes) {
  Inputs in = by_hand(1, 1, 1);
  fill(in.beta, {0.7f});
  in.problem.beta_mode = BetaMode::kPlain;
  EXPECT_NEAR(step_size(in.problem, in.tensors(), 0, 0), 0.7, 1e-7);
  in.problem.beta_mode = BetaMode::kSigmoid;
  EXPECT_NEAR(step_size(in.problem, in.tensors(), 0, 0), 1 / (1 + std::exp(-0.7)), 1e-7);
  in.problem.beta_mode = BetaMode::kSigmoid2;
  EXPECT_NEAR(step_size(in.problem, in.tensors(), 0, 0), 2 / (1 + std::exp(-0.7)), 1e-7);
}

TEST(Oracle, NormalisesWithEpsilonInsideTheRoot) {
  Inputs in = by_hand(1, 2, 1);
  in.problem.qk_l2norm = true;
  fill(in.q, {3, 4});
  fill(in.k, {1e-4f, 0});
  fill(in.v, {1});
  fill(in.g, {0, 0});
  fill(in.beta, {1});
  const HeadResult r = run_head(in.problem, in.tensors(), {0, 1}, 0, {});
  const double k = 1e-4 / std::sqrt(1e-8 + 1e-6);
  EXPECT_NEAR(r.state[0], k, 1e-6);
  EXPECT_NEAR(r.o[0], k * 3 / std::sqrt(25 + 1e-6), 1e-6);
}

TEST(Oracle, ValueHeadsShareTheirQueryHead) {
  check::GenerateOptions options = test::shape(20, 2, 8, 8);
  options.num_value_heads = 6;
  const Inputs in = check::generate(options);
  // Value head 4 reads q/k head 1: the same numbers as a problem with that head alone.
  const HeadResult grouped = run_head(in.problem, in.tensors(), {0, 20}, 4, {});
  Problem alone = in.problem;
  alone.num_heads = 1;
  alone.num_value_heads = 1;
  Tensors t = in.tensors();
  t.q = in.q.as<float>() + 8;
  t.k = in.k.as<float>() + 8;
  t.v = in.v.as<float>() + 4 * 8;
  t.g = in.g.as<float>() + 4 * 8;
  t.beta = in.beta.as<float>() + 4;
  t.A_log = in.A_log.as<float>() + 4;
  t.dt_bias = in.dt_bias.as<float>() + 4 * 8;
  EXPECT_EQ(grouped.o, run_head(alone, t, {0, 20}, 0, {}).o);
}

TEST(Oracle, TokenStatesEndWithTheFinalState) {
  const Inputs in = check::generate(test::shape(5, 1, 4, 4));
  const HeadResult r = run_head(in.problem, in.tensors(), {0, 5}, 0, {}, true);
  ASSERT_EQ(r.token_states.size(), 5u * 16);
  EXPECT_TRUE(std::equal(r.state.begin(), r.state.end(), r.token_states.end() - 16));
}

}  // namespace
}  // namespace kda::cpu::oracle
