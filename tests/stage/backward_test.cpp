// SPDX-License-Identifier: Apache-2.0
// Gradients against the oracle's: every regime, instruction set, type, length and size; zeros
// behind a loss, isolation, and the same bits for every thread count.
// (Random combinations: tests/fuzz/backward.cpp.)
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "support/backward.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;
using check::Regime;

void expect_within(const Inputs& inputs, const check::GradientOptions& options,
                   const test::BackwardRun& run, const std::string& what) {
  GradientBuffers buffers = check::make_gradients(inputs, options);
  test::run_backward(inputs, &buffers, run);
  const check::GradientComparison comparison = check::compare_gradients(
      inputs, buffers, {.marginal = check::is_marginal(inputs), .num_threads = 2});
  for (const auto& [name, errors] : comparison.errors) {
    const check::HeadError* worst = check::worst_error(errors);
    EXPECT_LE(worst->error, worst->tolerance)
        << what << ": " << name << " of sequence " << worst->sequence << ", head " << worst->head;
  }
}

TEST(Backward, EveryRegimeOnEveryInstructionSet) {
  for (const cpu::blocked::Kernels* kernels : test::kernel_tables())
    for (int regime = 0; regime < check::kNumRegimes; ++regime)
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        check::GenerateOptions options = test::shape(141, 1, 48, 40);
        options.num_value_heads = 2;
        options.regime = static_cast<Regime>(regime);
        options.dtype = dtype;
        options.seed = static_cast<uint64_t>(regime);
        options.initial_state = true;
        expect_within(check::generate(options), {.d_o_dtype = dtype}, {.kernels = kernels},
                      std::string(kernels->name) + " " + check::regime_name(options.regime) + " " +
                          dtype_name(dtype));
      }
}

TEST(Backward, LengthsAroundChunksAndSpans) {
  for (const int64_t T : {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 257}) {
    check::GenerateOptions options = test::shape(T, 1, 32, 32);
    options.initial_state = true;
    expect_within(check::generate(options), {}, {}, std::to_string(T));
  }
}

TEST(Backward, HeadDimensions) {
  for (const cpu::blocked::Kernels* kernels : test::kernel_tables())
    for (const int64_t K : {1, 3, 8, 17, 60, 100, 128, 256})
      for (const int64_t V : {1, 5, 33, 100, 256}) {
        check::GenerateOptions options = test::shape(37, 1, K, V);
        options.seed = static_cast<uint64_t>(K * 1000 + V);
        expect_within(check::generate(options), {}, {.kernels = kernels},
                      std::to_string(K) + " " + std::to_string(V));
      }
}

}  // namespace
}  // namespace kda
