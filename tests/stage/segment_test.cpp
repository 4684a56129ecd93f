// SPDX-License-Identifier: Apache-2.0
// Context parallelism: both forms are as exact as the serial run, for every gate regime.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "check/tolerances.hpp"
#include "stage/segment_scan.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

using check::Inputs;
using check::Regime;

constexpr SegmentMethod kMethods[] = {SegmentMethod::kScanMergeForward, SegmentMethod::kOnePass};

class Segments : public testing::TestWithParam<int> {
 protected:
  Regime regime() const { return static_cast<Regime>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Regimes, Segments, testing::Range(0, check::kNumRegimes),
                         [](const auto& entry) {
                           std::string name = check::regime_name(static_cast<Regime>(entry.param));
                           std::erase(name, '-');
                           return name;
                         });

/// Errors of fp32 runs may be tiny: a floor keeps the ratio from judging noise.
constexpr double kNoise = 1.5e-7;

TEST_P(Segments, Fp32StaysWithinTwiceTheSerialError) {
  check::GenerateOptions options = test::shape(2048 + 37, 2, 64, 64);
  options.regime = regime();
  options.initial_state = true;
  const Inputs inputs = check::generate(options);
  std::vector<cpu::oracle::HeadResult> truths;
  const test::WorstErrors serial = test::worst_errors(inputs, test::run_inputs(inputs), &truths);
  for (const SegmentMethod method : kMethods)
    for (const int64_t count : {2, 5, 32}) {
      const test::Result result =
          test::run_inputs(inputs, {.plan = test::fixed_segments(count, method)});
      ASSERT_TRUE(result.plan.segmented);
      const test::WorstErrors errors = test::worst_errors(inputs, result, &truths);
      EXPECT_LE(errors.o, check::kSegmentedFp32Ratio * std::max(serial.o, kNoise)) << count;
      EXPECT_LE(errors.final_state,
                check::kSegmentedFp32Ratio * std::max(serial.final_state, kNoise))
          << count;
      const bool marginal = regime() == Regime::kEqualKeys;
      EXPECT_LE(errors.o, check::forward_tolerance(0, 1 << 20, 2085, marginal));
    }
}

TEST_P(Segments, Bf16StaysWithinATenthMore) {
  check::GenerateOptions options = test::shape(1000, 2, 64, 64);
  options.regime = regime();
  options.dtype = DType::kBFloat16;
  const Inputs inputs = check::generate(options);
  // On a GPU one backend for both; cuda.sm90.fused is in tests/cuda/fused/fused_test.cpp.
  const std::string backend = test::on_cuda() ? "staged" : "";
  const test::RunOptions run{.plan = test::with_backend(backend), .out_dtype = DType::kBFloat16};
  std::vector<cpu::oracle::HeadResult> truths;
  const double serial = test::worst_errors(inputs, test::run_inputs(inputs, run), &truths).o;
  for (const SegmentMethod method : kMethods) {
    test::RunOptions segmented = run;
    segmented.plan = test::fixed_segments(8, method);
    segmented.plan.backend = backend;
    EXPECT_LE(test::worst_errors(inputs, test::run_inputs(inputs, segmented), &truths).o,
              check::kSegmented16BitRatio * serial);
  }
}

TEST(SegmentForms, BitEqualToSerialOnceTheStateIsForgotten) {
  // The published claim of the two-pass scheme: strong gates forget within a segment.
  check::GenerateOptions options = test::shape(1024, 2, 64, 64);
  options.regime = Regime::kStrong;
  const Inputs inputs = check::generate(options);
  const test::Result serial = test::run_inputs(inputs);
  const test::Result segmented = test::run_inputs(inputs, {.plan = test::fixed_segments(4)});
  EXPECT_TRUE(test::same_bits(serial.outputs.o, segmented.outputs.o));
  EXPECT_TRUE(test::same_bits(serial.outputs.final_state, segmented.outputs.final_state));
}

TEST(SegmentForms, MixedBatchWithStatesAndLayouts) {
  check::GenerateOptions options = test::shape(0, 2, 32, 40);
  options.num_value_heads = 4;
  options.seq_lens = {300, 0, 1, 64, 129, 700};
  options.initial_state = true;
  Inputs inputs = check::generate(options);
  for (const SegmentMethod method : kMethods) {
    const test::Result result = test::run_inputs(inputs, {.plan = test::fixed_segments(5, method)});
    const test::WorstErrors errors = test::worst_errors(inputs, result);
    EXPECT_LT(errors.o, check::kFp32Worst);
    EXPECT_LT(errors.final_state, check::kFp32Worst);
  }
}

TEST(SegmentForms, ThreadCountsGiveEqualBits) {
  const Inputs inputs = check::generate(test::shape(500, 1, 32, 64));
  for (const SegmentMethod method : kMethods) {
    PlanOptions one = test::fixed_segments(7, method), many = one;
    one.num_threads = 1;
    many.num_threads = 5;
    const test::Result a = test::run_inputs(inputs, {.plan = one});
    const test::Result b = test::run_inputs(inputs, {.plan = many});
    EXPECT_TRUE(test::same_bits(a.outputs.o, b.outputs.o));
    EXPECT_TRUE(test::same_bits(a.outputs.final_state, b.outputs.final_state));
  }
}

TEST(SegmentForms, CheckpointsComeFromTheTwoPassForm) {
  Inputs inputs = check::generate(test::shape(256, 1, 16, 16));
  StateDesc desc;
  desc.num_slots = 8;
  desc.tensor = contiguous(DType::kFloat32, {8, 1, 16, 16});
  inputs.problem.checkpoints = desc;
  inputs.problem.checkpoint_every = 32;
  const test::Result serial = test::run_inputs(inputs);
  const test::Result segmented =
      test::run_inputs(inputs, {.plan = test::fixed_segments(3, SegmentMethod::kOnePass)});
  EXPECT_EQ(segmented.plan.resolved.segment_method, SegmentMethod::kScanMergeForward);
  for (int i = 0; i < 8 * 256; ++i)
    ASSERT_NEAR(serial.outputs.checkpoints.as<float>()[i],
                segmented.outputs.checkpoints.as<float>()[i], 1e-5);
}

/// The three stage calls by hand, and what M and B mean.
TEST(SegmentStages, CallsMatchRun) {
  check::GenerateOptions options = test::shape(400, 2, 32, 48);
  options.initial_state = true;
  options.regime = Regime::kSlow;
  const Inputs inputs = check::generate(options);
  const PlanOptions fixed = test::fixed_segments(4);
  const test::Result whole = test::run_inputs(inputs, {.plan = fixed});
  Plan plan = whole.plan;
  Problem p = whole.problem;
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  io::Buffer workspace(plan.workspace_bytes);
  const std::size_t segments = plan.segments.size();
  ASSERT_EQ(segments, 4u);
  std::vector<float> M(segments * 2 * 32 * 32), B(segments * 2 * 32 * 48), states(B.size());
  const SegmentTensors stage{M.data(), B.data(), states.data()};
  ASSERT_TRUE(check::run_stage_and_wait(segment_scan, plan, tensors, stage, workspace.data(),
                                        workspace.size())
                  .ok());
  ASSERT_TRUE(check::run_stage_and_wait(segment_merge, plan, tensors, stage, workspace.data(),
                                        workspace.size())
                  .ok());
  ASSERT_TRUE(check::run_stage_and_wait(segment_forward, plan, tensors, stage, workspace.data(),
                                        workspace.size())
                  .ok());
  EXPECT_TRUE(test::same_bits(whole.outputs.o, outputs.o));
  EXPECT_TRUE(test::same_bits(whole.outputs.final_state, outputs.final_state));
  // M S_in + B of the last segment is the final state.
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t d = 0; d < 32; ++d)
      for (int64_t c = 0; c < 48; ++c) {
        const std::size_t s = 3 * 2 + static_cast<std::size_t>(h);
        double sum = B[(s * 32 + static_cast<std::size_t>(d)) * 48 + static_cast<std::size_t>(c)];
        for (int64_t j = 0; j < 32; ++j)
          sum += static_cast<double>(
                     M[(s * 32 + static_cast<std::size_t>(d)) * 32 + static_cast<std::size_t>(j)]) *
                 states[(s * 32 + static_cast<std::size_t>(j)) * 48 + static_cast<std::size_t>(c)];
        ASSERT_NEAR(sum, outputs.final_state.as<float>()[(h * 32 + d) * 48 + c], 1e-5);
      }
}

TEST(SegmentStages, RowsWithoutASlotAreZeroWhereAsked) {
  if (test::on_cuda()) GTEST_SKIP() << "host pointers";
  check::GenerateOptions options = test::shape(0, 1, 16, 16);
  options.seq_lens = {200, 70};
  const Inputs inputs = check::generate(options);
  Problem p = inputs.problem;
  p.initial_state = states(p, DType::kFloat32, 2, true);
  p.zero_skipped = true;
  p.o = contiguous(DType::kFloat32, {1, 270, 1, 16});
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, cpu_facts(), test::fixed_segments(2), &plan));
  const std::vector<float> pool(2 * 256, 0.5f);
  std::vector<float> whole(270 * 16, NAN), by_stages(270 * 16, NAN);
  const int32_t slots[] = {1, -1};
  Tensors tensors = inputs.tensors();
  tensors.initial_state = const_cast<float*>(pool.data());
  tensors.initial_state_indices = slots;
  io::Buffer workspace(plan.workspace_bytes);
  tensors.o = whole.data();
  throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
  tensors.o = by_stages.data();
  std::vector<float> M(plan.segments.size() * 256), B(M.size()), starts(M.size());
  const SegmentTensors all{M.data(), B.data(), starts.data()};
  for (const auto stage : {segment_scan, segment_merge, segment_forward})
    throw_if_error(stage(plan, tensors, all, workspace.data(), workspace.size(), nullptr));
  EXPECT_EQ(by_stages, whole);
  EXPECT_NE(by_stages[199 * 16], 0);
  for (std::size_t i = 200 * 16; i < by_stages.size(); ++i) ASSERT_EQ(by_stages[i], 0);
}

TEST(SegmentStages, NeedASegmentedPlanAndPointers) {
  if (test::on_cuda()) GTEST_SKIP() << "host pointers; on a GPU: tests/cuda/calls_test.cpp";
  const Inputs inputs = check::generate(test::shape(200, 1, 16, 16));
  const test::Result serial = test::run_inputs(inputs);
  const test::Result cut = test::run_inputs(inputs, {.plan = test::fixed_segments(2)});
  Tensors tensors = inputs.tensors();
  Problem p = serial.problem;
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  outputs.attach(&tensors);
  io::Buffer workspace(cut.plan.workspace_bytes);
  float value = 0;
  const SegmentTensors all{&value, &value, &value};
  for (const auto stage : {segment_scan, segment_merge, segment_forward}) {
    const Status not_segmented =
        stage(serial.plan, tensors, all, workspace.data(), workspace.size(), nullptr);
    EXPECT_EQ(not_segmented.message(), "plan: is not segmented");
    const Status no_pointers =
        stage(cut.plan, tensors, {}, workspace.data(), workspace.size(), nullptr);
    EXPECT_EQ(no_pointers.code(), StatusCode::kInvalidArgument);
  }
}

TEST(SegmentStages, TransitionMayOnlyBeDroppedWhereItsNormShrinks) {
  Problem p;
  p.qk_l2norm = true;
  p.gate_mode = GateMode::kBounded;
  p.beta_mode = BetaMode::kSigmoid2;
  EXPECT_TRUE(stage::transition_norm_never_grows(p));
  Problem changed = p;
  changed.qk_l2norm = false;
  EXPECT_FALSE(stage::transition_norm_never_grows(changed));
  changed = p;
  changed.gate_mode = GateMode::kLog;
  EXPECT_FALSE(stage::transition_norm_never_grows(changed));
  changed = p;
  changed.beta_mode = BetaMode::kPlain;
  EXPECT_FALSE(stage::transition_norm_never_grows(changed));
}

}  // namespace
}  // namespace kda
