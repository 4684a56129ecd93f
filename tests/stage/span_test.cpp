// SPDX-License-Identifier: Apache-2.0
// Maps of spans are those of run() and backward(), and a fold joins them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "check/tolerances.hpp"
#include "core/layout.hpp"
#include "support/backward.hpp"
#include "support/fold.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;
using check::Regime;
using Floats = std::vector<float>;

struct Maps {
  Floats M, B, D;
};

struct MapsRun {
  std::string backend;
  int32_t num_threads = 1;
  const GradientBuffers* gradients = nullptr;  ///< D too
  bool from_initial = false;                   ///< B is the state behind the span
};

/// span_maps() with NaN in all that it may write.
Maps maps_of(const Inputs& inputs, const MapsRun& run = {}) {
  Problem p = inputs.problem;
  if (!run.from_initial) p.initial_state = std::nullopt;
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  PlanOptions options = test::with_backend(run.backend);
  options.num_threads = run.num_threads;
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, DeviceFacts{}, options, &plan));
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  const auto heads = static_cast<std::size_t>(p.num_sequences * p.num_value_heads);
  const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
  Maps maps{Floats(heads * K * K, NAN), Floats(heads * K * V, NAN), Floats(heads * K * V, NAN)};
  SpanMaps call{.M = maps.M.data(), .B = maps.B.data()};
  if (run.gradients) {
    call.D = maps.D.data();
    call.d_o = run.gradients->d_o.data();
    call.d_o_dtype = run.gradients->gradients.d_o->dtype;
  }
  throw_if_error(span_maps(plan, tensors, call, workspace.data(), workspace.size()));
  return maps;
}

/// M S + A of entry `at`, in float64; `transposed`: M^T.
std::vector<double> apply(const Problem& p, const Floats& M, const Floats& A, std::size_t at,
                          const float* S, bool transposed) {
  const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
  std::vector<double> out(K * V);
  for (std::size_t i = 0; i < K; ++i)
    for (std::size_t c = 0; c < V; ++c) {
      double sum = A[(at * K + i) * V + c];
      for (std::size_t j = 0; j < K; ++j)
        sum += double{M[at * K * K + (transposed ? j * K + i : i * K + j)]} * S[j * V + c];
      out[i * V + c] = sum;
    }
  return out;
}

/// Largest difference over the largest value of `expected`.
double error_of(const std::vector<double>& found, const float* expected) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    worst = std::max(worst, std::abs(found[i] - expected[i]));
    largest = std::max(largest, std::abs(double{expected[i]}));
  }
  return largest == 0 ? worst : worst / largest;
}

Inputs packed(int regime, DType dtype) {
  check::GenerateOptions options = test::shape(0, 1, 48, 40);
  options.num_value_heads = 2;
  options.seq_lens = {141, 0, 1, 64, 65};
  options.regime = static_cast<Regime>(regime);
  options.dtype = dtype;
  options.initial_state = true;
  return check::generate(options);
}

class Spans : public testing::Test {
  void SetUp() override {
    if (test::on_cuda()) GTEST_SKIP() << "maps of spans are made on the CPU";
  }
};

TEST_F(Spans, MapsAreThoseOfRunAndBackward) {
  for (const std::string& backend : test::backends())
    for (int regime = 0; regime < check::kNumRegimes; ++regime)
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const Inputs inputs = packed(regime, dtype);
        GradientBuffers gradients = check::make_gradients(inputs, {.d_o_dtype = dtype});
        test::run_backward(inputs, &gradients, {.backend = backend});
        const test::Result run = test::run_inputs(inputs, {.plan = test::with_backend(backend)});
        const Maps maps = maps_of(inputs, {.backend = backend, .gradients = &gradients});
        const Problem& p = inputs.problem;
        const auto state = static_cast<std::size_t>(p.key_dim * p.value_dim);
        const double most =
            check::is_marginal(inputs) ? 1e-3 : 1e-5;  // keys that are equal: M has no decay
        for (std::size_t at = 0; at < 10; ++at) {
          const float* S = inputs.initial_state.as<float>() + at * state;
          const float* dS = gradients.d_final_state.as<float>() + at * state;
          EXPECT_LE(error_of(apply(p, maps.M, maps.B, at, S, false),
                             run.outputs.final_state.as<float>() + at * state),
                    most)
              << backend << " " << check::regime_name(static_cast<Regime>(regime)) << " " << at;
          EXPECT_LE(error_of(apply(p, maps.M, maps.D, at, dS, true),
                             gradients.d_initial_state.as<float>() + at * state),
                    most)
              << backend << " " << check::regime_name(static_cast<Regime>(regime)) << " " << at;
        }
      }
}

TEST_F(Spans, BitsDependOnNothingElse) {
  const Inputs inputs = packed(0, DType::kFloat32);
  const GradientBuffers gradients = check::make_gradients(inputs);
  const Maps one = maps_of(inputs, {.gradients = &gradients});
  const Maps many = maps_of(inputs, {.num_threads = 3, .gradients = &gradients});
  EXPECT_EQ(one.M, many.M);
  EXPECT_EQ(one.B, many.B);
  EXPECT_EQ(one.D, many.D);
  // Without D, M takes another way; the last span alone has its bits too.
  EXPECT_EQ(maps_of(inputs).M, one.M);
  const Maps alone = maps_of(test::only_sequence(inputs, 4));
  EXPECT_TRUE(std::equal(alone.M.begin(), alone.M.end(), one.M.end() - 2 * 48 * 48));
  EXPECT_TRUE(std::equal(alone.B.begin(), alone.B.end(), one.B.end() - 2 * 48 * 40));
}

TEST_F(Spans, BFromInitialStatesIsTheFinalState) {
  const Inputs inputs = packed(0, DType::kBFloat16);
  const Floats B = maps_of(inputs, {.from_initial = true}).B;
  const test::Result run = test::run_inputs(inputs);
  EXPECT_TRUE(std::equal(B.begin(), B.end(), run.outputs.final_state.as<float>()));
}

TEST_F(Spans, SizesOfHeads) {
  for (const int64_t K : {1, 3, 17, 100, 256})
    for (const int64_t V : {1, 33, 256}) {
      check::GenerateOptions options = test::shape(70, 1, K, V);
      options.initial_state = true;
      const Inputs inputs = check::generate(options);
      GradientBuffers gradients = check::make_gradients(inputs);
      test::run_backward(inputs, &gradients);
      const Maps maps = maps_of(inputs, {.gradients = &gradients});
      EXPECT_LE(error_of(apply(inputs.problem, maps.M, maps.D, 0,
                               gradients.d_final_state.as<float>(), true),
                         gradients.d_initial_state.as<float>()),
                1e-5)
          << K << " " << V;
    }
}

TEST_F(Spans, NeedAForwardOfTheCpuAndPointers) {
  const Inputs inputs = check::generate(test::shape(20, 1, 16, 16));
  const test::Result run = test::run_inputs(inputs);
  Problem p = run.problem;
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  io::Buffer workspace(run.plan.workspace_bytes);
  Floats M(256), B(256, 7);
  const auto message = [&](const Plan& plan, const SpanMaps& maps) {
    return span_maps(plan, tensors, maps, workspace.data(), workspace.size()).message();
  };
  EXPECT_EQ(message(run.plan, {}), "M: pointer is null, and so is that of B");
  EXPECT_EQ(message(run.plan, {.B = B.data(), .D = B.data()}), "M: pointer is null, and D needs M");
  EXPECT_EQ(message(run.plan, {.M = M.data(), .D = B.data()}), "d_o: pointer is null");
  EXPECT_EQ(message(run.plan,
                    {.M = M.data(), .D = B.data(), .d_o = B.data(), .d_o_dtype = DType::kFloat64}),
            "d_o: dtype fp64 is not fp32, bf16 or fp16");
  Plan decode = run.plan;
  decode.problem.operation = Operation::kDecode;
  EXPECT_EQ(message(decode, {.B = B.data()}), "plan: is not of a forward");
  const test::Result oracle = test::run_inputs(inputs, {.plan = test::with_backend("oracle")});
  workspace = io::Buffer(oracle.plan.workspace_bytes);
  EXPECT_EQ(message(oracle.plan, {.B = B.data()}),
            "plan: cpu.oracle has no maps of spans (cpu.blocked has)");
  EXPECT_EQ(B, Floats(256, 7));
}

using test::FoldCase;

TEST(FoldStates, AppliesMapsInOrder) {
  for (const auto& [K, V] : {std::pair{128, 128}, {33, 50}, {1, 3}, {256, 16}})
    for (const bool transposed : {false, true}) {
      FoldCase c(K, V, transposed);
      ASSERT_TRUE(fold_states(c.fold).ok());
      const auto size = static_cast<std::size_t>(K * V), square = static_cast<std::size_t>(K * K);
      Problem p;
      p.key_dim = K, p.value_dim = V;
      for (std::size_t head = 0; head < 3; ++head) {
        const auto map = [&](std::size_t i, const float* S) {
          const float* entry = c.maps.data() + i * static_cast<std::size_t>(c.fold.map_stride);
          const float* A = entry + 3 * square + head * size;
          return apply(p, Floats(entry + head * square, entry + (head + 1) * square),
                       Floats(A, A + size), 0, S, transposed);
        };
        const float* start = c.starts.data() + (3 + head) * size;
        const auto state = [&](std::size_t i) { return c.states.data() + (i * 3 + head) * size; };
        EXPECT_TRUE(std::equal(start, start + size, state(0)));
        const std::vector<double> first = map(2, start);
        const Floats rounded(first.begin(), first.end());
        EXPECT_LE(error_of(map(0, rounded.data()), state(2)), 3e-6) << K << " " << V;
        const Floats zero(size, 0);
        EXPECT_LE(error_of(map(3, zero.data()), state(1)), 3e-6) << K << " " << V;
        EXPECT_TRUE(std::isnan(*state(3)));
      }
    }
}

TEST(FoldStates, RowsMayHaveSomethingBehindTheirMaps) {
  for (const bool transposed : {false, true}) {
    FoldCase dense(20, 12, transposed), rows(20, 12, transposed);
    rows.put_in_rows(3, 5);
    ASSERT_TRUE(fold_states(dense.fold).ok());
    ASSERT_TRUE(fold_states(rows.fold).ok());
    EXPECT_TRUE(test::same_bits(dense.states, rows.states));
  }
}

TEST(FoldStates, SaysWhatIsWrong) {
  FoldCase c(8, 8, false);
  const auto message = [&](auto change) {
    StateFold fold = c.fold;
    change(fold);
    return fold_states(fold).message();
  };
  const auto steps = [&](FoldStep step) {
    std::vector<FoldStep> list = c.steps;
    list[1] = step;
    return message([&](StateFold& f) { f.steps = list; });
  };
  EXPECT_EQ(message([](StateFold& f) { f.key_dim = 257; }), "key_dim = 257 is outside 1..256");
  EXPECT_EQ(message([](StateFold& f) { f.value_dim = 0; }), "value_dim = 0 is outside 1..256");
  EXPECT_EQ(message([](StateFold& f) { f.num_value_heads = 0; }),
            "num_value_heads = 0 is outside 1..65535");
  EXPECT_EQ(message([](StateFold& f) { f.starts = nullptr; }), "starts: pointer is null");
  EXPECT_EQ(message([](StateFold& f) { f.num_starts = -1; }), "num_starts = -1 is negative");
  EXPECT_EQ(message([](StateFold& f) { f.num_states = -1; }), "num_states = -1 is negative");
  EXPECT_EQ(message([](StateFold& f) { f.M = nullptr; }), "M: pointer is null");
  EXPECT_EQ(message([](StateFold& f) { f.A = nullptr; }), "A: pointer is null");
  EXPECT_EQ(message([](StateFold& f) { f.num_maps = -1; }), "num_maps = -1 is negative");
  EXPECT_EQ(message([](StateFold& f) { f.states = nullptr; }), "states: pointer is null");
  EXPECT_EQ(message([](StateFold& f) { f.map_stride = 191; }),
            "map_stride = 191 is below the 192 floats of a map");
  EXPECT_EQ(message([](StateFold& f) { f.num_threads = -1; }), "num_threads = -1 is negative");
  EXPECT_EQ(message([](StateFold& f) { f.maps_per_row = -1; }), "maps_per_row = -1 is negative");
  EXPECT_EQ(message([](StateFold& f) { f.maps_per_row = 2, f.row_stride = 767; }),
            "row_stride = 767 is below the 2 maps of 384 floats of a row");
  EXPECT_EQ(message([&](StateFold& f) { f.steps = f.steps.subspan(1); }),
            "steps: the first step has no start");
  EXPECT_EQ(steps({.start = 2}), "steps: start of step 1 is 2, outside -2..1");
  EXPECT_EQ(steps({.map = 4}), "steps: map of step 1 is 4, outside -1..3");
  EXPECT_EQ(steps({.store = -2}), "steps: store of step 1 is -2, outside -1..3");
  EXPECT_TRUE(std::isnan(c.states[0]));
}

}  // namespace
}  // namespace kda
