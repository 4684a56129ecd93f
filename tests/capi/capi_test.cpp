// SPDX-License-Identifier: Apache-2.0
// The C ABI gives the bits of the C++ API, and refuses what it must. (C itself: c_test.c.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <thread>

#include "kda/kda.h"
#include "support/harness.hpp"

namespace kda {
namespace {

struct CCall {
  check::Inputs inputs;
  kda_problem problem;
  std::vector<float> o, final_state;

  CCall() {
    check::GenerateOptions options = test::shape(0, 2, 16, 24);
    options.seq_lens = {100, 33};
    options.num_value_heads = 4;
    inputs = check::generate(options);
    o.resize(133 * 4 * 24);
    final_state.resize(2 * 4 * 16 * 24);
    kda_problem_init(&problem);
    problem.num_tokens = 133;
    problem.num_heads = 2;
    problem.num_value_heads = 4;
    problem.key_dim = 16;
    problem.value_dim = 24;
    problem.num_sequences = 2;
    problem.has_cu_seqlens = 1;
    problem.cu_seqlens_dtype = KDA_INT64;
    problem.gate_mode = KDA_GATE_BOUNDED;
    problem.beta_mode = KDA_BETA_SIGMOID;
    problem.qk_l2norm = 1;
    set(problem.q, inputs.q, {1, 133, 2, 16});
    set(problem.k, inputs.k, {1, 133, 2, 16});
    set(problem.v, inputs.v, {1, 133, 4, 24});
    set(problem.g, inputs.g, {1, 133, 4, 16});
    set(problem.beta, inputs.beta, {1, 133, 4});
    set(problem.A_log, inputs.A_log, {4});
    set(problem.dt_bias, inputs.dt_bias, {4, 16});
    const int64_t rows[] = {1, 133, 4, 24}, states[] = {2, 4, 16, 24};
    kda_tensor_contiguous(&problem.o, o.data(), KDA_FP32, 4, rows);
    kda_tensor_contiguous(&problem.final_state.tensor, final_state.data(), KDA_FP32, 4, states);
    problem.final_state.present = 1;
    problem.final_state.num_slots = 2;
  }

  kda_plan* plan() {
    kda_plan* made = nullptr;
    const bool lengths = problem.has_cu_seqlens || problem.cu_seqlens;
    EXPECT_EQ(
        kda_plan_create(&problem, lengths ? inputs.cu_seqlens.data() : nullptr, nullptr, &made),
        KDA_OK)
        << kda_last_error();
    return made;
  }
  void run() {
    kda_plan* made = plan();
    io::Buffer workspace(kda_plan_workspace_bytes(made));
    EXPECT_EQ(kda_run(made, &problem, workspace.data(), workspace.size()), KDA_OK)
        << kda_last_error();
    kda_plan_destroy(made);
  }

  static void set(kda_tensor& tensor, const io::Buffer& buffer, std::vector<int64_t> shape) {
    ASSERT_EQ(kda_tensor_contiguous(&tensor, const_cast<std::byte*>(buffer.data()), KDA_FP32,
                                    static_cast<int32_t>(shape.size()), shape.data()),
              KDA_OK);
  }
};

TEST(CApi, SameBitsAsCpp) {
  CCall call;
  kda_plan* plan = nullptr;
  ASSERT_EQ(kda_validate(&call.problem), KDA_OK);
  ASSERT_EQ(kda_plan_create(&call.problem, call.inputs.cu_seqlens.data(), nullptr, &plan), KDA_OK)
      << kda_last_error();
  io::Buffer workspace(kda_plan_workspace_bytes(plan));
  ASSERT_EQ(kda_run(plan, &call.problem, workspace.data(), workspace.size()), KDA_OK)
      << kda_last_error();
  const test::Result expected = test::run_inputs(call.inputs);
  EXPECT_EQ(std::memcmp(call.o.data(), expected.outputs.o.data(), expected.outputs.o.size()), 0);
  EXPECT_EQ(std::memcmp(call.final_state.data(), expected.outputs.final_state.data(),
                        expected.outputs.final_state.size()),
            0);
  EXPECT_EQ(std::string(kda_plan_implementation(plan)), expected.plan.implementation);
  EXPECT_EQ(kda_plan_num_segments(plan), 0);
  EXPECT_EQ(std::string(kda_plan_json(plan)).front(), '{');
  kda_plan_destroy(plan);
}

TEST(CApi, OneGateAHeadAndTiledHeads) {
  CCall call;
  test::keep_one_gate(&call.inputs);
  call.inputs.problem.head_map = HeadMap::kTiled;
  kda_tensor& g = call.problem.g;
  g.data = call.inputs.g.data();
  const int64_t strides[] = {133 * 4, 4, 1, 0};
  std::copy(strides, strides + 4, g.strides);
  g.alignment = 0;  // the largest that the strides keep
  call.problem.head_map = KDA_HEADS_TILED;
  call.run();
  const test::Result expected = test::run_inputs(call.inputs);
  EXPECT_EQ(std::memcmp(call.o.data(), expected.outputs.o.data(), expected.outputs.o.size()), 0);
  call.problem.head_map = 2;
  EXPECT_EQ(kda_validate(&call.problem), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "head_map: value 2 is unknown");
}

TEST(CApi, OneBiasAHead) {
  CCall call;
  ASSERT_TRUE(call.inputs.problem.dt_bias);
  test::keep_one_gate(&call.inputs);
  test::keep_one_bias(&call.inputs);
  kda_tensor &g = call.problem.g, &dt_bias = call.problem.dt_bias;
  g.data = call.inputs.g.data();
  dt_bias.data = call.inputs.dt_bias.data();
  const int64_t strides[] = {133 * 4, 4, 1, 0};
  std::copy(strides, strides + 4, g.strides);
  std::copy(strides + 2, strides + 4, dt_bias.strides);
  g.alignment = dt_bias.alignment = 0;
  call.run();
  const test::Result expected = test::run_inputs(call.inputs);
  EXPECT_EQ(std::memcmp(call.o.data(), expected.outputs.o.data(), expected.outputs.o.size()), 0);
  g.strides[3] = 1;
  EXPECT_EQ(kda_validate(&call.problem), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "dt_bias: innermost stride is 0, but g has a gate a channel");
}

TEST(CApi, SegmentsAndStages) {
  CCall call;
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.context_parallel = KDA_CP_FIXED;
  options.num_segments = 2;
  options.num_threads = 1;
  options.backend = "blocked";
  const test::Result expected = test::run_inputs(call.inputs, {.plan = test::fixed_segments(2)});
  for (const int32_t one_pass : {0, 1}) {
    options.one_pass = one_pass;
    kda_plan* plan = nullptr;
    ASSERT_EQ(kda_plan_create(&call.problem, call.inputs.cu_seqlens.data(), &options, &plan),
              KDA_OK);
    const auto segments = static_cast<std::size_t>(kda_plan_num_segments(plan));
    ASSERT_EQ(segments, 3u);
    io::Buffer workspace(kda_plan_workspace_bytes(plan));
    std::vector<float> M(segments * 4 * 16 * 16), B(segments * 4 * 16 * 24), states(B.size());
    kda_segments stage{sizeof(kda_segments), M.data(), B.data(), states.data()};
    for (const auto call_stage : {kda_segment_scan, kda_segment_merge, kda_segment_forward})
      ASSERT_EQ(call_stage(plan, &call.problem, &stage, workspace.data(), workspace.size()), KDA_OK)
          << kda_last_error();
    EXPECT_EQ(std::memcmp(call.o.data(), expected.outputs.o.data(), expected.outputs.o.size()), 0);
    kda_plan_destroy(plan);
  }
}

TEST(CApi, PlansForGpusAndFromBounds) {
  CCall call;
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.device_kind = KDA_CUDA;
  EXPECT_EQ(kda_supported(&call.problem, nullptr), KDA_OK);
  options.compute_capability = 75;
  EXPECT_EQ(kda_supported(&call.problem, &options), KDA_UNSUPPORTED);
  EXPECT_NE(std::string(kda_last_error()).find("runs on cpu"), std::string::npos);
  options.compute_capability = 90;
  EXPECT_EQ(kda_supported(&call.problem, &options), KDA_OK);
  kda_plan* plan = nullptr;
  ASSERT_EQ(kda_plan_create(&call.problem, call.inputs.cu_seqlens.data(), &options, &plan), KDA_OK);
  EXPECT_STREQ(kda_plan_implementation(plan), "cuda.smxx.recurrent");
  EXPECT_EQ(kda_run(plan, &call.problem, nullptr, 0),
            kda::cuda_device_count() == 0 ? KDA_UNAVAILABLE : KDA_INVALID_ARGUMENT);
  kda_plan_destroy(plan);

  ASSERT_EQ(kda_plan_create(&call.problem, nullptr, nullptr, &plan), KDA_OK);
  io::Buffer workspace(kda_plan_workspace_bytes(plan));
  call.problem.cu_seqlens = call.inputs.cu_seqlens.data();
  EXPECT_EQ(kda_run(plan, &call.problem, workspace.data(), workspace.size()), KDA_OK);
  kda_plan_destroy(plan);
}

TEST(CApi, OptionsSayWhatACardHas) {
  CCall call;
  const auto planned = [&](const kda_plan_options& options) -> std::string {
    kda_plan* plan = nullptr;
    if (kda_plan_create(&call.problem, call.inputs.cu_seqlens.data(), &options, &plan) != KDA_OK)
      return kda_last_error();
    std::string text = kda_plan_json(plan);
    kda_plan_destroy(plan);
    return text;
  };
  const auto text_of = [&](int32_t capability, double rate, double clock) {
    kda_plan_options options;
    kda_plan_options_init(&options);
    options.device_kind = KDA_CUDA;
    options.num_sms = 108, options.compute_capability = capability;
    options.memory_bytes_per_second = rate, options.gigahertz = clock;
    return planned(options);
  };
  EXPECT_NE(text_of(80, 0, 0).find("\"gigahertz\": 1.4"), std::string::npos) << text_of(80, 0, 0);
  const std::string given = text_of(80, 1.5e12, 1.25);
  EXPECT_NE(given.find("\"memory_bytes_per_second\": 1500000000000"), std::string::npos) << given;
  EXPECT_NE(given.find("\"gigahertz\": 1.25"), std::string::npos) << given;
  EXPECT_EQ(text_of(80, -1, 0),
            "device: memory_bytes_per_second = -1 is neither 0 nor in 1e6..1e18");
  EXPECT_EQ(text_of(80, 0, -1), "device: gigahertz = -1 is neither 0 nor in 0.001..1000");

  // Options that were filled for a card: a plan for the CPU does not read what they say of it.
  kda_plan_options options;
  kda_plan_options_init(&options);
  const std::string unset = planned(options);
  options.num_sms = 108, options.compute_capability = 80;
  options.memory_bytes_per_second = 1.5e12, options.gigahertz = 1.25;
  EXPECT_EQ(planned(options), unset);
}

TEST(CApi, OlderCallersStructsAreSmaller) {
  CCall call;
  // A caller that knew fewer fields: the tail keeps its defaults.
  call.problem.struct_size = offsetof(kda_problem, state_index_columns);
  call.problem.state_index_columns = -77;  // beyond what that caller declared
  EXPECT_EQ(kda_validate(&call.problem), KDA_OK) << kda_last_error();
}

/// Fields of a later version are refused unless they are zero.
TEST(CApi, NewerCallersStructsAreLarger) {
  struct Newer {
    kda_problem known;
    int64_t unknown[3];
  };
  CCall call;
  Newer newer{call.problem, {}};
  newer.known.struct_size = sizeof newer;
  EXPECT_EQ(kda_validate(&newer.known), KDA_OK) << kda_last_error();
  newer.unknown[2] = 1;
  EXPECT_EQ(kda_validate(&newer.known), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("is of a newer version"), std::string::npos)
      << kda_last_error();

  struct {
    kda_plan_options known;
    int64_t unknown;
  } options{};
  options.known.struct_size = sizeof options;
  EXPECT_EQ(kda_supported(&call.problem, &options.known), KDA_OK) << kda_last_error();
  options.unknown = 1;
  EXPECT_EQ(kda_supported(&call.problem, &options.known), KDA_INVALID_ARGUMENT);
}

/// The exported function of that name serves programs that were built before first_slot.
TEST(CApi, InitWritesNoMoreThanTheCallersStruct) {
  struct {
    kda_problem problem;
    int64_t behind;
  } memory;
  for (const std::size_t size : {offsetof(kda_problem, first_slot), sizeof(kda_problem),
                                 sizeof(kda_problem) + sizeof(int64_t)}) {
    std::memset(static_cast<void*>(&memory), 0xee, sizeof memory);
    if (size == offsetof(kda_problem, first_slot))
      (kda_problem_init)(&memory.problem);
    else
      kda_problem_init_size(&memory.problem, size);
    EXPECT_EQ(memory.problem.struct_size, size);
    EXPECT_EQ(memory.problem.key_dim, 128);
    const auto* bytes = reinterpret_cast<const unsigned char*>(&memory);
    for (std::size_t i = size; i < sizeof memory; ++i) ASSERT_EQ(bytes[i], 0xee) << i;
    for (std::size_t i = offsetof(kda_problem, first_slot); i < size; ++i) ASSERT_EQ(bytes[i], 0);
  }
}

/// The same of options, whose last members are spans and reserved.
TEST(CApi, OptionsInitWritesNoMoreThanTheCallersStruct) {
  struct {
    kda_plan_options options;
    int64_t behind;
  } memory;
  const std::size_t older = offsetof(kda_plan_options, spans);
  for (const std::size_t size :
       {older, offsetof(kda_plan_options, memory_bytes_per_second), sizeof(kda_plan_options)}) {
    std::memset(static_cast<void*>(&memory), 0xee, sizeof memory);
    if (size == older)
      (kda_plan_options_init)(&memory.options);
    else
      kda_plan_options_init_size(&memory.options, size);
    EXPECT_EQ(memory.options.struct_size, size);
    const auto* bytes = reinterpret_cast<const unsigned char*>(&memory);
    for (std::size_t i = sizeof(std::size_t); i < size; ++i) ASSERT_EQ(bytes[i], 0) << i;
    for (std::size_t i = size; i < sizeof memory; ++i) ASSERT_EQ(bytes[i], 0xee) << i;
  }
}

TEST(CApi, AnOlderCallerHasNoFirstSlot) {
  CCall call;
  const int32_t slots[] = {0, 1};
  call.problem.final_state.indices = slots;
  call.problem.struct_size = offsetof(kda_problem, first_slot);
  call.problem.first_slot = 1;  // beyond what that caller declared
  call.run();
  const test::Result expected = test::run_inputs(call.inputs);
  EXPECT_EQ(std::memcmp(call.final_state.data(), expected.outputs.final_state.data(),
                        expected.outputs.final_state.size()),
            0);
  std::vector<float> before = call.final_state;
  call.problem.struct_size = sizeof(kda_problem);
  std::fill_n(call.final_state.begin(), before.size() / 2, 7.0f);
  std::fill_n(before.begin(), before.size() / 2, 7.0f);
  call.run();
  EXPECT_EQ(call.final_state, before) << "slot 0 is below first_slot";
}

/// What is given is used: the flags are for planning without it.
TEST(CApi, WhatIsGivenCountsWithoutItsFlag) {
  CCall with, without;
  std::vector<float> initial(with.final_state.size());
  for (std::size_t i = 0; i < initial.size(); ++i) initial[i] = static_cast<float>(i % 13) - 6;
  const int64_t states[] = {2, 4, 16, 24};
  const int32_t slots[] = {1, 0};
  const uint8_t mask[] = {1, 0};
  for (CCall* call : {&with, &without}) {
    kda_problem& p = call->problem;
    const int32_t flag = call == &with;
    kda_tensor_contiguous(&p.initial_state.tensor, initial.data(), KDA_FP32, 4, states);
    p.initial_state.num_slots = 2;
    p.initial_state.indices = slots;
    p.initial_state_mask = mask;
    p.cu_seqlens = call->inputs.cu_seqlens.data();
    p.scale = 0.5;
    p.initial_state.present = p.final_state.present = p.initial_state.indexed = flag;
    p.has_scale = p.has_initial_state_mask = p.has_cu_seqlens = flag;
    call->run();
  }
  EXPECT_EQ(with.o, without.o);
  EXPECT_EQ(with.final_state, without.final_state);
  CCall plain;
  plain.run();
  EXPECT_NE(with.o, plain.o);
}

TEST(CApi, DecodeCountsAcceptedTokensThatAreGiven) {
  CCall call;
  kda_problem& p = call.problem;
  p.operation = KDA_DECODE;
  p.num_tokens = 1;
  p.num_sequences = 1;
  p.has_cu_seqlens = 0;
  p.final_state = {};
  const int64_t states[] = {2, 4, 16, 24};
  kda_tensor_contiguous(&p.initial_state.tensor, call.final_state.data(), KDA_FP32, 4, states);
  const int32_t slots[] = {0, 1}, accepted[] = {2};
  p.initial_state.num_slots = 2;
  p.initial_state.indices = slots;
  p.state_index_columns = 2;
  p.num_accepted_tokens = accepted;
  std::fill_n(call.final_state.begin(), call.final_state.size() / 2, NAN);  // slot 0 is not read
  std::fill(call.final_state.begin() + 4 * 16 * 24, call.final_state.end(), 0.0f);
  call.run();
  for (int i = 0; i < 4 * 24; ++i) ASSERT_TRUE(std::isfinite(call.o[static_cast<std::size_t>(i)]));
}

/// One checkpoint a sequence, of the second one after 32 of its tokens: as of every 32.
TEST(CApi, CheckpointsAtOffsets) {
  CCall call;
  kda_problem& p = call.problem;
  std::vector<float> every(4 * 4 * 16 * 24), at(2 * 4 * 16 * 24);
  const int64_t shape[] = {4, 4, 16, 24}, one_each[] = {2, 4, 16, 24};
  kda_tensor_contiguous(&p.checkpoints.tensor, every.data(), KDA_FP32, 4, shape);
  p.checkpoints.num_slots = 4;
  p.checkpoint_every = 32;
  call.run();
  const int32_t offsets[] = {0, 32}, slots[] = {1, 0};
  kda_tensor_contiguous(&p.checkpoints.tensor, at.data(), KDA_FP32, 4, one_each);
  p.checkpoints.num_slots = 2;
  p.checkpoints.indices = slots;
  p.checkpoint_offsets = offsets;
  call.run();
  constexpr std::ptrdiff_t kState = 4 * 16 * 24;
  EXPECT_TRUE(std::equal(at.begin(), at.begin() + kState, every.begin() + 3 * kState));
  EXPECT_TRUE(std::all_of(at.begin() + kState, at.end(), [](float x) { return x == 0; }));
}

/// Two drafts behind one token: the states after them go to slots of final_state.
TEST(CApi, TreesOfDrafts) {
  CCall call;
  kda_problem& p = call.problem;
  p.operation = KDA_DECODE;
  p.num_tokens = 3;
  p.num_sequences = 1;
  p.has_cu_seqlens = 0;
  const int64_t shape[] = {3, 4, 16, 24};
  std::vector<float> drafts(3 * 4 * 16 * 24), chain = drafts;
  p.final_state = {};
  kda_tensor_contiguous(&p.final_state.tensor, drafts.data(), KDA_FP32, 4, shape);
  const int32_t slots[] = {0, 1, 2}, parents[] = {-1, 0, 0};
  p.final_state.num_slots = 3;
  p.final_state.indices = slots;
  p.state_index_columns = 3;
  p.token_parents = parents;
  call.run();
  const std::vector<float> of_tree = call.o;
  p.token_parents = nullptr;
  p.final_state.tensor.data = chain.data();
  call.run();
  const auto equal = [&](std::size_t token) {
    return std::equal(of_tree.begin() + static_cast<std::ptrdiff_t>(token * 96),
                      of_tree.begin() + static_cast<std::ptrdiff_t>((token + 1) * 96),
                      call.o.begin() + static_cast<std::ptrdiff_t>(token * 96));
  };
  EXPECT_TRUE(equal(0) && equal(1));
  EXPECT_FALSE(equal(2));  // it follows the first token, not the second
  constexpr std::ptrdiff_t kState = 4 * 16 * 24;
  EXPECT_TRUE(std::equal(drafts.begin(), drafts.begin() + 2 * kState, chain.begin()));
  EXPECT_FALSE(std::equal(drafts.begin() + 2 * kState, drafts.end(), chain.begin() + 2 * kState));
}

/// A call that gives more than its plan was made for is refused: it would be left out.
TEST(CApi, WhatThePlanDoesNotHaveIsRefused) {
  const int32_t slots[] = {0, 1};
  const uint8_t mask[] = {1, 1};
  const struct {
    const char* message;
    void (*change)(kda_problem&, const int32_t*, const uint8_t*);
  } rows[] = {
      {"initial_state: given, but the plan was made without it",
       [](kda_problem& p, const int32_t*, const uint8_t*) { p.initial_state = p.final_state; }},
      {"checkpoints: given", [](kda_problem& p, const int32_t*,
                                const uint8_t*) { p.checkpoints.tensor.data = p.o.data; }},
      {"final_state_indices: given", [](kda_problem& p, const int32_t* indices,
                                        const uint8_t*) { p.final_state.indices = indices; }},
      {"initial_state_mask: given",
       [](kda_problem& p, const int32_t*, const uint8_t* given) { p.initial_state_mask = given; }},
      {"num_accepted_tokens: given", [](kda_problem& p, const int32_t* indices,
                                        const uint8_t*) { p.num_accepted_tokens = indices; }},
      {"checkpoint_offsets: given", [](kda_problem& p, const int32_t* indices,
                                       const uint8_t*) { p.checkpoint_offsets = indices; }},
      {"token_parents: given",
       [](kda_problem& p, const int32_t* indices, const uint8_t*) { p.token_parents = indices; }},
  };
  for (const auto& row : rows) {
    CCall call;
    kda_plan* plan = call.plan();
    row.change(call.problem, slots, mask);
    EXPECT_EQ(kda_run(plan, &call.problem, nullptr, 0), KDA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(kda_last_error()).find(row.message), 0u) << kda_last_error();
    kda_plan_destroy(plan);
  }
  CCall call;
  call.problem.gate_mode = KDA_GATE_LOG;
  const kda_tensor A_log = call.problem.A_log, dt_bias = call.problem.dt_bias;
  call.problem.A_log = call.problem.dt_bias = {};
  kda_plan* plan = call.plan();
  call.problem.A_log = A_log;
  EXPECT_EQ(kda_run(plan, &call.problem, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "A_log: given, but the plan was made without it");
  call.problem.A_log = {};
  call.problem.dt_bias.data = dt_bias.data;
  EXPECT_EQ(kda_run(plan, &call.problem, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "dt_bias: given, but the plan was made without it");
  kda_plan_destroy(plan);
}

TEST(CApi, TensorsThatWereNeverDescribedAreRefused) {
  for (kda_tensor kda_problem::*member :
       {&kda_problem::q, &kda_problem::k, &kda_problem::v, &kda_problem::g, &kda_problem::beta,
        &kda_problem::o, &kda_problem::A_log, &kda_problem::dt_bias}) {
    CCall call;
    void* data = (call.problem.*member).data;
    call.problem.*member = {};
    (call.problem.*member).data = data;
    EXPECT_EQ(kda_validate(&call.problem), KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find(": was never described"), std::string::npos)
        << kda_last_error();
  }
  CCall call;  // one step size for all tokens
  call.problem.beta = {};
  call.problem.beta.alignment = 4;
  EXPECT_EQ(kda_validate(&call.problem), KDA_OK) << kda_last_error();
}

TEST(CApi, RefusesWithAMessage) {
  CCall call;
  kda_plan* plan = nullptr;
  const auto create = [&](const kda_plan_options* options = nullptr) {
    return kda_plan_create(&call.problem, call.inputs.cu_seqlens.data(), options, &plan);
  };
  const auto expect = [](kda_status status, const char* message) {
    EXPECT_EQ(status, KDA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(kda_last_error()).find(message), std::string::npos) << kda_last_error();
  };
  expect(kda_validate(nullptr), "problem: is null");
  expect(kda_plan_create(nullptr, nullptr, nullptr, &plan), "problem: is null");
  expect(kda_plan_create(&call.problem, nullptr, nullptr, nullptr), "plan: is null");
  expect(kda_run(nullptr, &call.problem, nullptr, 0), "plan: is null");
  for (const std::size_t size : {std::size_t{0}, std::size_t{3}, SIZE_MAX}) {
    call.problem.struct_size = size;
    expect(kda_validate(&call.problem), "struct_size");
  }
  call.problem.struct_size = sizeof(kda_problem);
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.struct_size = 1;
  expect(create(&options), "struct_size");
  kda_plan_options_init(&options);
  options.device_kind = 5;
  expect(create(&options), "device_kind");
  kda_plan_options_init(&options);
  options.num_threads = -1;
  expect(create(&options), "num_threads");
  kda_plan_options_init(&options);
  options.backend = "no-such";
  EXPECT_EQ(create(&options), KDA_UNAVAILABLE);
  call.problem.q.strides[1] = INT64_MAX;
  expect(create(), "q: stride");
  EXPECT_EQ(plan, nullptr);
  call = CCall();
  call.problem.q.dtype = 99;
  expect(create(), "q: dtype");
  call = CCall();
  call.problem.key_dim = 0;
  expect(create(), "key_dim");
  kda_tensor tensor;
  const int64_t shape[] = {2, 3};
  const int64_t bad_shape[] = {2, -3};
  const int64_t huge_shape[] = {INT64_MAX, 3};
  expect(kda_tensor_contiguous(nullptr, nullptr, KDA_FP32, 2, shape), "tensor: is null");
  expect(kda_tensor_contiguous(&tensor, nullptr, KDA_FP32, 2, nullptr), "shape: is null");
  expect(kda_tensor_contiguous(&tensor, nullptr, KDA_FP32, 5, shape), "rank: 5");
  expect(kda_tensor_contiguous(&tensor, nullptr, KDA_FP32, 0, shape), "rank: 0");
  expect(kda_tensor_contiguous(&tensor, nullptr, KDA_FP32, 2, bad_shape), "negative");
  expect(kda_tensor_contiguous(&tensor, nullptr, KDA_FP32, 2, huge_shape), "overflows");
  call = CCall();
  ASSERT_EQ(create(), KDA_OK);
  kda_segments segments{0, nullptr, nullptr, nullptr};
  expect(kda_segment_scan(nullptr, &call.problem, &segments, nullptr, 0), "plan: is null");
  expect(kda_segment_merge(plan, &call.problem, &segments, nullptr, 0), "struct_size");
  expect(kda_segment_forward(plan, &call.problem, nullptr, nullptr, 0), "segments: is null");
  expect(kda_run(plan, nullptr, nullptr, 0), "problem: is null");
  expect(kda_run(plan, &call.problem, nullptr, 0), "workspace: is null");
  kda_plan_destroy(plan);
}

TEST(CApi, NullsThatAreHarmless) {
  kda_problem_init(nullptr);
  kda_plan_options_init(nullptr);
  kda_plan_destroy(nullptr);
  EXPECT_EQ(kda_plan_workspace_bytes(nullptr), 0u);
  EXPECT_EQ(kda_plan_num_segments(nullptr), 0);
  EXPECT_STREQ(kda_plan_json(nullptr), "");
  EXPECT_STREQ(kda_plan_implementation(nullptr), "");
  EXPECT_STREQ(kda_version(), KDA_VERSION_STRING);
  EXPECT_STREQ(kda_status_name(KDA_UNAVAILABLE), "unavailable");
}

TEST(CApi, ErrorsBelongToTheirThread) {
  ASSERT_EQ(kda_validate(nullptr), KDA_INVALID_ARGUMENT);
  std::string seen = "unset";
  std::thread([&] { seen = kda_last_error(); }).join();
  EXPECT_EQ(seen, "");
}

TEST(CApi, MisalignedPointersLowerTheirOwnAlignment) {
  CCall call;
  std::vector<float> shifted(133 * 2 * 16 + 1);
  std::memcpy(shifted.data() + 1, call.inputs.q.data(), call.inputs.q.size());
  call.problem.q.data = shifted.data() + 1;
  kda_plan* plan = nullptr;
  ASSERT_EQ(kda_plan_create(&call.problem, call.inputs.cu_seqlens.data(), nullptr, &plan), KDA_OK);
  io::Buffer workspace(kda_plan_workspace_bytes(plan));
  EXPECT_EQ(kda_run(plan, &call.problem, workspace.data(), workspace.size()), KDA_OK)
      << kda_last_error();
  kda_plan_destroy(plan);
}

/// Bindings build both structs from this list: it must be in their order.
TEST(Capi, StageBuffersAreListedInOrder) {
  const std::pair<const char*, std::size_t> fields[] = {
      {"w", offsetof(kda_stages, w)},         {"u", offsetof(kda_stages, u)},
      {"kg", offsetof(kda_stages, kg)},       {"qg", offsetof(kda_stages, qg)},
      {"Aqk", offsetof(kda_stages, Aqk)},     {"T", offsetof(kda_stages, T)},
      {"gamma", offsetof(kda_stages, gamma)}, {"beta", offsetof(kda_stages, beta)},
      {"diag", offsetof(kda_stages, diag)},   {"h", offsetof(kda_stages, h)},
      {"vn", offsetof(kda_stages, vn)}};
  std::istringstream names(kda_stage_buffers());
  std::string name;
  std::size_t at = offsetof(kda_stages, w);
  for (const auto& [field, offset] : fields) {
    ASSERT_TRUE(names >> name);
    EXPECT_EQ(name, field);
    EXPECT_EQ(offset, at) << field;
    at += sizeof(void*);
  }
  EXPECT_FALSE(names >> name);
}

}  // namespace
}  // namespace kda
