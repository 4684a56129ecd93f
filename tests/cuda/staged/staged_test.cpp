// SPDX-License-Identifier: Apache-2.0
// The staged pipeline on a GPU: every regime, type, head size, length, state option and partition
// in which it serves, against the oracle.
#include <gtest/gtest.h>

#include <cstring>

#include "core/convert.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::Inputs;
using check::Regime;

class Staged : public test::GpuTest {};

using test::shape16;

test::RunOptions on_staged(DType out_dtype) {
  return {.plan = test::with_backend("staged"), .out_dtype = out_dtype};
}
void expect_within(const Inputs& inputs, const test::RunOptions& options, const std::string& what) {
  test::expect_within(inputs, options, "cuda.sm80.staged", what);
}

TEST_F(Staged, EveryRegimeTypeAndHeadSize) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
      for (const auto& [K, V] : {std::pair{128, 128}, std::pair{64, 64}}) {
        check::GenerateOptions options = shape16(test::long_case(1000), 2, K, V, dtype);
        options.regime = static_cast<Regime>(regime);
        options.seed = static_cast<uint64_t>(regime);
        expect_within(check::generate(options), on_staged(dtype),
                      std::string(check::regime_name(options.regime)) + " " + dtype_name(dtype) +
                          " K " + std::to_string(K));
      }
}

TEST_F(Staged, TokenFormInEveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
      for (const int64_t K : {128, 64, 40}) {
        check::GenerateOptions options = shape16(test::long_case(333), 2, K, 64, dtype);
        options.regime = static_cast<Regime>(regime);
        test::RunOptions run = on_staged(dtype);
        run.plan.intra_form = IntraForm::kToken;
        expect_within(check::generate(options), run,
                      std::string("token form, ") + check::regime_name(options.regime));
      }
}

TEST_F(Staged, LengthsAroundChunks) {
  for (const int64_t T : {1, 2, 15, 16, 17, 31, 33, 47, 49, 63, 64, 65, 127, 128, 129, 191, 257})
    expect_within(check::generate(shape16(T, 2, 128, 128)), on_staged(DType::kBFloat16),
                  "T " + std::to_string(T));
}

TEST_F(Staged, OtherHeadSizes) {
  for (const int64_t K : {8, 16, 56, 72, 104, 120})
    for (const int64_t V : {8, 40, 72, 136, 200, 256})
      expect_within(check::generate(shape16(150, 1, K, V)), on_staged(DType::kFloat32),
                    "K " + std::to_string(K) + " V " + std::to_string(V));
}

TEST_F(Staged, GroupedPackedStridedMixed) {
  check::GenerateOptions options = shape16(0, 2, 128, 64);
  options.num_value_heads = 6;
  options.seq_lens = {0, 70, 1, 0, 64, 200, 0};
  expect_within(check::generate(options), on_staged(DType::kBFloat16), "packed, grouped");
  options = shape16(100, 2, 64, 128);
  options.batch = 3;
  Inputs inputs = check::generate(options);
  const test::Result dense = test::run_inputs(inputs, on_staged(DType::kBFloat16));
  test::restride(&inputs, 8);
  const test::Result strided = test::run_inputs(inputs, on_staged(DType::kBFloat16));
  ASSERT_EQ(strided.plan.implementation, "cuda.sm80.staged");
  EXPECT_TRUE(test::same_bits(dense.outputs.o, strided.outputs.o));
  EXPECT_TRUE(test::same_bits(dense.outputs.final_state, strided.outputs.final_state));
  expect_within(inputs, on_staged(DType::kFloat16), "strided, batch of 3");
}

TEST_F(Staged, StateLayoutsTypesAndCheckpoints) {
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
    for (const DType state_dtype : {DType::kFloat32, DType::kBFloat16}) {
      Inputs inputs = check::generate(shape16(300, 2, 64, 128));
      Problem& p = inputs.problem;
      const bool kv = layout == StateLayout::kKV;
      const auto states = [&](int64_t n) {
        return contiguous(state_dtype, {n, 2, kv ? 64 : 128, kv ? 128 : 64});
      };
      p.state_layout = layout;
      p.initial_state->tensor = states(1);
      io::Buffer start(2 * 64 * 128 * static_cast<std::size_t>(dtype_size(state_dtype)));
      for (int64_t i = 0; i < 2 * 64 * 128; ++i)
        store_element(start.data(), state_dtype, i, 0.1f * inputs.initial_state.as<float>()[i]);
      inputs.initial_state = start;
      p.checkpoints = StateDesc{.tensor = states(4), .num_slots = 4};
      p.checkpoint_every = 64;
      check::want_final_state(&p);
      p.final_state->tensor = states(1);
      expect_within(inputs, on_staged(DType::kBFloat16), "layout and type");
      const test::Result whole = test::run_inputs(inputs, on_staged(DType::kBFloat16));
      Inputs prefix = inputs;
      prefix.problem.checkpoints.reset();
      prefix.problem.checkpoint_every = 0;
      prefix.problem.num_tokens = 192;
      const test::Result there = test::run_inputs(prefix, on_staged(DType::kBFloat16));
      const std::size_t bytes = start.size();
      EXPECT_EQ(std::memcmp(whole.outputs.checkpoints.data() + 2 * bytes,
                            there.outputs.final_state.data(), bytes),
                0);
    }
}

TEST_F(Staged, SegmentsInEveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    for (const int64_t K : {64, 128}) {
      check::GenerateOptions options = shape16(0, 1, K, 128);
      options.num_value_heads = 2;
      options.seq_lens = {test::long_case(1500), 40, 0, test::long_case(700)};
      options.regime = static_cast<Regime>(regime);
      for (const int64_t count : {2, 5, 16})
        expect_within(check::generate(options),
                      {.plan = test::fixed_segments(count), .out_dtype = DType::kBFloat16},
                      std::string("segments ") + check::regime_name(options.regime));
    }
}

TEST_F(Staged, SegmentsAreBitEqualOnceTheStateIsForgotten) {
  check::GenerateOptions options = shape16(test::long_case(2048), 2, 128, 128);
  options.regime = Regime::kStrong;
  const Inputs inputs = check::generate(options);
  const test::Result serial = test::run_inputs(inputs, on_staged(DType::kBFloat16));
  const test::Result cut =
      test::run_inputs(inputs, {.plan = test::fixed_segments(4), .out_dtype = DType::kBFloat16});
  EXPECT_TRUE(test::same_bits(serial.outputs.o, cut.outputs.o));
  EXPECT_TRUE(test::same_bits(serial.outputs.final_state, cut.outputs.final_state));
}

TEST_F(Staged, ResumesAtEveryChunkBoundaryWithTheSameBits) {
  Inputs inputs = check::generate(shape16(256, 2, 128, 128));
  const test::RunOptions run = on_staged(DType::kBFloat16);
  const test::Result whole = test::run_inputs(inputs, run);
  const std::size_t row = 2 * 128 * 2;
  for (const int64_t cut : {64, 128, 192}) {
    Inputs head = inputs;
    head.problem.num_tokens = cut;
    const test::Result first = test::run_inputs(head, run);
    Inputs tail = test::slice(inputs, cut, 256);
    tail.initial_state = first.outputs.final_state;
    const test::Result second = test::run_inputs(tail, run);
    EXPECT_TRUE(test::same_bits(whole.outputs.final_state, second.outputs.final_state));
    EXPECT_EQ(std::memcmp(whole.outputs.o.data() + static_cast<std::size_t>(cut) * row,
                          second.outputs.o.data(), second.outputs.o.size()),
              0);
  }
}

TEST_F(Staged, RowsOnBothSidesOfTheAnchorsRange) {
  for (const int64_t K : {128, 64})
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
      expect_within(test::paced(K, 64, dtype), on_staged(dtype), "K " + std::to_string(K));
}

TEST_F(Staged, RunsThatLeaveTheAnchorsRangeAndComeBack) {
  for (const float down : {-52.0f, -62.0f, -66.0f})
    expect_within(test::falls_and_grows(128, 64, down), on_staged(DType::kBFloat16),
                  "down " + std::to_string(down));
}

/// What follows a token may put its run out of the anchored form's range, or not.
TEST_F(Staged, CausalToTheBitWhereRowsLeaveTheAnchorsRange) {
  for (const int64_t K : {128, 64}) {
    const Inputs inputs = test::paced(K, 64, DType::kBFloat16);
    const test::RunOptions run = on_staged(DType::kBFloat16);
    const test::Result before = test::run_inputs(inputs, run);
    for (int64_t cut = 0; cut <= 140; cut += test::emulated() ? 5 : 1) {
      for (const float gate : {-0.01f, -30.0f}) {
        Inputs changed = inputs;
        for (int64_t i = cut * K; i < 140 * K; ++i)
          store_element(changed.g.data(), DType::kBFloat16, i, gate);
        const test::Result after = test::run_inputs(changed, run);
        ASSERT_EQ(std::memcmp(before.outputs.o.data(), after.outputs.o.data(),
                              static_cast<std::size_t>(cut) * 64 * 2),
                  0)
            << "K " << K << " cut " << cut << " gate " << gate;
      }
    }
  }
}

TEST_F(Staged, CausalToTheBitAtEveryToken) {
  for (const auto& [K, dtype, form] : {std::tuple{128, DType::kBFloat16, IntraForm::kTensor},
                                       std::tuple{64, DType::kFloat16, IntraForm::kTensor},
                                       std::tuple{128, DType::kBFloat16, IntraForm::kToken},
                                       std::tuple{64, DType::kFloat16, IntraForm::kToken}}) {
    check::GenerateOptions options = shape16(140, 1, K, 64, dtype);
    options.regime = Regime::kTrained;
    const Inputs inputs = check::generate(options);
    test::RunOptions run = on_staged(dtype);
    run.plan.intra_form = form;
    const test::Result before = test::run_inputs(inputs, run);
    for (int64_t cut = 0; cut <= 140; cut += test::emulated() ? 7 : 1) {
      Inputs changed = inputs;
      test::scramble_from(&changed, cut, static_cast<uint64_t>(cut));
      const test::Result after = test::run_inputs(changed, run);
      ASSERT_EQ(std::memcmp(before.outputs.o.data(), after.outputs.o.data(),
                            static_cast<std::size_t>(cut) * 64 * 2),
                0)
          << "K " << K << " cut " << cut;
    }
  }
}

TEST_F(Staged, PoisonInOneSequenceReachesNoOther) {
  check::GenerateOptions options = shape16(0, 2, 128, 128);
  options.num_value_heads = 4;
  options.seq_lens = {70, 90, 50};
  const Inputs inputs = check::generate(options);
  for (const int64_t segments : {1, 2}) {
    test::RunOptions run = on_staged(DType::kBFloat16);
    if (segments > 1) run.plan = test::fixed_segments(segments);
    const test::Result clean = test::run_inputs(inputs, run);
    Inputs poisoned = inputs;
    test::poison_rows(&poisoned, 70, 160);
    const test::Result after = test::run_inputs(poisoned, run);
    const std::size_t row = 4 * 128 * 2, state = 4 * 128 * 128 * 4;
    EXPECT_EQ(std::memcmp(clean.outputs.o.data(), after.outputs.o.data(), 70 * row), 0);
    EXPECT_EQ(std::memcmp(clean.outputs.o.data() + 160 * row, after.outputs.o.data() + 160 * row,
                          50 * row),
              0);
    for (const std::size_t n : {std::size_t{0}, std::size_t{2}})
      EXPECT_EQ(std::memcmp(clean.outputs.final_state.data() + n * state,
                            after.outputs.final_state.data() + n * state, state),
                0);
  }
}

TEST_F(Staged, BatchInvariantAloneEqualsAnyBatchAndOrder) {
  check::GenerateOptions options = shape16(0, 2, 128, 128);
  options.seq_lens = {1300, 65, 700};
  Inputs inputs = check::generate(options);
  inputs.problem.batch_invariant = true;
  EXPECT_TRUE(test::same_bits_alone(
      inputs, {.plan = test::fixed_segments(4), .out_dtype = DType::kBFloat16}));
}

}  // namespace
}  // namespace kda
