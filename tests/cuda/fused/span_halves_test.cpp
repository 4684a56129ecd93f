// SPDX-License-Identifier: Apache-2.0
// A forward of spans in two phases: the maps of its first half say what its second half gives, and
// both together are a forward from these states. A backward of spans likewise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "check/tolerances.hpp"
#include "kda/span.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::Inputs;
using Floats = std::vector<float>;

class SpanHalves : public test::HopperTest {};

PlanOptions on_fused() { return test::with_backend("fused"); }

/// Where nothing is cut, there is one segment behind the empty one.
PlanOptions cut_in(int64_t segments) {
  PlanOptions options = segments == 0 ? on_fused() : test::fixed_segments(segments);
  options.backend = "fused";
  options.segment_method = SegmentMethod::kOnePass;
  options.spans = true;
  return options;
}

Floats download(const check::DeviceBuffer& buffer) {
  Floats values(buffer.size() / sizeof(float));
  buffer.download(values.data(), buffer.size());
  return values;
}

struct Halves {
  test::Result result;
  Floats M, B;
};

/// With the initial states of `inputs`, in fp32 and the kv layout, between the halves.
Halves run_in_halves(const Inputs& inputs, const PlanOptions& plan, DType out_dtype,
                     const std::vector<int32_t>& checkpoint_offsets = {}) {
  Inputs stateless = inputs;
  stateless.problem.initial_state = std::nullopt;
  test::OnDevice call(stateless, {.plan = plan, .out_dtype = out_dtype}, checkpoint_offsets);
  const Problem& p = call.problem;
  const auto states = static_cast<std::size_t>(p.num_sequences * p.num_value_heads * p.key_dim);
  check::DeviceBuffer M(states * static_cast<std::size_t>(p.key_dim) * sizeof(float));
  check::DeviceBuffer B(states * static_cast<std::size_t>(p.value_dim) * sizeof(float));
  check::DeviceBuffer starts(B.size());
  M.fill(0xff), B.fill(0xff);
  void* const workspace = call.workspace.data();
  const std::size_t bytes = call.workspace.size();
  const SpanMaps maps{.M = static_cast<float*>(M.data()), .B = static_cast<float*>(B.data())};
  throw_if_error(span_begin(call.plan, call.memory->tensors(), maps, workspace, bytes));
  starts.upload(inputs.initial_state.data(), starts.size());
  throw_if_error(span_finish(call.plan, call.memory->tensors(),
                             static_cast<const float*>(starts.data()), workspace, bytes));
  call.read();
  call.problem.initial_state = inputs.problem.initial_state;  // what it has computed
  return {{call.problem, call.plan, std::move(call.outputs)}, download(M), download(B)};
}

/// Largest difference of M S + B and the final states, over the largest final state.
double error_of_maps(const Inputs& inputs, const Halves& halves) {
  const Problem& p = inputs.problem;
  const int64_t K = p.key_dim, V = p.value_dim;
  const auto* S = inputs.initial_state.as<float>();
  const auto* expected = halves.result.outputs.final_state.as<float>();
  double worst = 0, largest = 0;
  for (int64_t at = 0; at < p.num_sequences * p.num_value_heads; ++at)
    for (int64_t i = 0; i < K; ++i)
      for (int64_t c = 0; c < V; ++c) {
        double sum = halves.B[static_cast<std::size_t>((at * K + i) * V + c)];
        for (int64_t j = 0; j < K; ++j)
          sum += double{halves.M[static_cast<std::size_t>((at * K + i) * K + j)]} *
                 S[(at * K + j) * V + c];
        const double state = expected[(at * K + i) * V + c];
        worst = std::max(worst, std::abs(sum - state));
        largest = std::max(largest, std::abs(state));
      }
  return worst / largest;
}

/// Returns the plan.
Plan expect_forward(const Inputs& inputs, int64_t segments, const std::string& what) {
  const Halves halves = run_in_halves(inputs, cut_in(segments), inputs.problem.q.dtype);
  const check::Comparison comparison = check::compare(
      inputs, halves.result.problem, halves.result.outputs,
      {.operands = check::operands_of(halves.result.plan), .num_threads = test::oracle_threads()});
  const auto* o = comparison.worst_o();
  const auto* state = comparison.worst_final_state();
  EXPECT_TRUE(comparison.within())
      << what << ": o " << (o ? o->error : 0) << " of " << (o ? o->tolerance : 0)
      << ", final state " << (state ? state->error : 0) << " of " << (state ? state->tolerance : 0);
  EXPECT_LE(error_of_maps(inputs, halves), 1e-3) << what;
  return halves.result.plan;
}

check::GenerateOptions shape_of_two_heads() {
  check::GenerateOptions options = test::shape16(0, 2, 64, 64);
  options.seq_lens = {64};
  return options;
}

Inputs packed(int64_t K, DType dtype, check::Regime regime) {
  check::GenerateOptions options = test::shape16(0, 1, K, K, dtype);
  options.num_value_heads = 2;
  options.seq_lens = {test::long_case(600), 0, 1, 64, 65};
  options.regime = regime;
  return check::generate(options);
}

TEST_F(SpanHalves, AreAForwardFromTheirStates) {
  std::size_t turn = 0;
  for (const int64_t segments : {0, 3})
    for (const int64_t K : {64, 128})
      for (const DType dtype : test::in_turn<DType>(turn++, {DType::kBFloat16, DType::kFloat16}))
        expect_forward(packed(K, dtype, check::Regime::kTrained), segments,
                       "K " + std::to_string(K) + ", segments " + std::to_string(segments));
}

TEST_F(SpanHalves, EveryRegime) {
  for (const auto regime : {check::Regime::kLog, check::Regime::kSlow, check::Regime::kSoftplus,
                            check::Regime::kTrainedSoftplus})
    expect_forward(packed(128, DType::kBFloat16, regime), 2, check::regime_name(regime));
}

/// A checkpoint of a span, too, follows from M and B up to its offset, whichever segment it lies
/// in, and moves no bit of a call without one.
TEST_F(SpanHalves, CheckpointsAtOffsets) {
  std::size_t turn = 0;
  for (const int64_t segments : {0, 3})
    for (const int64_t K : test::in_turn<int64_t>(turn++, {64, 128})) {
      const std::string what = "K " + std::to_string(K) + ", segments " + std::to_string(segments);
      Inputs inputs = packed(K, DType::kBFloat16, check::Regime::kTrained);
      const Halves plain = run_in_halves(inputs, cut_in(segments), DType::kBFloat16);
      const auto length = static_cast<int32_t>(inputs.cu_seqlens[1]);
      test::want_checkpoints(&inputs.problem, DType::kFloat32);
      for (const std::vector<int32_t>& offsets : test::in_turn<std::vector<int32_t>>(
               0, {{length / 16 * 16, 0, 0, 48, 64}, {64, 0, -16, 64, 16}})) {
        const Halves halves = run_in_halves(inputs, cut_in(segments), DType::kBFloat16, offsets);
        EXPECT_TRUE(test::same_bits(halves.result.outputs.o, plain.result.outputs.o)) << what;
        EXPECT_EQ(halves.M, plain.M);
        EXPECT_EQ(halves.B, plain.B);
        for (const std::size_t n : {0, 3, 4})
          test::expect_checkpoint(inputs, halves.result.plan, halves.result.outputs, n, offsets[n],
                                  what);
        const std::size_t bytes = test::checkpoint_bytes(halves.result.problem);
        const auto* at = halves.result.outputs.checkpoints.as<unsigned char>();
        EXPECT_TRUE(std::all_of(at + bytes, at + 3 * bytes, [](unsigned char x) {
          return x == 0xff;
        })) << what;
      }
    }
}

/// The first of two heads has strong gates; the transitions of the other one run on.
TEST_F(SpanHalves, TransitionsThatStop) {
  check::GenerateOptions options = test::shape16(0, 1, 64, 64);
  options.num_value_heads = 2;
  options.seq_lens = {4300};
  options.initial_state = true;
  options.regime = check::Regime::kMixed;
  EXPECT_TRUE(expect_forward(check::generate(options), 2, "transitions that stop").early_exit);
}

TEST_F(SpanHalves, HaveTheSameBitsEveryTime) {
  const Inputs inputs = packed(64, DType::kBFloat16, check::Regime::kTrained);
  const Halves a = run_in_halves(inputs, cut_in(3), DType::kBFloat16);
  const Halves b = run_in_halves(inputs, cut_in(3), DType::kBFloat16);
  EXPECT_TRUE(test::same_bits(a.result.outputs.o, b.result.outputs.o));
  EXPECT_EQ(a.M, b.M);
  EXPECT_EQ(a.B, b.B);
}

TEST_F(SpanHalves, NameWhatCannotBeUsed) {
  Inputs inputs = packed(64, DType::kBFloat16, check::Regime::kTrained);
  inputs.problem.initial_state = std::nullopt;
  test::OnDevice call(inputs, {.plan = cut_in(0), .out_dtype = DType::kBFloat16});
  Floats host(1);
  const auto begin = [&](const SpanMaps& maps) {
    return span_begin(call.plan, call.memory->tensors(), maps, call.workspace.data(),
                      call.workspace.size())
        .message();
  };
  EXPECT_EQ(begin({.D = host.data()}), "D: is of a backward, and not made here");
  EXPECT_EQ(begin({.M = host.data()}).substr(0, 18), "M: is host memory,");
  EXPECT_EQ(begin({.B = host.data()}).substr(0, 18), "B: is host memory,");
  const auto finish = [&](const float* states_in) {
    return span_finish(call.plan, call.memory->tensors(), states_in, call.workspace.data(),
                       call.workspace.size())
        .message();
  };
  EXPECT_EQ(finish(nullptr), "states_in: pointer is null");
  EXPECT_EQ(finish(host.data()).substr(0, 26), "states_in: is host memory,");
}

class SpanBackward : public test::GpuTest {};

check::GradientBuffers gradients_of(const Inputs& inputs) {
  return check::make_gradients(inputs, {.d_o_dtype = DType::kBFloat16});
}

struct HalvesOfBackward {
  BackwardPlan plan;
  Floats D;
};

/// A backward in two phases: d_final_state comes in between, unless D is wanted from it.
HalvesOfBackward backward_in_halves(const Inputs& inputs, int64_t segments, bool from_final,
                                    check::GradientBuffers* buffers) {
  test::BackwardCall call(inputs, buffers->gradients,
                          {.backend = "staged", .segments = segments, .spans = true});
  check::DeviceTensors tensors(call.plan.plan, call.tensors);
  const check::DeviceGradients given(call.plan, buffers->tensors());
  GradientTensors first = given.tensors();
  check::DeviceBuffer unknown(buffers->d_final_state.size()), D(unknown.size());
  unknown.fill(0xff), D.fill(0xff);
  if (!from_final) first.d_final_state = unknown.data();
  check::DeviceBuffer workspace(call.plan.plan.workspace_bytes);
  workspace.fill(0xff);
  throw_if_error(span_backward_begin(call.plan, tensors.tensors(), first,
                                     {static_cast<float*>(D.data()), from_final}, workspace.data(),
                                     workspace.size()));
  throw_if_error(span_backward_finish(call.plan, tensors.tensors(), given.tensors(),
                                      workspace.data(), workspace.size()));
  check::synchronize_device();
  const_cast<check::DeviceGradients&>(given).download();
  return {call.plan, download(D)};
}

double difference(const Floats& found, const io::Buffer& expected) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    worst = std::max(worst, std::abs(double{found[i]} - expected.as<float>()[i]));
    largest = std::max(largest, std::abs(double{expected.as<float>()[i]}));
  }
  return worst / largest;
}

TEST_F(SpanBackward, IsABackwardFromTheGradientsBehind) {
  for (const int64_t segments : {0, 3})
    for (const int64_t K : test::in_turn<int64_t>(segments == 0 ? 1 : 0, {64, 128})) {
      const Inputs inputs = packed(K, DType::kBFloat16, check::Regime::kTrained);
      check::GradientBuffers buffers = gradients_of(inputs);
      const HalvesOfBackward from_final = backward_in_halves(inputs, segments, true, &buffers);
      const check::GradientComparison comparison =
          check::compare_gradients(inputs, buffers,
                                   {.operands = check::operands_of(from_final.plan.plan),
                                    .num_threads = test::oracle_threads()});
      for (const auto& [name, errors] : comparison.errors) {
        const check::HeadError* worst = check::worst_error(errors);
        EXPECT_LE(worst->error, worst->tolerance) << "K " << K << ": " << name;
      }
      EXPECT_LE(difference(from_final.D, buffers.d_initial_state), 1e-2) << K << " " << segments;
      // D is the gradient when none comes from behind.
      check::GradientBuffers again = gradients_of(inputs), alone = gradients_of(inputs);
      const Floats D = backward_in_halves(inputs, segments, false, &again).D;
      EXPECT_TRUE(test::same_gradients(buffers, again)) << K << " " << segments;
      alone.d_final_state.fill(0);
      test::run_backward(inputs, &alone, {.backend = "staged"});
      EXPECT_LE(difference(D, alone.d_initial_state), 1e-2) << K << " " << segments;
    }
}

/// Chains with operands in fp16 run on the factors of a first half again. The first of two heads
/// has strong gates. So next to nothing reaches D of the first sequence, where one token has a
/// gradient, and the first half leaves the chain, with other factors. What comes from behind the
/// second sequence is large, and does not reach its start: that is for the second half to see.
TEST_F(SpanBackward, LeavesChainsInEitherHalf) {
  constexpr int64_t kHeads = 2, K = 128, kTokens = 130;
  check::GenerateOptions options = test::shape16(0, 1, K, K);
  options.num_value_heads = kHeads;
  options.seq_lens = {kTokens, kTokens};
  options.regime = check::Regime::kMixed;
  options.initial_state = true;
  const Inputs inputs = check::generate(options);
  const auto changed = [&] {
    check::GradientBuffers buffers = gradients_of(inputs);
    auto* d_o = buffers.d_o.as<uint16_t>();
    for (int64_t i = 0; i < kTokens * kHeads * K; ++i)
      if (i / (kHeads * K) != 9) d_o[i] = 0;
    auto* d_final = buffers.d_final_state.as<float>();
    for (int64_t i = 0; i < 2 * kHeads * K * K; ++i) d_final[i] *= i < kHeads * K * K ? 0 : 0x1p30f;
    return buffers;
  };
  check::GradientBuffers halves = changed(), whole = changed();
  backward_in_halves(inputs, 0, false, &halves);
  test::run_backward(inputs, &whole, {.backend = "staged"});
  EXPECT_TRUE(test::same_gradients(whole, halves));
}

TEST_F(SpanBackward, NamesWhatCannotBeUsed) {
  const Inputs inputs = packed(64, DType::kBFloat16, check::Regime::kTrained);
  check::GradientBuffers buffers = gradients_of(inputs);
  Floats host(1);
  for (const bool spans : {false, true}) {
    test::BackwardCall call(inputs, buffers.gradients, {.backend = "staged", .spans = spans});
    check::DeviceTensors tensors(call.plan.plan, call.tensors);
    const check::DeviceGradients given(call.plan, buffers.tensors());
    check::DeviceBuffer workspace(call.plan.plan.workspace_bytes);
    const Status begin =
        span_backward_begin(call.plan, tensors.tensors(), given.tensors(), {host.data(), false},
                            workspace.data(), workspace.size());
    if (spans) {
      EXPECT_EQ(begin.message().substr(0, 18), "D: is host memory,");
    } else {
      EXPECT_EQ(begin.message(), "plan: was made without spans in its options");
      EXPECT_EQ(span_backward_finish(call.plan, tensors.tensors(), given.tensors(),
                                     workspace.data(), workspace.size())
                    .message(),
                begin.message());
    }
  }
}

TEST(SpanBackwardPlan, IsRefusedWhereThereIsNone) {
  const Inputs inputs = check::generate(shape_of_two_heads());
  const check::GradientBuffers buffers = gradients_of(inputs);
  const auto message = [&](const Gradients& gradients, const DeviceFacts& device, bool lengths,
                           int64_t tokens) {
    Problem p = inputs.problem;
    p.num_tokens = tokens;
    check::make_outputs(&p, DType::kBFloat16);
    const std::vector<int64_t> cu_seqlens = {0, tokens};
    Plan forward;
    BackwardPlan plan;
    throw_if_error(lengths ? make_plan(p, cu_seqlens, device, {}, &forward)
                           : make_plan_from_bounds(p, device, {}, &forward));
    PlanOptions options;
    options.spans = true;
    return make_backward_plan(forward, gradients, options, &plan).message();
  };
  const DeviceFacts gpu = gpu_facts(132, 90);
  const Gradients& all = buffers.gradients;
  EXPECT_EQ(message(all, gpu, true, 64), "");
  EXPECT_NE(message(all, cpu_facts(), true, 64).find("no backward in two phases"),
            std::string::npos);
  EXPECT_EQ(message(all, gpu, false, 64), "spans: needs lengths that are known");
  Gradients without = all;
  without.d_final_state = std::nullopt;
  EXPECT_EQ(message(without, gpu, true, 64), "spans: belongs to a backward with d_final_state");
  const std::string large = message(all, gpu, true, int64_t{1} << 23);
  EXPECT_NE(large.find("all heads at once would need more than 16 GB"), std::string::npos) << large;
}

TEST(SpanHalvesPlan, IsRefusedWhereThereIsNone) {
  const Inputs inputs = packed(64, DType::kBFloat16, check::Regime::kTrained);
  Problem stateless = inputs.problem;
  stateless.initial_state = std::nullopt;
  check::make_outputs(&stateless, DType::kBFloat16);
  Plan plan;
  const auto message = [&](const Problem& problem, const DeviceFacts& device,
                           const std::string& backend) {
    PlanOptions options;
    options.backend = backend;
    options.spans = true;
    return make_plan(problem, inputs.cu_seqlens, device, options, &plan).message();
  };
  const std::string refused = message(stateless, cpu_facts(), "");
  EXPECT_NE(refused.find("has no forward in two phases"), std::string::npos) << refused;
  EXPECT_NE(message(stateless, gpu_facts(132, 90), "staged").find("no forward in two phases"),
            std::string::npos);
  Problem with_states = inputs.problem;
  check::make_outputs(&with_states, DType::kBFloat16);
  EXPECT_NE(message(with_states, gpu_facts(132, 90), "fused").find("without initial states"),
            std::string::npos);
}

}  // namespace
}  // namespace kda
