// SPDX-License-Identifier: Apache-2.0
// Regimes are what docs/files.md says, and a seed means the same numbers everywhere.
#include "check/generate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "check/compare.hpp"
#include "cpu/oracle/oracle.hpp"
#include "support/harness.hpp"

namespace kda::check {
namespace {

Inputs make(Regime regime, int64_t tokens = 256, uint64_t seed = 1) {
  GenerateOptions options = test::shape(tokens, 2, 64, 16);
  options.regime = regime;
  options.seed = seed;
  return generate(options);
}

/// Mean log decay a token of each channel of a head, ascending.
std::vector<double> mean_decays(const Inputs& inputs, int64_t head) {
  std::vector<double> mean(static_cast<std::size_t>(inputs.problem.key_dim), 0);
  for (int64_t t = 0; t < inputs.problem.num_tokens; ++t) {
    const auto g = cpu::oracle::log_decay(inputs.problem, inputs.tensors(), t, head);
    for (std::size_t d = 0; d < g.size(); ++d)
      mean[d] += g[d] / static_cast<double>(inputs.problem.num_tokens);
  }
  std::sort(mean.begin(), mean.end());
  return mean;
}

TEST(Generate, SeedsRepeatAndDiffer) {
  EXPECT_TRUE(test::same_bits(make(Regime::kTrained).q, make(Regime::kTrained).q));
  EXPECT_FALSE(test::same_bits(make(Regime::kTrained).q, make(Regime::kTrained, 256, 2).q));
}

TEST(Generate, KnownNumbers) {
  Random random(42);
  EXPECT_EQ(random.next(), 13679457532755275413u);  // splitmix64's published first output
  Random normals(0);
  double sum = 0, squares = 0;
  for (int i = 0; i < 100000; ++i) {
    const double x = normals.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 1e5, 0, 0.01);
  EXPECT_NEAR(squares / 1e5, 1, 0.02);
}

TEST(Generate, DecaysOfTheRegimes) {
  for (const double g : mean_decays(make(Regime::kStrong), 0)) EXPECT_LT(g, -1.5);
  const auto slow = mean_decays(make(Regime::kSlow), 0);
  EXPECT_GT(slow.front(), -0.8);
  EXPECT_GT(slow.back(), -0.001);
  const auto trained = mean_decays(make(Regime::kTrained), 0);
  EXPECT_LT(trained.front(), -3);
  EXPECT_GT(trained.back(), -0.02);
  const Inputs mixed = make(Regime::kMixed);
  EXPECT_LT(mean_decays(mixed, 0).back(), -1);
  EXPECT_GT(mean_decays(mixed, 1).back(), -0.01);
}

TEST(Generate, SoftplusReachesFarDown) {
  GenerateOptions options = test::shape(2000, 4, 128, 16);
  options.regime = Regime::kSoftplus;
  const Inputs inputs = generate(options);
  double fastest = 0;
  for (int64_t head = 0; head < 4; ++head)
    for (int64_t t = 0; t < 2000; t += 7)
      for (const double g : cpu::oracle::log_decay(inputs.problem, inputs.tensors(), t, head))
        fastest = std::min(fastest, g);
  EXPECT_LT(fastest, -30);
}

TEST(Generate, NeedlesAreThere) {
  const Inputs inputs = make(Regime::kNeedle, 400);
  const auto at = [&](int64_t t, int64_t d) {
    return cpu::oracle::log_decay(inputs.problem, inputs.tensors(), t,
                                  0)[static_cast<std::size_t>(d)];
  };
  EXPECT_EQ(at(19, 5), -200);
  EXPECT_EQ(at(19, 0), 0);
  int thousands = 0, infinite = 0;
  for (int64_t t = 0; t < 400; ++t)
    for (int64_t d = 0; d < 64; ++d) {
      thousands += at(t, d) == -1000;
      infinite += std::isinf(at(t, d));
    }
  EXPECT_GT(thousands, 0);
  EXPECT_GT(infinite, 0);
}

TEST(Generate, StructuredSetsForgetInTurn) {
  const Inputs inputs = make(Regime::kStructured);
  const auto g = [&](int64_t t) {
    return cpu::oracle::log_decay(inputs.problem, inputs.tensors(), t, 0);
  };
  EXPECT_LT(g(0)[0], -4.9);
  EXPECT_GT(g(0)[1], -1e-6);
  EXPECT_GT(g(8)[0], -1e-6);
  EXPECT_LT(g(8)[1], -4.9);
  EXPECT_EQ(inputs.k.as<float>()[8 * 2 * 64], 1);
  EXPECT_EQ(inputs.k.as<float>()[8 * 2 * 64 + 1], -1);
}

TEST(Generate, EqualKeysAreMarginal) {
  EXPECT_TRUE(is_marginal(make(Regime::kEqualKeys)));
  EXPECT_FALSE(is_marginal(make(Regime::kSlow)));
  const Inputs inputs = make(Regime::kEqualKeys);
  EXPECT_EQ(inputs.k.as<float>()[5], inputs.k.as<float>()[100 * 128 + 5]);
}

TEST(Generate, OneGateAHeadHasItsBiasInside) {
  GenerateOptions options = test::shape(20, 2);
  options.regime = Regime::kSoftplus;
  const Inputs each = generate(options);
  options.head_gates = true;
  const Inputs one = generate(options);
  EXPECT_TRUE(has_head_gate(one.problem));
  EXPECT_FALSE(one.problem.dt_bias);
  for (int64_t t = 0; t < 20; ++t)
    for (int64_t head = 0; head < 2; ++head)
      EXPECT_NEAR(cpu::oracle::log_decay(one.problem, one.tensors(), t, head)[5],
                  cpu::oracle::log_decay(each.problem, each.tensors(), t, head)[1], 1e-6);
}

TEST(Generate, RefusesBadSizes) {
  GenerateOptions options = test::shape(10, 2);
  options.num_value_heads = 3;
  EXPECT_THROW(generate(options), Error);
  options = test::shape(10, 2, 300);
  EXPECT_THROW(generate(options), Error);
  options = test::shape(-1, 2);
  EXPECT_THROW(generate(options), Error);
  options = test::shape(0, 2);
  options.seq_lens = {3, -1};
  EXPECT_THROW(generate(options), Error);
  EXPECT_THROW(parse_regime("weak"), Error);
  for (int r = 0; r < kNumRegimes; ++r)
    EXPECT_EQ(parse_regime(regime_name(static_cast<Regime>(r))), static_cast<Regime>(r));
}

}  // namespace
}  // namespace kda::check
