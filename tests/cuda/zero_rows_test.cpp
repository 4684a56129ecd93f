// SPDX-License-Identifier: Apache-2.0
// Where only the device knows cu_seqlens, tokens may lie behind the last sequence. Every output and
// gradient is exactly 0 there, whatever kernels the plan picks; sequences have the bits that they
// have without such tokens, although these hold NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "core/convert.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"
#include "support/graph.hpp"
#include "support/padded.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;

class ZeroRows : public test::GpuTest {};

struct Options {
  std::string backend;
  DType dtype = DType::kBFloat16;
  int64_t K = 64, V = 64;
  bool one_gate = false;
  HeadMap heads = HeadMap::kGrouped;
  bool keep = false;

  std::string text() const {
    return backend + " " + dtype_name(dtype) + " K " + std::to_string(K) + " V " +
           std::to_string(V) + (one_gate ? " one gate a head" : "") +
           (heads == HeadMap::kTiled ? " tiled" : "") + (keep ? " keep" : "");
  }
};

/// Sequences of `lengths`, of which the last one becomes rows of none.
Inputs padded(const Options& o, std::vector<int64_t> lengths) {
  check::GenerateOptions options = test::shape(0, 2, o.K, o.V);
  options.num_value_heads = 4;
  options.dtype = o.dtype;
  options.initial_state = !o.keep;
  options.seq_lens = std::move(lengths);
  if (o.one_gate) options.regime = check::Regime::kLog;
  Inputs inputs = test::with_rows_behind(check::generate(options));
  inputs.problem.head_map = o.heads;
  if (o.one_gate) test::keep_one_gate(&inputs);
  if (o.one_gate && o.backend == "fused") {  // which takes such gates in fp32
    Problem& p = inputs.problem;
    io::Buffer gates(static_cast<std::size_t>(p.num_tokens * p.num_value_heads) * sizeof(float));
    for (int64_t i = 0; i < p.num_tokens * p.num_value_heads; ++i)
      gates.as<float>()[i] = load_element(inputs.g.data(), p.g.dtype, i);
    inputs.g = std::move(gates);
    p.g = head_gates(DType::kFloat32, 1, p.num_tokens, p.num_value_heads);
  }
  return inputs;
}

bool on_hopper() { return test::device().compute_capability == 90; }

std::vector<Options> forwards() {
  constexpr DType kFp32 = DType::kFloat32;
  std::vector<Options> all = {{"staged"},
                              {"staged", DType::kFloat16, 40, 24},
                              {"staged", DType::kBFloat16, 64, 64, true},
                              {"recurrent"},
                              {"recurrent", kFp32, 33, 7},
                              {"recurrent", kFp32, 33, 7, true, HeadMap::kTiled}};
  if (on_hopper()) {
    all.push_back({"fused"});
    all.push_back({"fused", DType::kBFloat16, 128, 128});
    all.push_back({"fused", DType::kBFloat16, 128, 128, true, HeadMap::kTiled});
    all.push_back({"fused", DType::kBFloat16, 64, 64, false, HeadMap::kGrouped, true});
  }
  return all;
}

/// The rows of tokens before `end`, and zeros from there on.
void expect_rows(const io::Buffer& found, const io::Buffer& expected, int64_t rows, int64_t end,
                 const std::string& what) {
  const std::size_t before =
      found.size() / static_cast<std::size_t>(rows) * static_cast<std::size_t>(end);
  ASSERT_EQ(expected.size(), before) << what;
  EXPECT_EQ(std::memcmp(found.data(), expected.data(), before), 0) << what << ": of sequences";
  EXPECT_TRUE(test::rows_are_zero(found, rows, end, rows)) << what << ": rows behind are not 0";
}

void expect_forward(const Options& o, const Inputs& inputs, bool final_state = true) {
  test::RunOptions run{.plan = test::with_backend(o.backend),
                       .out_dtype = o.dtype,
                       .final_state = final_state,
                       .from_bounds = true};
  Inputs shorter = test::without_rows_behind(inputs);  // a copy: decode writes into the pool
  const test::Result whole = test::run_inputs(inputs, run);
  const test::Result alone = test::run_inputs(shorter, run);
  EXPECT_TRUE(test::same_bits(inputs.initial_state, shorter.initial_state));
  ASSERT_EQ(whole.plan.implementation, alone.plan.implementation);
  const Problem& p = inputs.problem;
  expect_rows(whole.outputs.o, alone.outputs.o, p.num_tokens, inputs.cu_seqlens.back(), "o");
  EXPECT_TRUE(test::same_bits(whole.outputs.final_state, alone.outputs.final_state));
}

TEST_F(ZeroRows, OfAForward) {
  for (const Options& o : forwards()) {
    if (o.keep) continue;
    SCOPED_TRACE(o.text());
    expect_forward(o, padded(o, {40, 0, 60, 33}));
    expect_forward(o, padded(o, {0, 70}));  // no token of a sequence
  }
}

TEST_F(ZeroRows, OfDecode) {
  for (const bool in_place : {false, true})
    for (const Options& o : {Options{"", DType::kBFloat16, 128, 128},
                             {"", DType::kFloat32, 33, 7},
                             {"", DType::kBFloat16, 64, 64, true, HeadMap::kTiled}}) {
      SCOPED_TRACE(o.text() + (in_place ? " in place" : ""));
      Inputs inputs = padded(o, {1, 0, 8, 2, 5});
      inputs.problem.operation = Operation::kDecode;
      expect_forward(o, inputs, !in_place);
    }
}

TEST_F(ZeroRows, OfABackward) {
  for (const Options& o : forwards()) {
    const bool served = o.backend != "staged" || o.dtype == DType::kBFloat16;
    if (!served || (o.backend == "fused" && !o.keep)) continue;  // no backward of its own
    SCOPED_TRACE(o.text());
    const Inputs inputs = padded(o, {40, 0, 60, 33});
    const auto gradients = [&](const Inputs& of) {
      check::GradientOptions wanted;
      wanted.d_o_dtype = o.dtype;
      return check::make_gradients(of, wanted);
    };
    const Inputs shorter = test::without_rows_behind(inputs);
    GradientBuffers whole = gradients(inputs), alone = gradients(shorter);
    std::memcpy(whole.d_o.data(), alone.d_o.data(), alone.d_o.size());
    std::memset(whole.d_o.data() + alone.d_o.size(), 0xff, whole.d_o.size() - alone.d_o.size());
    whole.d_final_state = alone.d_final_state;
    test::BackwardRun run{.backend = o.keep ? "" : o.backend, .from_bounds = true};
    run.keep_chunks = o.keep;
    test::run_backward(inputs, &whole, run);
    test::run_backward(shorter, &alone, run);
    const auto found = test::gradient_outputs(whole), expected = test::gradient_outputs(alone);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::string name = check::kGradientNames[i];
      const bool of_tokens = i < 5;
      if (of_tokens)
        expect_rows(*found[i], *expected[i], inputs.problem.num_tokens, inputs.cu_seqlens.back(),
                    name);
      else
        EXPECT_TRUE(test::same_bits(*found[i], *expected[i])) << name;
    }
  }
}

/// Gradients with gaps between their rows and elements: these keep what they held.
TEST_F(ZeroRows, OfStridedGradients) {
  const Inputs inputs = padded({"recurrent", DType::kFloat32, 33, 7}, {40, 0, 60, 33});
  GradientBuffers dense = test::gradients_in_fp32(inputs), strided = dense;
  const Problem& p = inputs.problem;
  test::restride_gradients(p, &strided);
  test::run_backward(inputs, &dense, {.from_bounds = true});
  test::run_backward(inputs, &strided, {.from_bounds = true});
  GradientBuffers expected = dense;
  test::restride_gradients(p, &expected);
  EXPECT_TRUE(test::same_gradients(strided, expected));
}

/// Offsets that begin behind the first token.
TEST_F(ZeroRows, BeforeTheFirstSequence) {
  for (const char* backend : {"staged", "recurrent"}) {
    Inputs inputs = padded({backend}, {20, 0, 60, 33});
    inputs.cu_seqlens[0] = 5;
    const test::Result result =
        test::run_inputs(inputs, {.plan = test::with_backend(backend), .from_bounds = true});
    EXPECT_TRUE(test::rows_are_zero(result.outputs.o, 113, 0, 5)) << backend;
    EXPECT_TRUE(test::rows_are_zero(result.outputs.o, 113, 80, 113)) << backend;
    EXPECT_FALSE(test::rows_are_zero(result.outputs.o, 113, 5, 6)) << backend;
  }
}

#ifdef KDA_WITH_CUDA

/// A graph is replayed with other lengths, and other rows belong to no sequence.
TEST_F(ZeroRows, InAGraph) {
  for (const Operation operation : {Operation::kForward, Operation::kDecode}) {
    const Options o{operation == Operation::kForward && on_hopper() ? "fused" : ""};
    check::GenerateOptions options = test::shape(0, 2, o.K, o.V);
    options.seq_lens = {3, 1, 7};
    options.dtype = o.dtype;
    const Inputs inputs = check::generate(options);
    Problem p = inputs.problem;
    p.operation = operation;
    check::want_final_state(&p);
    check::Outputs outputs = check::make_outputs(&p, o.dtype);
    Plan plan;
    throw_if_error(make_plan_from_bounds(p, test::device(), test::with_backend(o.backend), &plan));
    Tensors host = inputs.tensors();
    outputs.attach(&host);
    host.cu_seqlens = inputs.cu_seqlens.data();
    check::DeviceTensors memory(plan, host);
    check::DeviceBuffer workspace(plan.workspace_bytes);
    check::DeviceBuffer lengths(4 * sizeof(int64_t)), o_on_device(outputs.o.size());
    Tensors tensors = memory.tensors();
    tensors.cu_seqlens = lengths.data(), tensors.o = o_on_device.data();
    const test::Stream stream;
    const test::Graph graph(stream, [&] {
      throw_if_error(run(plan, tensors, workspace.data(), workspace.size(), stream.stream));
    });
    for (const std::vector<int64_t>& table :
         {std::vector<int64_t>{0, 3, 4, 11}, {0, 3, 4, 4}, {0, 0, 0, 0}, {0, 2, 5, 10}}) {
      lengths.upload(table.data(), 4 * sizeof(int64_t));
      o_on_device.fill(0xff), workspace.fill(0xff);
      check::synchronize_device();
      graph.launch(stream);
      check::synchronize_device();
      o_on_device.download(outputs.o.data(), outputs.o.size());
      for (int64_t t = 0; t < 11; ++t)
        EXPECT_EQ(test::rows_are_zero(outputs.o, 11, t, t + 1), t >= table.back())
            << operation_name(operation) << ": token " << t << " of " << table.back();
    }
  }
}

#endif

}  // namespace
}  // namespace kda
