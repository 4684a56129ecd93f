// SPDX-License-Identifier: Apache-2.0
// Calls without a plan, in C and in C++: the bits of planned calls, from many threads, with plans
// and memory that stay bounded; and descriptions of tensors in a line.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "kda/kda.h"
#include "support/harness.hpp"

namespace kda {
namespace {

constexpr int64_t kHeads = 2, kValueHeads = 4, kKey = 16, kValue = 24;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Sequences of the given lengths, packed, in C.
struct CCall {
  check::Inputs inputs;
  kda_problem problem;
  std::vector<float> o, final_state;

  explicit CCall(std::vector<int64_t> lengths, uint64_t seed = 0) {
    check::GenerateOptions options = test::shape(0, kHeads, kKey, kValue);
    options.num_value_heads = kValueHeads;
    options.seq_lens = lengths;
    options.seed = seed;
    options.initial_state = true;
    inputs = check::generate(options);
    const int64_t sequences = static_cast<int64_t>(lengths.size());
    kda_problem_init(&problem);
    problem.num_tokens = inputs.cu_seqlens.back();
    problem.num_heads = kHeads;
    problem.num_value_heads = kValueHeads;
    problem.key_dim = kKey;
    problem.value_dim = kValue;
    problem.num_sequences = sequences;
    problem.has_cu_seqlens = 1;
    problem.cu_seqlens_dtype = KDA_INT64;
    problem.gate_mode = KDA_GATE_BOUNDED;
    problem.beta_mode = KDA_BETA_SIGMOID;
    problem.qk_l2norm = 1;
    o.assign(static_cast<std::size_t>(problem.num_tokens * kValueHeads * kValue), kNaN);
    final_state.assign(static_cast<std::size_t>(sequences * kValueHeads * kKey * kValue), kNaN);
    const kda_rows rows = {inputs.q.data(), inputs.k.data(),    inputs.v.data(),
                           inputs.g.data(), inputs.beta.data(), o.data()};
    EXPECT_EQ(kda_tokens(&problem, KDA_FP32, &rows), KDA_OK) << kda_last_error();
    const int64_t heads[] = {kValueHeads}, bias[] = {kValueHeads, kKey};
    kda_tensor_contiguous(&problem.A_log, inputs.A_log.data(), KDA_FP32, 1, heads);
    kda_tensor_contiguous(&problem.dt_bias, inputs.dt_bias.data(), KDA_FP32, 2, bias);
    kda_states(&problem, &problem.initial_state, inputs.initial_state.data(), KDA_FP32, sequences,
               nullptr);
    kda_states(&problem, &problem.final_state, final_state.data(), KDA_FP32, sequences, nullptr);
  }
  const int64_t* ends() const { return inputs.cu_seqlens.data(); }
  bool has_the_bits_of(const test::Result& expected) const {
    return std::memcmp(o.data(), expected.outputs.o.data(), expected.outputs.o.size()) == 0 &&
           std::memcmp(final_state.data(), expected.outputs.final_state.data(),
                       expected.outputs.final_state.size()) == 0;
  }
};

TEST(CallCApi, TheBitsOfAPlannedCall) {
  CCall call({100, 0, 33});
  const test::Result expected = test::run_inputs(call.inputs);
  ASSERT_EQ(kda_call(&call.problem, call.ends()), KDA_OK) << kda_last_error();
  EXPECT_TRUE(call.has_the_bits_of(expected));
  // Again, with a workspace that is there; then from bounds, with lengths that the call reads.
  for (const int64_t* ends : {call.ends(), static_cast<const int64_t*>(nullptr)}) {
    std::fill(call.o.begin(), call.o.end(), kNaN);
    call.problem.cu_seqlens = ends ? nullptr : call.ends();
    ASSERT_EQ(kda_call(&call.problem, ends), KDA_OK) << kda_last_error();
    EXPECT_TRUE(call.has_the_bits_of(expected));
  }
}

TEST(CallCApi, ThreadsCallAtOnce) {
  const std::vector<std::vector<int64_t>> lengths = {{70}, {3, 200}, {64, 64, 1}, {129}};
  std::vector<test::Result> expected;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    expected.push_back(test::run_inputs(CCall(lengths[i], i).inputs));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < lengths.size(); ++first)
    threads.emplace_back([&, first] {
      for (std::size_t turn = 0; turn < 40; ++turn) {
        const std::size_t i = (first + turn) % lengths.size();
        CCall call(lengths[i], i);
        if (kda_call(&call.problem, call.ends()) != KDA_OK || !call.has_the_bits_of(expected[i]))
          ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(CallCApi, RememberedPlansAreBounded) {
  for (int64_t tokens = 1; tokens <= 300; ++tokens) {
    CCall call({tokens});
    ASSERT_EQ(kda_call(&call.problem, call.ends()), KDA_OK) << kda_last_error();
  }
  EXPECT_EQ(shared_plans().size(), 256u);
}

TEST(CallCApi, OnADeviceTheBytesComeFirst) {
  CCall call({100, 33});
  const test::Result expected = test::run_inputs(call.inputs);
  for (const bool with_options : {false, true}) {
    kda_plan_options options;
    kda_plan_options_init(&options);
    options.num_threads = 1;
    const kda_plan_options* given = with_options ? &options : nullptr;
    std::size_t bytes = 0;
    ASSERT_EQ(kda_call_on(&call.problem, call.ends(), given, nullptr, &bytes), KDA_OK);
    EXPECT_GT(bytes, 0u);
    EXPECT_TRUE(std::isnan(call.o[0])) << "nothing runs without a workspace";
    io::Buffer workspace(bytes);
    ASSERT_EQ(kda_call_on(&call.problem, call.ends(), given, workspace.data(), &bytes), KDA_OK)
        << kda_last_error();
    EXPECT_TRUE(call.has_the_bits_of(expected));
    std::fill(call.o.begin(), call.o.end(), kNaN);
    std::size_t few = bytes - 64;
    EXPECT_EQ(kda_call_on(&call.problem, call.ends(), given, workspace.data(), &few),
              KDA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(kda_last_error()).rfind("workspace", 0), 0u) << kda_last_error();
    EXPECT_TRUE(std::isnan(call.o[0]));
  }
  EXPECT_EQ(kda_call_on(&call.problem, call.ends(), nullptr, nullptr, nullptr),
            KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "workspace_bytes: is null");
}

TEST(CallCApi, ACallThatNeedsNoWorkspaceStillTellsItsBytes) {
  CCall call({0});
  std::size_t bytes = 0;
  ASSERT_EQ(kda_call_on(&call.problem, call.ends(), nullptr, nullptr, &bytes), KDA_OK);
  EXPECT_GE(bytes, 64u);
}

TEST(CallCApi, RefusalsWriteNothing) {
  CCall call({10});
  const int64_t wrong[] = {0, 11};
  EXPECT_EQ(kda_call(&call.problem, wrong), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("cu_seqlens"), std::string::npos);
  call.problem.q.data = nullptr;
  EXPECT_EQ(kda_call(&call.problem, call.ends()), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "q: pointer is null");
  EXPECT_EQ(kda_call(nullptr, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "problem: is null");
  for (const float x : call.o) ASSERT_TRUE(std::isnan(x));
}

TEST(CallCApi, StatesFollowTheLayoutOfTheProblem) {
  kda_problem p;
  kda_problem_init(&p);
  p.num_value_heads = 3;
  p.key_dim = 16;
  p.value_dim = 24;
  const int32_t slots[] = {1};
  float memory[1];
  ASSERT_EQ(kda_states(&p, &p.initial_state, memory, KDA_FP32, 5, slots), KDA_OK);
  EXPECT_EQ(p.initial_state.tensor.strides[2], 24);
  EXPECT_EQ(p.initial_state.tensor.strides[0], 3 * 16 * 24);
  EXPECT_EQ(p.initial_state.num_slots, 5);
  EXPECT_EQ(p.initial_state.indices, slots);
  EXPECT_EQ(p.initial_state.indexed, 1);
  p.state_layout = KDA_STATE_VK;
  ASSERT_EQ(kda_states(&p, &p.final_state, memory, KDA_BF16, 2, nullptr), KDA_OK);
  EXPECT_EQ(p.final_state.tensor.strides[2], 16);
  EXPECT_EQ(p.final_state.tensor.dtype, KDA_BF16);
  EXPECT_EQ(p.final_state.indexed, 0);
  EXPECT_EQ(p.final_state.present, 1);

  Problem cpp;
  cpp.num_value_heads = 3;
  cpp.key_dim = 16;
  cpp.value_dim = 24;
  EXPECT_EQ(states(cpp, DType::kFloat32, 5).tensor.strides[2], 24);
  cpp.state_layout = StateLayout::kVK;
  const StateDesc desc = states(cpp, DType::kBFloat16, 5, true);
  EXPECT_EQ(desc.tensor.strides[2], 16);
  EXPECT_EQ(desc.num_slots, 5);
  EXPECT_TRUE(desc.indexed);
}

TEST(CallCApi, DescriptionsNameWhatIsWrongAndLeaveTheProblem) {
  kda_problem p;
  kda_problem_init(&p);
  const kda_problem before = p;
  const kda_rows rows = {};
  const auto refused = [&](kda_status status, const char* text) {
    EXPECT_EQ(status, KDA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(kda_last_error()).rfind(text, 0), 0u) << kda_last_error();
  };
  refused(kda_tokens(nullptr, KDA_FP32, &rows), "problem: is null");
  refused(kda_tokens(&p, KDA_FP32, nullptr), "rows: is null");
  refused(kda_states(&p, nullptr, nullptr, KDA_FP32, 1, nullptr), "state: is null");
  refused(kda_states(nullptr, &p.initial_state, nullptr, KDA_FP32, 1, nullptr), "problem: is null");
  refused(kda_states(&p, &p.initial_state, nullptr, KDA_FP32, -1, nullptr),
          "num_slots: -1 is negative");
  EXPECT_EQ(std::memcmp(&p, &before, sizeof(p)), 0);
  p.num_tokens = -3;
  const kda_problem negative = p;
  refused(kda_tokens(&p, KDA_FP32, &rows), "num_tokens: -3 is negative");
  EXPECT_EQ(std::memcmp(&p, &negative, sizeof(p)), 0);
  p.num_tokens = std::numeric_limits<int64_t>::max();
  const kda_problem huge = p;
  refused(kda_tokens(&p, KDA_FP32, &rows), "shape: its size overflows");
  EXPECT_EQ(std::memcmp(&p, &huge, sizeof(p)), 0);
  p.struct_size = 0;
  refused(kda_tokens(&p, KDA_FP32, &rows), "problem: struct_size = 0 is no size of this struct");
}

TEST(Call, ForwardAndDecodeOfCpp) {
  check::GenerateOptions options = test::shape(20, kHeads, kKey, kValue);
  options.num_value_heads = kValueHeads;
  options.initial_state = true;
  check::Inputs inputs = check::generate(options);
  const test::Result expected = test::run_inputs(inputs);
  check::Outputs outputs = expected.outputs;
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  Workspace workspace;
  Problem problem = expected.problem;
  problem.operation = Operation::kDecode;  // the function says what is computed
  for (int turn = 0; turn < 2; ++turn) {
    std::memset(outputs.o.data(), 0xff, outputs.o.size());
    throw_if_error(forward(problem, tensors, workspace));
    EXPECT_TRUE(test::same_bits(outputs.o, expected.outputs.o));
    EXPECT_TRUE(test::same_bits(outputs.final_state, expected.outputs.final_state));
  }
  EXPECT_GE(workspace.size(), expected.plan.workspace_bytes);

  check::Inputs step = test::slice(inputs, 0, 3);
  step.problem.operation = Operation::kDecode;
  check::Inputs pool = step;
  const test::Result after = test::run_inputs(step, {.final_state = false});
  Tensors of_step = pool.tensors();
  io::Buffer o(after.outputs.o.size());
  of_step.o = o.data();
  problem = after.problem;
  problem.operation = Operation::kForward;
  throw_if_error(decode(problem, of_step, workspace));
  EXPECT_TRUE(test::same_bits(o, after.outputs.o));
  EXPECT_FALSE(test::same_bits(pool.initial_state, inputs.initial_state));

  inputs.problem.key_dim = 300;
  EXPECT_EQ(forward(inputs.problem, tensors, workspace).code(), StatusCode::kInvalidArgument);
}

TEST(Call, LengthsOfCppComeAsThoseOfAPlan) {
  CCall call({40, 7});
  const test::Result expected = test::run_inputs(call.inputs);
  check::Outputs outputs = expected.outputs;
  Tensors tensors = call.inputs.tensors();
  outputs.attach(&tensors);
  Workspace workspace;
  Problem problem = expected.problem;
  problem.cu_seqlens = DType::kInt64;
  for (const bool bounds : {false, true}) {
    tensors.cu_seqlens = bounds ? call.ends() : nullptr;
    std::memset(outputs.o.data(), 0xff, outputs.o.size());
    std::span<const int64_t> lengths = call.inputs.cu_seqlens;
    throw_if_error(forward(problem, tensors, workspace, bounds ? lengths.first(0) : lengths,
                           test::with_threads(1)));
    EXPECT_TRUE(test::same_bits(outputs.o, expected.outputs.o));
  }
}

TEST(Call, AWorkspaceGrowsAndMoves) {
  Workspace a;
  EXPECT_EQ(a.data(), nullptr);
  throw_if_error(a.reserve(100));
  void* const start = a.data();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(start) % kWorkspaceAlignment, 0u);
  EXPECT_EQ(a.size(), 128u);
  throw_if_error(a.reserve(70));
  EXPECT_EQ(a.data(), start);
  Workspace b = std::move(a);
  EXPECT_EQ(b.data(), start);
  EXPECT_EQ(a.size(), 0u);  // NOLINT(bugprone-use-after-move): what is left is empty
  Workspace c;
  throw_if_error(c.reserve(64));
  c = std::move(b);
  EXPECT_EQ(c.data(), start);
  std::vector<std::size_t> too_many = {std::numeric_limits<std::size_t>::max()};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they end the process
  too_many.push_back(std::size_t{1} << 60);
#endif
  for (const std::size_t bytes : too_many) {
    const Status status = c.reserve(bytes);
    EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
    EXPECT_EQ(status.message().rfind("workspace: ", 0), 0u) << status.message();
    EXPECT_EQ(c.data(), nullptr);
    EXPECT_EQ(c.size(), 0u);
  }
}

}  // namespace
}  // namespace kda
