// SPDX-License-Identifier: Apache-2.0
// The comparison itself: it must see what is wrong, where, and nothing else.
#include "check/compare.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "check/tolerances.hpp"
#include "support/harness.hpp"

namespace kda::check {
namespace {

TEST(Compare, RelativeError) {
  EXPECT_NEAR(relative_error({3, 4.1}, {3, 4}, {3, 4}), 0.1 / 5, 1e-12);
  // Cancellation: judged against the magnitude of what was summed.
  EXPECT_NEAR(relative_error({1e-6}, {0}, {1}), 1e-3, 1e-9);
  EXPECT_EQ(relative_error({0}, {0}, {0}), 0);
  EXPECT_LT(relative_error({0}, {1e-42}, {1e-42}), 1e-9);  // underflow to nothing
  EXPECT_TRUE(std::isinf(relative_error({NAN}, {0}, {1})));
  EXPECT_TRUE(std::isinf(relative_error({1, INFINITY}, {1, 2}, {1, 2})));
}

TEST(Compare, SeesOneWrongElement) {
  const Inputs inputs = generate(test::shape(50, 3, 16, 16));
  test::Result result = test::run_inputs(inputs);
  EXPECT_TRUE(compare(inputs, result.problem, result.outputs).within());
  result.outputs.o.as<float>()[(20 * 3 + 1) * 16 + 4] *= 1.01f;
  const Comparison broken = compare(inputs, result.problem, result.outputs);
  EXPECT_FALSE(broken.within());
  EXPECT_EQ(broken.worst_o()->head, 1);
  EXPECT_GT(broken.worst_o()->error, 1e-5);
  EXPECT_LE(broken.worst_final_state()->error, kFp32Worst);
}

TEST(Compare, SeesAWrongStateAndANaN) {
  const Inputs inputs = generate(test::shape(30, 1, 8, 8));
  test::Result result = test::run_inputs(inputs);
  result.outputs.final_state.as<float>()[3] = NAN;
  EXPECT_FALSE(compare(inputs, result.problem, result.outputs).within());
}

/// The right result of a type that cannot hold it is no result: the tolerance stays finite,
/// whatever the type, and the error does not.
TEST(Compare, NothingThatOverflowsIsWithin) {
  const struct {
    DType stored;
    double value;
    bool overflows;
  } rows[] = {{DType::kFloat16, 65504, false},  {DType::kFloat16, 65520, true},
              {DType::kBFloat16, 3e38, false},  {DType::kBFloat16, 3.4e38, true},
              {DType::kFloat32, 3.4e38, false}, {DType::kFloat32, 1e39, true},
              {DType::kFloat64, 1e39, false},   {DType::kFloat64, INFINITY, true},
              {DType::kFloat16, NAN, true}};
  for (const auto& row : rows)
    for (const double x : {row.value, static_cast<double>(INFINITY), 1.0}) {
      const std::vector<double> ref = {1, row.value}, magnitude = {1, std::abs(row.value)};
      const HeadError entry = judge({1, x}, ref, magnitude, row.stored, 8, {});
      EXPECT_TRUE(std::isfinite(entry.tolerance)) << dtype_name(row.stored) << row.value;
      EXPECT_EQ(entry.overflow != 0, row.overflows) << dtype_name(row.stored) << row.value;
      EXPECT_TRUE(!row.overflows || std::isinf(entry.error));
      EXPECT_EQ(entry.within(), !row.overflows && x == row.value) << dtype_name(row.stored) << x;
    }
  EXPECT_FALSE(judge({1}, {1}, {1e200}, DType::kFloat32, 8, {}).within());
}

/// For problems made at random: the infinity that storing a reference gives, and the rest as
/// always.
TEST(Compare, InfinitiesMayBeRight) {
  const auto within = [](std::vector<double> x, double reference) {
    const CompareOptions options{.infinities = true};
    return judge(x, {1, reference}, {1, std::abs(reference)}, DType::kFloat16, 8, options).within();
  };
  EXPECT_TRUE(within({1, INFINITY}, 1e5));
  EXPECT_TRUE(within({1, -INFINITY}, -1e5));
  EXPECT_FALSE(within({1, -INFINITY}, 1e5));
  EXPECT_FALSE(within({1, 65504}, 1e5));
  EXPECT_FALSE(within({1, NAN}, 1e5));
  EXPECT_FALSE(within({1.01, INFINITY}, 1e5));
  EXPECT_FALSE(within({1, INFINITY}, NAN));
}

TEST(Compare, TruthsOfOneComparisonServeTheNext) {
  check::GenerateOptions shape = test::shape(0, 2, 8, 8);
  shape.seq_lens = {5, 0, 20};
  shape.initial_state = true;
  const Inputs inputs = generate(shape);
  test::Result result = test::run_inputs(inputs);
  std::vector<cpu::oracle::HeadResult> truths;
  EXPECT_TRUE(compare(inputs, result.problem, result.outputs, {.num_threads = 2, .truths = &truths})
                  .within());
  ASSERT_EQ(truths.size(), 6u);
  // What is kept is taken, and judged as if it were computed anew.
  result.outputs.o.as<float>()[(20 * 2 + 1) * 8 + 4] *= 1.01f;
  const Comparison anew = compare(inputs, result.problem, result.outputs);
  const Comparison kept = compare(inputs, result.problem, result.outputs, {.truths = &truths});
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(kept.o[i].error, anew.o[i].error);
    EXPECT_EQ(kept.final_state[i].error, anew.final_state[i].error);
  }
  truths[5].o[0] += 1;
  EXPECT_FALSE(compare(inputs, result.problem, result.outputs, {.truths = &truths}).o[5].error ==
               anew.o[5].error);
}

TEST(Compare, MedianAndEmptyProblems) {
  EXPECT_EQ(median_error({}), 0);
  EXPECT_EQ(median_error({{0, 0, 3, 1}, {0, 0, 1, 1}, {0, 0, 2, 1}}), 2);
  EXPECT_EQ(largest_error({}), 0);
  EXPECT_EQ(largest_error({{0, 0, 3, 9}, {0, 1, 1, 1}}), 3);
  EXPECT_EQ(worst_error({{0, 0, 3, 9}, {0, 1, 1, 1}})->head, 1);
  const Comparison nothing;
  EXPECT_TRUE(nothing.within());
  EXPECT_EQ(nothing.worst_o(), nullptr);
}

TEST(Compare, ReportsProgress) {
  const Inputs inputs = generate(test::shape(5, 3, 8, 8));
  const test::Result result = test::run_inputs(inputs);
  CompareOptions options;
  int64_t last = 0;
  options.progress = [&](int64_t done, int64_t total) {
    last = done;
    EXPECT_EQ(total, 3);
  };
  compare(inputs, result.problem, result.outputs, options);
  EXPECT_EQ(last, 3);
}

TEST(Tolerances, FollowRoundingAndLength) {
  EXPECT_EQ(forward_tolerance(0, 16, 100, false), kFp32Worst);
  EXPECT_NEAR(forward_tolerance(1.66e-3, 1000, 100, false), 1.68e-3, 1e-9);
  EXPECT_NEAR(forward_tolerance(0, 1000, 4096, true), 4.096e-4, 1e-9);
  EXPECT_EQ(forward_tolerance(0, 15, 1, false), kFp32FewValues);
}

}  // namespace
}  // namespace kda::check
