// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm90.gdn against the oracle: gates, lengths, heads, sizes, steps, what is
// wanted of it, and what it declines.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "cuda/gdn/inputs.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"
#include "support/padded.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::GradientOptions;
using check::Inputs;
using test::BackwardRun;
using test::gdn::Gates;
using Errors = std::map<std::string, double>;

constexpr const char* kName = "cuda.sm90.gdn";
constexpr GradientOptions kBf16{.d_o_dtype = DType::kBFloat16};

class GdnBackward : public test::HopperTest {};

BackwardRun on_gdn() { return {.backend = "gdn"}; }

GradientBuffers gradients_of(const Inputs& inputs, const GradientOptions& options = kBf16) {
  return check::make_gradients(inputs, options);
}

void run(const Inputs& inputs, GradientBuffers* buffers, const BackwardRun& how = on_gdn()) {
  test::BackwardCall call(inputs, buffers->gradients, how);
  ASSERT_EQ(call.plan.plan.implementation, kName);
  throw_if_error(call.run(buffers));
}

/// Errors of every gradient over all heads; those of each head are within their tolerances.
Errors errors_of(const Inputs& inputs, const GradientBuffers& buffers, const std::string& what) {
  const check::GradientComparison comparison =
      check::compare_gradients(inputs, buffers,
                               {.marginal = check::is_marginal(inputs),
                                .operands = DType::kBFloat16,
                                .num_threads = test::oracle_threads()});
  for (const auto& [name, errors] : comparison.errors) {
    const check::HeadError* worst = check::worst_error(errors);
    EXPECT_LE(worst->error, worst->tolerance)
        << what << ": " << name << " of sequence " << worst->sequence << ", head " << worst->head;
  }
  if (std::getenv("KDA_TEST_VERBOSE"))
    for (const auto& [name, error] : comparison.all_heads)
      std::printf("  %-28s %-16s %.2e\n", what.c_str(), name.c_str(), error);
  return comparison.all_heads;
}

Errors expect_within(const Inputs& inputs, GradientBuffers buffers, const std::string& what,
                     const BackwardRun& how = on_gdn()) {
  run(inputs, &buffers, how);
  return errors_of(inputs, buffers, what);
}
Errors expect_within(const Inputs& inputs, const std::string& what) {
  return expect_within(inputs, gradients_of(inputs), what);
}

// ---- gates

/// 1.15 times what bf16 operands, states, errors and outputs cost in emulation, relative L2 over
/// all heads, in the order of `names`, and 0.4e-3 at least.
void expect_all_within(const Errors& errors, const std::array<double, 6>& bounds,
                       const std::string& what) {
  constexpr const char* kNames[] = {"dq", "dk", "dv", "dg", "dbeta", "d_initial_state"};
  for (std::size_t i = 0; i < bounds.size(); ++i)
    EXPECT_LE(errors.at(kNames[i]), 1e-3 * std::max(1.15 * bounds[i], 0.4))
        << what << ": " << kNames[i];
}

TEST_F(GdnBackward, EveryGate) {
  const int64_t tokens = test::emulated() ? 200 : 1000;
  for (const Gates gates : test::gdn::kAllGates) {
    const Inputs inputs = test::gdn::inputs_of(
        {.lengths = {tokens}, .H = 2, .HV = 4, .K = 128, .V = 128, .gates = gates});
    expect_all_within(expect_within(inputs, test::gdn::name_of(gates)), {2.8, 3.0, 2.4, 2.1, 3.4, 1.7},
                      test::gdn::name_of(gates));
  }
}

}  // namespace
}  // namespace kda
