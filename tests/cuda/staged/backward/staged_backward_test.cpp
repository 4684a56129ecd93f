// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm80.staged on a GPU: regimes, sizes, options and states within the bounds
// of its bf16 operands, against the oracle; groups of heads; what it declines. (What holds for both
// backwards: tests/stage/backward_test.cpp, tests/cuda/recurrent/backward/backward_cuda_test.cpp.)
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "check/tolerances.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/rows.hpp"
#include "cuda/staged/backward/backend.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;
using check::Regime;
using test::shape16;

constexpr const char* kName = "cuda.sm80.staged";
constexpr const char* kFp16Name = "cuda.sm90.staged";

class StagedBackward : public test::GpuTest {};

bool has_half_chains(const Inputs& inputs) {
  const Problem& p = inputs.problem;
  return test::device().compute_capability == 90 && p.key_dim == 128 && p.value_dim == 128;
}

/// As test::expect_gradients_within(), by the staged backward. `buffers` have d_o.
void expect_buffers_within(const Inputs& inputs, GradientBuffers buffers, bool many,
                           const std::string& what, test::BackwardRun run = {}) {
  if (run.backend.empty()) run.backend = kName;
  test::BackwardCall call(inputs, buffers.gradients, run);
  ASSERT_EQ(call.plan.plan.implementation, kName) << what;
  test::expect_gradients_within(inputs, std::move(buffers), &call, many, has_half_chains(inputs),
                                what);
}

void expect_within(const Inputs& inputs, const check::GradientOptions& options, bool many,
                   const std::string& what, const test::BackwardRun& run = {}) {
  expect_buffers_within(inputs, check::make_gradients(inputs, options), many, what, run);
}

constexpr check::GradientOptions kBf16{.d_o_dtype = DType::kBFloat16};

TEST_F(StagedBackward, EveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    for (const int64_t K : {128, 64}) {
      if (K == 64 && test::emulated() && regime % 3 > 0) continue;
      // Roundings average over heads: there are many where that takes no minutes.
      check::GenerateOptions options =
          shape16(test::long_case(800), test::emulated() ? 2 : 12, K, K);
      options.regime = static_cast<Regime>(regime);
      options.seed = static_cast<uint64_t>(regime);
      const Inputs inputs = check::generate(options);
      expect_within(inputs, kBf16, K == 128 && options.regime != Regime::kEqualKeys,
                    std::string(check::regime_name(options.regime)) + " K " + std::to_string(K));
    }
}

TEST_F(StagedBackward, LengthsAroundChunks) {
  for (const int64_t T : {1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 129, 191})
    expect_within(check::generate(shape16(T, 1, 64, 64)), kBf16, false, "T " + std::to_string(T));
}

TEST_F(StagedBackward, GradientThatDecayedOnItsWay) {
  // What is left of d_final_state at the start went through scores alone, which are rounded.
  check::GenerateOptions options = shape16(32, 32, 32, 40);
  options.regime = Regime::kStrong;
  expect_within(check::generate(options), {.d_o = false}, false, "decayed");
}

// ---- fp16 operands of the chains on Hopper

void scale_by(io::Buffer* tensor, DType type, const std::function<double(int64_t)>& factor) {
  const auto count =
      static_cast<int64_t>(tensor->size() / static_cast<std::size_t>(dtype_size(type)));
  for (int64_t i = 0; i < count; ++i)
    store_element(tensor->data(), type, i,
                  static_cast<float>(factor(i) * load_double(tensor->data(), type, i)));
}

TEST_F(StagedBackward, ValuesAndGradientsOfAnySize) {
  check::GenerateOptions options = shape16(150, 1, 128, 128);
  options.regime = Regime::kSlow;
  const Inputs inputs = check::generate(options);
  const GradientBuffers buffers = check::make_gradients(inputs, kBf16);
  const auto everywhere = [](double x) { return [x](int64_t) { return x; }; };
  const auto spread = [](int64_t i) {
    return 1e-9 * std::ldexp(1.0, -static_cast<int>(i / 128 % 25));
  };
  for (const auto& [of_d_o, of_v, of_states] :
       {std::tuple{0x1p30, 0x1p-40, 0x1p-60}, std::tuple{0x1p-90, 0x1p60, 0x1p50},
        std::tuple{0.0, 1.0, 0x1p100}}) {
    Inputs x = inputs;
    GradientBuffers y = buffers;
    scale_by(&x.v, DType::kBFloat16, everywhere(of_v));
    scale_by(&x.initial_state, DType::kFloat32, everywhere(of_states));
    scale_by(&y.d_o, DType::kBFloat16,
             of_d_o == 0 ? std::function<double(int64_t)>(spread) : everywhere(of_d_o));
    scale_by(&y.d_final_state, DType::kFloat32, everywhere(of_d_o));
    expect_buffers_within(x, y, false, "d_o times " + std::to_string(of_d_o));
  }
}

TEST_F(StagedBackward, StatesSmallerThanTheirChunkKeepTheirBits) {
  // d_o of the first token is 2^20 of dS behind its chunk, and without a value it changes dv alone.
  check::GenerateOptions options = shape16(65, 1, 128, 128);
  options.regime = Regime::kLog;
  Inputs inputs = check::generate(options);
  for (int64_t i = 0; i < 65 * 128; ++i)
    store_element(inputs.g.data(), DType::kBFloat16, i, i < 128 ? 0.0f : -5.0f);
  scale_by(&inputs.v, DType::kBFloat16, [](int64_t i) { return i / 128 % 64 == 0 ? 0 : 1; });
  scale_by(&inputs.initial_state, DType::kFloat32, [](int64_t) { return 0; });
  GradientBuffers buffers = check::make_gradients(inputs, kBf16);
  scale_by(&buffers.d_o, DType::kBFloat16, [](int64_t i) {
    return i < 128 ? 0x1p6 : i < 64 * 128 ? 0 : 1;
  });
  scale_by(&buffers.d_final_state, DType::kFloat32, [](int64_t) { return 0; });
  expect_buffers_within(inputs, buffers, false, "dS smaller than d_o");
}

TEST_F(StagedBackward, WhatFp16DoesNotHoldIsMadeAgain) {
  // Next to nothing of d_final_state reaches the start.
  check::GenerateOptions strong = shape16(24, 2, 128, 128);
  strong.regime = Regime::kStrong;
  expect_within(check::generate(strong), {.d_o = false}, false, "decayed");
  // States that grow by exp(36) in the second of three sequences.
  check::GenerateOptions options = shape16(0, 1, 128, 128);
  options.seq_lens = {70, 90, 33};
  options.regime = Regime::kLog;
  const Inputs falling = check::generate(options);
  Inputs growing = falling;
  for (int64_t i = 80 * 128; i < 98 * 128; ++i)
    store_element(growing.g.data(), DType::kBFloat16, i, 2.0f);
  expect_within(growing, kBf16, false, "growing");
  GradientBuffers a = check::make_gradients(falling, kBf16), b = a;
  test::run_backward(falling, &a);
  test::run_backward(growing, &b);
  const auto same = [&](int64_t token, int64_t count) {
    const auto at = static_cast<std::size_t>(token * 128 * 2);
    return std::memcmp(a.dk.data() + at, b.dk.data() + at, static_cast<std::size_t>(count * 256)) ==
           0;
  };
  EXPECT_TRUE(same(0, 70) && same(160, 33));
  EXPECT_FALSE(same(70, 90));
}

// ---- rows in fp16 on Hopper

class Fp16Rows : public test::GpuTest {
 protected:
  void SetUp() override {
    test::GpuTest::SetUp();
    if (test::device().compute_capability != 90) GTEST_SKIP() << "needs Hopper";
  }
};

/// d_o and gradients in fp16 too, but no d_initial_state.
GradientBuffers fp16_gradients(const Inputs& inputs, bool d_o = true) {
  GradientBuffers buffers =
      check::make_gradients(inputs, {.d_o = d_o, .d_o_dtype = DType::kFloat16});
  buffers.gradients.d_initial_state.reset();
  return buffers;
}

check::GenerateOptions fp16_shape(int64_t tokens, int64_t heads, Regime regime) {
  check::GenerateOptions options = shape16(tokens, heads, 128, 128, DType::kFloat16);
  options.regime = regime;
  return options;
}

constexpr Regime kFp16Regimes[] = {Regime::kStrong, Regime::kSlow, Regime::kTrained,
                                   Regime::kTrainedSoftplus, Regime::kSoftplus};

void expect_fp16_within(const Inputs& inputs, GradientBuffers buffers, bool many,
                        const std::string& what) {
  test::BackwardCall call(inputs, buffers.gradients);
  ASSERT_EQ(call.plan.plan.implementation, kFp16Name) << what;
  test::expect_gradients_within(inputs, std::move(buffers), &call, many, false, what);
}

TEST_F(Fp16Rows, Regimes) {
  for (const Regime regime : kFp16Regimes) {
    const Inputs inputs =
        check::generate(fp16_shape(test::long_case(800), test::emulated() ? 2 : 12, regime));
    expect_fp16_within(inputs, fp16_gradients(inputs), true, check::regime_name(regime));
  }
}

TEST_F(Fp16Rows, LengthsAndGroups) {
  for (const auto& [lengths, group] :
       {std::pair{std::vector<int64_t>{1, 0, 15, 17}, 1}, {{63, 64, 65}, 2}, {{33}, 9}}) {
    check::GenerateOptions options = fp16_shape(0, 1, Regime::kTrainedSoftplus);
    options.seq_lens = lengths;
    options.num_value_heads = group;
    const Inputs inputs = check::generate(options);
    expect_fp16_within(inputs, fp16_gradients(inputs), false, "groups of " + std::to_string(group));
  }
}

TEST_F(Fp16Rows, ValuesAndGradientsOfAnySize) {
  using Factor = std::function<double(int64_t)>;
  const Inputs inputs = check::generate(fp16_shape(150, 2, Regime::kSlow));
  GradientBuffers buffers =
      check::make_gradients(inputs, {.d_o_dtype = DType::kFloat16, .out_dtype = DType::kFloat32});
  const GradientBuffers half = fp16_gradients(inputs);
  buffers.gradients.dq = half.gradients.dq, buffers.gradients.dk = half.gradients.dk;
  buffers.gradients.d_initial_state.reset();
  const auto all = [](double x) { return Factor([x](int64_t) { return x; }); };
  const Factor spread = [](int64_t i) {
    return std::ldexp(1.0, 8 - static_cast<int>(i / 256 % 25));
  };
  // Zeros, and columns of V far below the others.
  const Factor columns = [](int64_t i) { return std::array{1.0, 0x1p-9, 0.0, 1.0}[i / 16 % 4]; };
  for (const auto& [of_d_o, of_v, of_states, of_d_states] :
       {std::tuple{all(0x1p12), all(0x1p-12), 0x1p-14, 0x1p24},
        {all(0x1p-12), all(0x1p12), 0x1p12, 0x1p-24},
        {spread, all(1), 1.0, 0x1p-20},
        {columns, columns, 0.0, 0.0}}) {
    Inputs x = inputs;
    GradientBuffers y = buffers;
    scale_by(&x.v, DType::kFloat16, of_v);
    scale_by(&y.d_o, DType::kFloat16, of_d_o);
    scale_by(&x.initial_state, DType::kFloat32, all(of_states));
    scale_by(&y.d_final_state, DType::kFloat32, all(of_d_states));
    expect_fp16_within(x, y, true, "d_final_state times " + std::to_string(of_d_states));
  }
}

/// Decays that nearly vanish within a sub-chunk, beside errors and gradients whose product is
/// large.
TEST_F(Fp16Rows, LargeGradientsBehindStrongGates) {
  Inputs inputs = check::generate(fp16_shape(130, 1, Regime::kTrained));
  const auto set = [](io::Buffer* tensor, DType type, float value) {
    const auto count =
        static_cast<int64_t>(tensor->size() / static_cast<std::size_t>(dtype_size(type)));
    for (int64_t i = 0; i < count; ++i) store_element(tensor->data(), type, i, value);
  };
  set(&inputs.g, inputs.problem.g.dtype, 60);  // each decay is e^-5
  set(&inputs.v, DType::kFloat16, 512);
  GradientBuffers buffers =
      check::make_gradients(inputs, {.d_o_dtype = DType::kFloat16, .out_dtype = DType::kFloat32});
  set(&buffers.d_o, DType::kFloat16, 32768);
  Gradients& g = buffers.gradients;  // dq and dk would leave fp16
  g.dq.reset(), g.dk.reset(), g.d_initial_state.reset();
  test::BackwardCall call(inputs, buffers.gradients);
  ASSERT_EQ(call.plan.plan.implementation, kFp16Name) << call.plan.plan.to_text(true);
  test::run_backward(inputs, &buffers);
  for (int64_t i = 0; i < 130 * 128; ++i)
    ASSERT_TRUE(std::isfinite(load_double(buffers.dg.data(), DType::kFloat32, i))) << i;
}

/// A column of dv is linear in its column of d_o, and nothing else of d_o is in it.
TEST_F(Fp16Rows, SmallColumnsOfDvKeepTheirDigits) {
  const Inputs inputs = check::generate(fp16_shape(100, 1, Regime::kTrained));
  GradientBuffers large = fp16_gradients(inputs);
  scale_by(&large.d_final_state, DType::kFloat32, [](int64_t) { return 0; });
  GradientBuffers small = large;
  constexpr double kSmall = 0x1p-8;
  const auto is_small = [](int64_t i) { return i / 16 % 2 == 1; };
  scale_by(&small.d_o, DType::kFloat16, [&](int64_t i) { return is_small(i) ? kSmall : 1; });
  test::run_backward(inputs, &large);
  test::run_backward(inputs, &small);
  double off = 0, size = 0;
  for (int64_t i = 0; i < 100 * 128; ++i) {
    if (!is_small(i)) continue;
    const double expected = load_double(large.dv.data(), DType::kFloat16, i) * kSmall;
    off += std::pow(load_double(small.dv.data(), DType::kFloat16, i) - expected, 2);
    size += expected * expected;
  }
  EXPECT_GT(size, 0);
  EXPECT_LT(std::sqrt(off / size), 1.5e-3);
}

TEST_F(Fp16Rows, ZerosBehindALoss) {
  const Inputs inputs = check::generate(fp16_shape(150, 1, Regime::kTrained));
  GradientBuffers buffers = fp16_gradients(inputs);
  constexpr int64_t kLast = 75;  // in the middle of a sub-chunk
  scale_by(&buffers.d_o, DType::kFloat16, [](int64_t i) { return i / 128 <= kLast ? 1 : 0; });
  scale_by(&buffers.d_final_state, DType::kFloat32, [](int64_t) { return 0; });
  test::run_backward(inputs, &buffers);
  for (const io::Buffer* rows : {&buffers.dq, &buffers.dk, &buffers.dv, &buffers.dg})
    for (int64_t i = (kLast + 1) * 128; i < 150 * 128; ++i)
      ASSERT_EQ(load_double(rows->data(), DType::kFloat16, i), 0) << i;
}

TEST_F(Fp16Rows, BitsAreTheSameAgain) {
  const Inputs inputs = check::generate(fp16_shape(200, 2, Regime::kSoftplus));
  GradientBuffers a = fp16_gradients(inputs), b = a;
  test::run_backward(inputs, &a);
  test::run_backward(inputs, &b);
  EXPECT_TRUE(test::same_gradients(a, b));
}

TEST_F(StagedBackward, HeadSizes) {
  std::size_t turn = 0;
  for (const int64_t K : {8, 40, 64, 72, 120, 128})
    for (const int64_t V : test::in_turn<int64_t>(turn++, {8, 64, 72, 128, 200, 256}))
      expect_within(check::generate(shape16(70, 1, K, V)), kBf16, false,
                    std::to_string(K) + " " + std::to_string(V));
}

TEST_F(StagedBackward, GroupedHeadsAndTypes) {
  // Packed sequences, states in the other layout, types of their own for gates and results.
  for (const int64_t group : {1, 2, 3}) {
    check::GenerateOptions options = shape16(0, 2, 64, 64);
    options.num_value_heads = 2 * group;
    options.seq_lens = {70, 0, 1, 100};
    Inputs inputs = check::generate(options);
    inputs.problem.state_layout = StateLayout::kVK;
    for (const DType out : test::in_turn<DType>(
             static_cast<std::size_t>(group), {DType::kFloat32, DType::kBFloat16, DType::kFloat16}))
      expect_within(inputs, {.d_o_dtype = DType::kBFloat16, .out_dtype = out}, false,
                    std::to_string(group) + " " + dtype_name(out));
  }
}

TEST_F(StagedBackward, GatesAndSteps) {
  for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kSlow})
    for (const BetaMode beta : {BetaMode::kPlain, BetaMode::kSigmoid, BetaMode::kSigmoid2}) {
      check::GenerateOptions options = shape16(100, 1, 64, 64);
      options.regime = regime;
      Inputs inputs = check::generate(options);
      inputs.problem.beta_mode = beta;
      if (beta ==
          BetaMode::kPlain)  // 0, 1/2 and 1: what is divided by beta has another form near 0
        for (int64_t t = 0; t < 100; ++t)
          store_element(inputs.beta.data(), DType::kBFloat16, t, static_cast<float>(t % 3) * 0.5f);
      expect_within(
          inputs, kBf16, false,
          std::string(gate_mode_name(inputs.problem.gate_mode)) + " " + beta_mode_name(beta));
    }
}

TEST_F(StagedBackward, WithoutTheNorm) {
  check::GenerateOptions options = shape16(100, 1, 64, 64);
  options.regime = Regime::kLog;
  Inputs inputs = check::generate(options);
  inputs.problem.qk_l2norm = false;
  for (int64_t i = 0; i < 100 * 64; ++i)
    store_element(inputs.k.data(), DType::kBFloat16, i,
                  0.1f * static_cast<float>(load_double(inputs.k.data(), DType::kBFloat16, i)));
  for (const double scale : {0.0, -0.5}) {
    inputs.problem.scale = scale;
    expect_within(inputs, kBf16, false, "scale " + std::to_string(scale));
  }
}

TEST_F(StagedBackward, StatesInBf16) {
  Inputs inputs = check::generate(shape16(100, 2, 64, 64));
  TensorDesc& desc = inputs.problem.initial_state->tensor;
  const auto count = static_cast<int64_t>(inputs.initial_state.size() / sizeof(float));
  io::Buffer rounded(inputs.initial_state.size() / 2);
  for (int64_t i = 0; i < count; ++i)
    store_element(rounded.data(), DType::kBFloat16, i, inputs.initial_state.as<float>()[i]);
  inputs.initial_state = rounded;
  desc = contiguous(DType::kBFloat16, {1, 2, 64, 64});
  expect_within(inputs, kBf16, false, "bf16 states");
}

// ---- segments

Inputs packed16(std::vector<int64_t> lengths, int64_t K, int64_t V, Regime regime = Regime::kSlow) {
  check::GenerateOptions options = shape16(0, 1, K, V);
  options.num_value_heads = 2;
  options.seq_lens = std::move(lengths);
  options.regime = regime;
  return check::generate(options);
}

TEST_F(StagedBackward, Segments) {
  // Slow gates: what passes from segment to segment does not fade.
  std::size_t turn = 0;
  for (const auto& [K, V] : {std::pair{64, 72}, std::pair{128, 64}, std::pair{40, 8}})
    for (const int64_t segments : test::in_turn<int64_t>(turn++, {2, 3, 100})) {
      const std::string what = std::to_string(segments) + " segments, K " + std::to_string(K);
      expect_within(packed16({0, 200, 64, 1, 333, 0}, K, V), kBf16, false, what,
                    {.segments = segments});
    }
  for (const Regime regime : {Regime::kTrained, Regime::kStrong, Regime::kNeedle})
    expect_within(packed16({300}, 64, 64, regime), kBf16, false, check::regime_name(regime),
                  {.segments = 4});
  check::GenerateOptions rows = shape16(200, 2, 64, 64);
  rows.batch = 3;
  expect_within(check::generate(rows), kBf16, false, "rows", {.segments = 3});
}

TEST_F(StagedBackward, SegmentsOfStatesOfAnyKind) {
  const std::vector<int64_t> lengths = {130, 0, 250, 70};
  for (const bool vk : {false, true}) {
    Inputs inputs = packed16(lengths, 64, 40);
    if (vk) inputs.problem.state_layout = StateLayout::kVK;
    const uint8_t mask[] = {1, 1, 0, 1};
    inputs.problem.initial_state_mask = true;
    const test::BackwardRun whole{.state_mask = mask}, cut{.segments = 3, .state_mask = mask};
    GradientBuffers expected = test::gradients_in_fp32(inputs), got = expected;
    test::run_backward(inputs, &expected, whole);
    test::run_backward(inputs, &got, cut);
    const auto* a = got.d_initial_state.as<float>();
    const auto* b = expected.d_initial_state.as<float>();
    const int64_t of_one = 2 * 64 * 40;
    for (int64_t i = 0; i < 4 * of_one; ++i) {
      if (i / of_one == 2) {
        EXPECT_EQ(a[i], 0) << i;
      } else {
        EXPECT_NEAR(a[i], b[i], 0.05 + 0.02 * std::fabs(b[i])) << i;
      }
    }
  }
  Inputs none = packed16(lengths, 64, 40);
  none.problem.initial_state.reset();
  expect_within(none, kBf16, false, "no states", {.segments = 3});
  expect_within(packed16(lengths, 64, 40), {.d_o = false}, false, "no d_o", {.segments = 2});
  expect_within(packed16(lengths, 64, 40), {.d_final_state = false, .d_o_dtype = DType::kBFloat16},
                false, "no d_final_state", {.segments = 2});
}

/// On a plan by `plan_groups`, whose text is wanted.
GradientBuffers run_in_groups(const Inputs& inputs, const GradientBuffers& buffers,
                              void (*plan_groups)(plan::PlanBuilder&), std::string* text,
                              const test::BackwardRun& run = {}) {
  return test::run_planned_by(cuda::staged::kBackward.head, plan_groups, inputs, buffers, text,
                              run);
}

void one_head(plan::PlanBuilder& builder) { cuda::staged::plan_backward_within(builder, 1); }
/// Two of three q/k heads in a group, one in the last.
void two_heads(plan::PlanBuilder& builder) {
  const Problem& p = builder.plan().problem;
  const double head =
      static_cast<double>(
          cuda::staged::head_bytes(builder.plan(), cuda::bound_of_chunks(p)).all()) *
      static_cast<double>(p.num_value_heads / p.num_heads);
  cuda::staged::plan_backward_within(builder, 2.5 * head);
}

TEST_F(StagedBackward, GroupsOfHeadsChangeNoBit) {
  check::GenerateOptions options = shape16(0, 3, 64, 72);
  options.num_value_heads = 6;
  options.seq_lens = {66, 0, 5};
  Inputs inputs = check::generate(options);
  const auto expect_same = [](const Inputs& of, const GradientBuffers& buffers) {
    GradientBuffers whole = buffers;
    test::run_backward(of, &whole);
    std::string text;
    EXPECT_TRUE(test::same_gradients(run_in_groups(of, buffers, one_head, &text), whole));
    EXPECT_NE(text.find("heads: 3 groups of 1 of 3 q/k heads"), std::string::npos) << text;
    EXPECT_TRUE(test::same_gradients(run_in_groups(of, buffers, two_heads, &text), whole));
    EXPECT_NE(text.find("heads: 2 groups of 2 of 3 q/k heads"), std::string::npos) << text;
  };
  for (const bool strided : {false, true}) {
    if (strided) test::restride(&inputs, 8);
    expect_same(inputs, test::gradients_in_fp32(inputs));
    const GradientBuffers buffers = test::gradients_in_fp32(inputs);
    GradientBuffers cut = buffers;
    test::run_backward(inputs, &cut, {.segments = 2});
    std::string text;
    EXPECT_TRUE(test::same_gradients(
        run_in_groups(inputs, buffers, two_heads, &text, {.segments = 2}), cut));
    EXPECT_NE(text.find("2 segments a sequence asked for"), std::string::npos) << text;
    // The device cuts once, for all groups.
    EXPECT_TRUE(test::same_gradients(
        run_in_groups(inputs, buffers, two_heads, &text, {.from_bounds = true, .segments = 2}),
        cut));
    EXPECT_NE(text.find("backward_cut"), std::string::npos) << text;
  }
  // What Hopper has a kernel of its own for; its chunks more than pieces of 64 tokens.
  for (const int64_t value_heads : {3, 6}) {
    options = shape16(0, 3, 128, 128);
    options.num_value_heads = value_heads;
    options.seq_lens = {66, 0, 5};
    options.regime = Regime::kSoftplus;
    inputs = check::generate(options);
    expect_same(inputs, check::make_gradients(inputs, kBf16));
    if (value_heads == 3) expect_within(inputs, kBf16, false, "K = V = 128, packed");
  }
}

TEST_F(StagedBackward, ValueHeadsOfAQueryHead) {
  // Hopper's own kernel. With many of few tokens: five of six blocks would have nothing to do.
  for (const auto& [T, group] : {std::pair{33, 2}, {70, 4}, {65, 8}, {2, 40}}) {
    check::GenerateOptions options = shape16(T, 1, 128, 128);
    options.num_value_heads = group;
    expect_within(check::generate(options), kBf16, false, "groups of " + std::to_string(group));
  }
}

/// Gates that are no bf16 numbers. Hopper's own kernel, with one gate a head too.
TEST_F(StagedBackward, GatesInFp32) {
  for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kTrained})
    for (const bool a_head : {false, true}) {
      check::GenerateOptions options = shape16(0, 1, 128, 128);
      options.num_value_heads = 2;
      options.seq_lens = {70, 0, 1, 90};
      options.regime = regime;
      Inputs inputs = check::generate(options);
      Problem& p = inputs.problem;
      io::Buffer gates(2 * inputs.g.size());
      for (int64_t i = 0; i < static_cast<int64_t>(gates.size() / sizeof(float)); ++i)
        gates.as<float>()[i] =
            load_element(inputs.g.data(), p.g.dtype, i) * (1 + 0x1p-9f * static_cast<float>(i % 3));
      inputs.g = std::move(gates);
      p.g = contiguous(DType::kFloat32, {p.batch, p.num_tokens, p.num_value_heads, p.key_dim});
      if (a_head) test::keep_one_gate(&inputs);
      const std::string what = std::string(check::regime_name(regime)) + (a_head ? ", a head" : "");
      expect_within(inputs, kBf16, false, what);
      test::restride(&inputs, 8);
      expect_within(inputs, kBf16, false, what + ", strided");
    }
}

TEST_F(StagedBackward, SomeGradientsAreNotWanted) {
  const Inputs inputs = check::generate(shape16(70, 1, 128, 128));
  const GradientBuffers unwritten = check::make_gradients(inputs, kBf16);
  GradientBuffers all = unwritten;
  test::run_backward(inputs, &all);
  const std::pair<std::optional<TensorDesc> Gradients::*, io::Buffer GradientBuffers::*> each[] = {
      {&Gradients::dq, &GradientBuffers::dq},
      {&Gradients::dk, &GradientBuffers::dk},
      {&Gradients::dg, &GradientBuffers::dg},
      {&Gradients::dbeta, &GradientBuffers::dbeta},
      {&Gradients::dA_log, &GradientBuffers::dA_log}};
  for (const auto& [desc, buffer] : each) {
    GradientBuffers got = unwritten, want = all;
    (got.gradients.*desc).reset();
    want.*buffer = unwritten.*buffer;
    test::run_backward(inputs, &got);
    EXPECT_TRUE(test::same_gradients(got, want));
  }
}

}  // namespace
}  // namespace kda
