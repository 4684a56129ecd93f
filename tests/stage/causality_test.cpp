// SPDX-License-Identifier: Apache-2.0
// Finite changes after token t leave every output up to t, and every state there, bit-equal.
// (10,000 random cases: tests/fuzz/causality.cpp.)
#include <gtest/gtest.h>

#include <cstring>

#include "core/convert.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

TEST(Causality, EveryCutOfASequence) {
  for (const std::string& backend : test::backends()) {
    check::GenerateOptions options = test::shape(70, 1, 24, 40);
    options.regime = check::Regime::kTrained;
    const check::Inputs inputs = check::generate(options);
    const test::Result before = test::run_inputs(inputs, {.plan = test::with_backend(backend)});
    for (int64_t cut = 0; cut <= 70; ++cut) {
      check::Inputs changed = inputs;
      test::scramble_from(&changed, cut, static_cast<uint64_t>(cut));
      const test::Result after = test::run_inputs(changed, {.plan = test::with_backend(backend)});
      ASSERT_EQ(std::memcmp(before.outputs.o.data(), after.outputs.o.data(),
                            static_cast<std::size_t>(cut) * 40 * 4),
                0)
          << backend << " cut " << cut;
    }
  }
}

TEST(Causality, CheckpointsToo) {
  check::GenerateOptions options = test::shape(64, 2, 16, 16);
  check::Inputs inputs = check::generate(options);
  Problem& p = inputs.problem;
  StateDesc checkpoints;
  checkpoints.num_slots = 4;
  checkpoints.tensor = contiguous(DType::kFloat32, {4, 2, 16, 16});
  p.checkpoints = checkpoints;
  p.checkpoint_every = 16;
  const test::Result before = test::run_inputs(inputs);
  check::Inputs changed = inputs;
  test::scramble_from(&changed, 33, 1);
  const test::Result after = test::run_inputs(changed);
  const std::size_t two_states = 2 * 2 * 16 * 16 * 4;
  EXPECT_EQ(
      std::memcmp(before.outputs.checkpoints.data(), after.outputs.checkpoints.data(), two_states),
      0);
  EXPECT_FALSE(test::same_bits(before.outputs.checkpoints, after.outputs.checkpoints));
}

}  // namespace
}  // namespace kda
