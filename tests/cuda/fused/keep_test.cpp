// SPDX-License-Identifier: Apache-2.0
// A forward on Hopper that keeps states before chunks and errors (KeepPolicy::kChunks), and its
// backward, which reads them: against the float64 adjoint, within the bounds of a backward that
// makes them itself; tails, lengths, states, heads, values of any size; bits that must not depend
// on clusters or on what the memory held.
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "check/tolerances.hpp"
#include "cuda/launch/built.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;
using check::Regime;
using test::shape16;

constexpr check::GradientOptions kBf16{.d_o_dtype = DType::kBFloat16};
constexpr test::BackwardRun kKept{.keep_chunks = true};

class Keep : public test::HopperTest {};

/// As test::expect_gradients_within(), by a fused forward that keeps and the staged backward.
void expect_buffers_within(const Inputs& inputs, GradientBuffers buffers, bool many,
                           const std::string& what, const test::BackwardRun& run = kKept) {
  test::BackwardCall call(inputs, buffers.gradients, run);
  ASSERT_EQ(call.forward.implementation, "cuda.sm90.fused") << what;
  ASSERT_EQ(call.plan.plan.implementation, "cuda.sm80.staged") << what;
  ASSERT_EQ(call.plan.plan.resolved.keep, KeepPolicy::kChunks) << what;
  test::expect_gradients_within(inputs, std::move(buffers), &call, many,
                                inputs.problem.key_dim == 128, what);
}

void expect_within(const Inputs& inputs, bool many, const std::string& what,
                   const test::BackwardRun& run = kKept) {
  expect_buffers_within(inputs, check::make_gradients(inputs, kBf16), many, what, run);
}

TEST_F(Keep, EveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    for (const int64_t K : {128, 64}) {
      if (K == 64 && test::emulated() && regime % 3 != 1) continue;
      check::GenerateOptions options =
          shape16(test::long_case(800), test::emulated() ? 2 : 12, K, K);
      options.regime = static_cast<Regime>(regime);
      options.seed = static_cast<uint64_t>(regime);
      expect_within(check::generate(options), K == 128 && options.regime != Regime::kEqualKeys,
                    std::string(check::regime_name(options.regime)) + " K " + std::to_string(K));
    }
}

TEST_F(Keep, LengthsAroundSubchunksAndChunks) {
  // What a last chunk lacks must be zeros: the memory held NaN.
  std::size_t turn = 0;
  for (const int64_t T : {1, 15, 16, 17, 33, 48, 63, 64, 65, 97, 127, 128, 129, 191})
    for (const int64_t K : test::in_turn<int64_t>(turn++, {128, 64}))
      expect_within(check::generate(shape16(T, 1, K, K)), false, "T " + std::to_string(T));
}

TEST_F(Keep, PackedSequencesRowsAndGroupedHeads) {
  for (const int64_t group : {1, 3}) {
    check::GenerateOptions options = shape16(0, 2, 128, 128);
    options.num_value_heads = 2 * group;
    options.seq_lens = {70, 0, 1, 130, 0};
    Inputs inputs = check::generate(options);
    inputs.problem.state_layout = StateLayout::kVK;
    const uint8_t mask[] = {1, 1, 0, 1, 1};
    inputs.problem.initial_state_mask = true;
    GradientBuffers made = check::make_gradients(inputs, kBf16), kept = made;
    test::run_backward(inputs, &made, {.state_mask = mask});
    test::run_backward(inputs, &kept, {.keep_chunks = true, .state_mask = mask});
    // A sequence without an initial state too; what is left are roundings of S0 and E.
    const auto count = static_cast<int64_t>(made.dk.size() / 2);
    double off = 0, all = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double a = load_double(made.dk.data(), DType::kBFloat16, i);
      const double b = load_double(kept.dk.data(), DType::kBFloat16, i);
      off += (a - b) * (a - b), all += a * a;
    }
    EXPECT_LT(off, 2e-5 * all);
    inputs.problem.initial_state_mask = false;
    expect_within(inputs, false, "packed, groups of " + std::to_string(group));
  }
  check::GenerateOptions rows = shape16(100, 2, 64, 64);
  rows.batch = 3;
  expect_within(check::generate(rows), false, "rows");
  expect_within(check::generate(shape16(0, 2, 128, 128)), false, "no tokens");
}

TEST_F(Keep, ValuesOfAnySize) {
  // fp16 states have a scale, and errors that they do not hold are mended.
  check::GenerateOptions options = shape16(150, 1, 128, 128);
  options.regime = Regime::kSlow;
  const Inputs inputs = check::generate(options);
  const auto everywhere = [](double x) { return [x](int64_t) { return x; }; };
  const auto spikes = [](int64_t i) { return i / 128 % 37 == 20 ? 0x1p18 : 1.0; };
  for (const auto& [of_v, of_states] : {std::pair{0x1p-40, 0x1p-60}, std::pair{0x1p60, 0x1p50}}) {
    Inputs x = inputs;
    test::scale_by(&x.v, DType::kBFloat16, everywhere(of_v));
    test::scale_by(&x.initial_state, DType::kFloat32, everywhere(of_states));
    expect_within(x, false, "v times " + std::to_string(of_v));
  }
  Inputs x = inputs;
  test::scale_by(&x.v, DType::kBFloat16, spikes);
  expect_within(x, false, "spikes");
}

TEST_F(Keep, GatesStepsAndNorms) {
  for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kSlow})
    for (const BetaMode beta : {BetaMode::kPlain, BetaMode::kSigmoid2}) {
      check::GenerateOptions options = shape16(100, 1, 128, 128);
      options.regime = regime;
      Inputs inputs = check::generate(options);
      inputs.problem.beta_mode = beta;
      if (beta == BetaMode::kPlain)
        test::scale_by(&inputs.beta, inputs.problem.beta.dtype, [](int64_t) { return 0.3; });
      expect_within(inputs, false, std::string(check::regime_name(regime)) + " gates");
    }
  for (const int64_t K : {64, 128}) {
    Inputs inputs = check::generate(shape16(100, 1, K, K));
    const auto count = static_cast<int64_t>(inputs.g.size() / 2);
    io::Buffer wide(inputs.g.size() * 2);
    for (int64_t i = 0; i < count; ++i)
      wide.as<float>()[i] = static_cast<float>(load_double(inputs.g.data(), DType::kBFloat16, i));
    inputs.g = wide;
    inputs.problem.g = contiguous(DType::kFloat32, {1, 100, 1, K});
    expect_within(inputs, false, "gates in fp32");
  }
}

TEST_F(Keep, TheBackwardInSegments) {
  check::GenerateOptions options = shape16(0, 1, 128, 128);
  options.num_value_heads = 2;
  options.seq_lens = {0, 200, 64, 1, 333};
  options.regime = Regime::kSlow;
  const Inputs inputs = check::generate(options);
  GradientBuffers buffers = check::make_gradients(inputs, kBf16);
  const test::BackwardCall call(inputs, buffers.gradients, {.keep_chunks = true, .segments = 3});
  EXPECT_FALSE(call.forward.segmented);
  EXPECT_TRUE(call.plan.plan.segmented);
  expect_within(inputs, false, "segments", {.keep_chunks = true, .segments = 3});
}

/// What a forward gives, and what it keeps.
struct Kept {
  check::Outputs outputs;
  io::Buffer saved;
};

Kept run_forward(const Inputs& inputs, KeepPolicy keep, int32_t num_sms, int byte = 0xff) {
  PlanOptions options;
  options.keep = keep;
  options.backend = "fused";
  options.context_parallel = SegmentPolicy::kOff;
  Problem p = inputs.problem;
  check::want_final_state(&p);
  Kept run;
  run.outputs = check::make_outputs(&p, DType::kBFloat16);
  DeviceFacts facts = test::device();
  facts.num_sms = num_sms;
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, facts, options, &plan));
  Tensors tensors = inputs.tensors();
  run.outputs.attach(&tensors);
  run.saved = io::Buffer(plan.saved_bytes);
  run.saved.fill(static_cast<unsigned char>(byte));
  tensors.saved = run.saved.data(), tensors.saved_bytes = run.saved.size();
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  throw_if_error(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()));
  return run;
}

TEST_F(Keep, OutputsAreThoseOfAForwardThatKeepsNothing) {
  std::size_t turn = 0;
  for (const Regime regime : {Regime::kTrained, Regime::kSoftplus, Regime::kLog})
    for (const int64_t K : test::in_turn<int64_t>(turn++, {128, 64})) {
      check::GenerateOptions options = shape16(0, 3, K, K);
      options.seq_lens = {130, 0, 77, 64};
      options.regime = regime;
      const Inputs inputs = check::generate(options);
      const Kept kept = run_forward(inputs, KeepPolicy::kChunks, 132);
      const Kept bare = run_forward(inputs, KeepPolicy::kNothing, 132);
      EXPECT_TRUE(test::same_bits(kept.outputs.o, bare.outputs.o)) << check::regime_name(regime);
      EXPECT_TRUE(test::same_bits(kept.outputs.final_state, bare.outputs.final_state));
      EXPECT_EQ(bare.saved.size(), 0u);
      // Every byte is written, the same with fewer clusters, which share chains.
      const Kept again = run_forward(inputs, KeepPolicy::kChunks, 4, 0x11);
      EXPECT_TRUE(test::same_bits(kept.saved, again.saved)) << check::regime_name(regime);
    }
}

TEST_F(Keep, ABackwardReadsItAgainAndAlone) {
  const Inputs inputs = check::generate(shape16(150, 2, 128, 128));
  GradientBuffers first = check::make_gradients(inputs, kBf16), second = first;
  test::BackwardCall call(inputs, first.gradients, kKept);
  throw_if_error(call.run(&first));
  throw_if_error(call.run(&second));
  EXPECT_TRUE(test::same_gradients(first, second));
  // Other errors, other gradients: they are read, not made again.
  call.saved.fill(0);
  throw_if_error(call.run(&second));
  EXPECT_FALSE(test::same_gradients(first, second));
}

TEST_F(Keep, LengthsOfTheDeviceGiveTheSameBits) {
  check::GenerateOptions options = shape16(0, 2, 128, 128);
  options.seq_lens = {70, 33, 0, 100};
  const Inputs inputs = check::generate(options);
  GradientBuffers known = check::make_gradients(inputs, kBf16), bounds = known;
  test::run_backward(inputs, &known, kKept);
  test::run_backward(inputs, &bounds, {.keep_chunks = true, .from_bounds = true});
  EXPECT_TRUE(test::same_gradients(known, bounds));
}

/// 96 heads that share all rows; each has step sizes of its own, [tokens, 96].
Inputs of_many_heads(const Inputs& one, const io::Buffer& beta, int64_t tokens) {
  constexpr int64_t kHeads = 96;
  Inputs many = one;
  Problem& p = many.problem;
  p.num_heads = p.num_value_heads = kHeads;
  for (TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g}) desc->strides = {tokens * 128, 128, 0, 1};
  p.beta = contiguous(DType::kBFloat16, {1, tokens, kHeads});
  many.beta = beta;
  many.A_log = io::Buffer(kHeads * sizeof(float));
  many.dt_bias = io::Buffer(kHeads * one.dt_bias.size());
  for (std::size_t i = 0; i < kHeads; ++i) {
    many.A_log.as<float>()[i] = one.A_log.as<float>()[0];
    std::memcpy(many.dt_bias.data() + i * one.dt_bias.size(), one.dt_bias.data(),
                one.dt_bias.size());
  }
  return many;
}

TEST_F(Keep, HeadsOfTwoGroupsHaveTheBitsThatTheyHaveAlone) {
  constexpr int64_t T = 8192, kHeads = 96;  // what the backward takes in two groups
  const bool runs = !test::emulated();      // a plan alone where that would take an hour
  check::GenerateOptions options = shape16(runs ? T : 64, 1, 128, 128);
  options.initial_state = false;
  options.regime = Regime::kTrained;
  Inputs one = check::generate(options);
  if (!runs) {
    const Problem like = one.problem;
    one.problem.num_tokens = T;
    for (TensorDesc* desc : {&one.problem.q, &one.problem.k, &one.problem.v, &one.problem.g})
      *desc = contiguous(like.q.dtype, {1, T, 1, 128});
  }
  io::Buffer beta(static_cast<std::size_t>(T * kHeads) * 2);
  for (int64_t i = 0; i < T * kHeads; ++i)
    store_element(beta.data(), DType::kBFloat16, i, static_cast<float>(i % 1009) / 200.0f - 2.5f);
  const Inputs many = of_many_heads(one, beta, T);
  check::GradientOptions wanted = kBf16;
  wanted.d_final_state = false;
  if (!runs) {
    PlanOptions keep;
    keep.keep = KeepPolicy::kChunks;
    Problem p = many.problem;
    p.o = contiguous(DType::kBFloat16, {1, T, kHeads, 128});
    Plan forward;
    throw_if_error(make_plan(p, {}, test::device(), keep, &forward));
    Gradients gradients;
    gradients.d_o = p.o, gradients.dq = p.o;
    BackwardPlan plan;
    throw_if_error(make_backward_plan(forward, gradients, {}, &plan));
    EXPECT_NE(plan.to_text(true).find("2 groups of 48 of 96 q/k heads"), std::string::npos)
        << plan.to_text(true);
    return;
  }
  GradientBuffers all = check::make_gradients(many, wanted);
  test::BackwardCall call(many, all.gradients, kKept);
  ASSERT_NE(call.plan.to_text(true).find("2 groups of 48 of 96 q/k heads"), std::string::npos);
  throw_if_error(call.run(&all));
  for (const int64_t head : {0, 47, 48, 95}) {
    Inputs alone = one;
    alone.beta = io::Buffer(static_cast<std::size_t>(T) * 2);
    GradientBuffers expected = check::make_gradients(alone, wanted);
    for (int64_t t = 0; t < T; ++t) {
      std::memcpy(alone.beta.data() + t * 2, beta.data() + (t * kHeads + head) * 2, 2);
      std::memcpy(expected.d_o.data() + t * 256, all.d_o.data() + (t * kHeads + head) * 256, 256);
    }
    test::run_backward(alone, &expected, {.keep_chunks = true, .whole = true});
    int64_t others = 0;
    for (const auto& [of_all, of_one] : {std::pair{&all.dq, &expected.dq},
                                         {&all.dk, &expected.dk},
                                         {&all.dv, &expected.dv},
                                         {&all.dg, &expected.dg}})
      for (int64_t t = 0; t < T; ++t)
        others += std::memcmp(of_all->data() + (t * kHeads + head) * 256, of_one->data() + t * 256,
                              256) != 0;
    EXPECT_EQ(others, 0) << "rows of head " << head;
  }
}

}  // namespace
}  // namespace kda
