// SPDX-License-Identifier: Apache-2.0
// The C ABI's backward: the bits of the C++ call, and errors that name what was given.
#include <gtest/gtest.h>

#include <cstring>

#include "kda/kda.h"
#include "support/backward.hpp"

namespace kda {
namespace {

kda_tensor tensor(const std::optional<TensorDesc>& desc, void* data) {
  kda_tensor c{};
  if (!desc) return c;
  c.data = data;
  c.dtype = static_cast<int32_t>(desc->dtype);
  c.alignment = desc->alignment;
  for (std::size_t i = 0; i < 4; ++i) c.strides[i] = desc->strides[i];
  return c;
}

class BackwardInC : public testing::Test {
 protected:
  explicit BackwardInC(DType dtype = DType::kFloat32) {
    check::GenerateOptions options = test::shape(150, 2, 24, 16);
    options.dtype = dtype;
    options.num_value_heads = 4;
    options.initial_state = true;
    inputs = check::generate(options);
    buffers = check::make_gradients(inputs, {.d_o_dtype = dtype});
    const Problem& p = inputs.problem;
    kda_problem_init(&problem);
    problem.gate_mode = static_cast<int32_t>(p.gate_mode);
    problem.beta_mode = static_cast<int32_t>(p.beta_mode);
    problem.qk_l2norm = p.qk_l2norm;
    problem.num_tokens = p.num_tokens;
    problem.num_heads = p.num_heads;
    problem.num_value_heads = p.num_value_heads;
    problem.key_dim = p.key_dim;
    problem.value_dim = p.value_dim;
    problem.q = tensor(p.q, inputs.q.data());
    problem.k = tensor(p.k, inputs.k.data());
    problem.v = tensor(p.v, inputs.v.data());
    problem.g = tensor(p.g, inputs.g.data());
    problem.beta = tensor(p.beta, inputs.beta.data());
    o = io::Buffer(inputs.v.size());
    problem.o = tensor(p.o, o.data());
    problem.A_log = tensor(p.A_log, inputs.A_log.data());
    problem.dt_bias = tensor(p.dt_bias, inputs.dt_bias.data());
    problem.lower_bound = p.lower_bound;
    problem.initial_state.tensor = tensor(p.initial_state->tensor, inputs.initial_state.data());
    problem.initial_state.num_slots = 1;
    const Gradients& g = buffers.gradients;
    gradients.struct_size = sizeof(gradients);
    gradients.d_o = tensor(g.d_o, buffers.d_o.data());
    gradients.d_final_state = tensor(g.d_final_state, buffers.d_final_state.data());
    gradients.dq = tensor(g.dq, buffers.dq.data());
    gradients.dk = tensor(g.dk, buffers.dk.data());
    gradients.dv = tensor(g.dv, buffers.dv.data());
    gradients.dg = tensor(g.dg, buffers.dg.data());
    gradients.dbeta = tensor(g.dbeta, buffers.dbeta.data());
    gradients.dA_log = tensor(g.dA_log, buffers.dA_log.data());
    gradients.ddt_bias = tensor(g.ddt_bias, buffers.ddt_bias.data());
    gradients.d_initial_state = tensor(g.d_initial_state, buffers.d_initial_state.data());
    kda_plan_options_init(&options_);
    options_.keep = 64;
  }
  ~BackwardInC() override {
    kda_plan_destroy(forward);
    kda_backward_plan_destroy(plan);
  }

  check::Inputs inputs;
  check::GradientBuffers buffers;
  io::Buffer o;
  kda_problem problem;
  kda_gradients gradients{};
  kda_plan_options options_;
  kda_plan* forward = nullptr;
  kda_backward_plan* plan = nullptr;
};

TEST_F(BackwardInC, HasTheBitsOfTheCppCall) {
  ASSERT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_OK) << kda_last_error();
  io::Buffer saved(kda_plan_saved_bytes(forward));
  EXPECT_GT(saved.size(), 2u * 4 * 24 * 16 * 4);
  problem.saved = saved.data();
  problem.saved_bytes = saved.size();
  io::Buffer room(kda_plan_workspace_bytes(forward));
  ASSERT_EQ(kda_run(forward, &problem, room.data(), room.size()), KDA_OK) << kda_last_error();
  ASSERT_EQ(kda_backward_plan_create(forward, &gradients, nullptr, &plan), KDA_OK)
      << kda_last_error();
  io::Buffer workspace(kda_backward_plan_workspace_bytes(plan));
  ASSERT_EQ(kda_backward(plan, &problem, &gradients, workspace.data(), workspace.size()), KDA_OK)
      << kda_last_error();
  check::GradientBuffers expected = check::make_gradients(inputs);
  test::run_backward(inputs, &expected, {.kept_every = 64});
  EXPECT_TRUE(test::same_gradients(expected, buffers));
}

TEST_F(BackwardInC, RefusesWithTheNameOfTheArgument) {
  EXPECT_EQ(kda_backward_plan_create(nullptr, &gradients, nullptr, &plan), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "forward: is null");
  ASSERT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_OK);
  EXPECT_EQ(kda_backward_plan_create(forward, nullptr, nullptr, &plan), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_backward_plan_create(forward, &gradients, nullptr, nullptr), KDA_INVALID_ARGUMENT);
  kda_gradients none{};
  none.struct_size = sizeof(none);
  EXPECT_EQ(kda_backward_plan_create(forward, &none, nullptr, &plan), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kda_last_error(), "d_o, d_final_state"), nullptr) << kda_last_error();
  none.struct_size = 3;
  EXPECT_EQ(kda_backward_plan_create(forward, &none, nullptr, &plan), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  ASSERT_EQ(kda_backward_plan_create(forward, &gradients, nullptr, &plan), KDA_OK);
  EXPECT_EQ(kda_backward(nullptr, &problem, &gradients, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_backward(plan, &problem, &gradients, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kda_last_error(), "workspace: is null"), nullptr) << kda_last_error();
  io::Buffer workspace(kda_backward_plan_workspace_bytes(plan));
  EXPECT_EQ(kda_backward(plan, &problem, &gradients, workspace.data(), workspace.size()),
            KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kda_last_error(), "saved: is null"), nullptr) << kda_last_error();
  options_.keep = 100;
  kda_plan* other = nullptr;
  EXPECT_EQ(kda_plan_create(&problem, nullptr, &options_, &other), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kda_last_error(), "kept_state_every: 100"), nullptr) << kda_last_error();
}

/// What a call gives counts: a gradient that the plan was made without would come back unwritten.
TEST_F(BackwardInC, RefusesGradientsThatThePlanIsWithout) {
  options_.keep = 0;
  ASSERT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_OK) << kda_last_error();
  kda_gradients few{};
  few.struct_size = sizeof(few);
  few.d_o = gradients.d_o;
  few.dq = gradients.dq;
  ASSERT_EQ(kda_backward_plan_create(forward, &few, nullptr, &plan), KDA_OK) << kda_last_error();
  io::Buffer workspace(kda_backward_plan_workspace_bytes(plan));
  const check::GradientBuffers before = buffers;
  const auto call = [&](const kda_gradients& given) {
    return kda_backward(plan, &problem, &given, workspace.data(), workspace.size());
  };
  kda_gradients more = few;
  more.dk = gradients.dk;
  EXPECT_EQ(call(more), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "dk: given, but the plan was made without it");
  more = few;
  more.d_final_state = gradients.d_final_state;
  EXPECT_EQ(call(more), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "d_final_state: given, but the plan was made without it");
  EXPECT_TRUE(test::same_gradients(before, buffers));
  EXPECT_EQ(call(few), KDA_OK) << kda_last_error();
}

static_assert(KDA_FP64 == static_cast<int>(DType::kFloat64));

class Float64InC : public BackwardInC {
 protected:
  Float64InC() : BackwardInC(DType::kFloat64) {}
};

TEST_F(Float64InC, HasTheBitsOfTheCppCall) {
  ASSERT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_OK) << kda_last_error();
  EXPECT_STREQ(kda_plan_implementation(forward), "cpu.oracle");
  EXPECT_EQ(kda_plan_saved_bytes(forward), 0u);
  ASSERT_EQ(kda_run(forward, &problem, nullptr, 0), KDA_OK) << kda_last_error();
  const test::Result run = test::run_inputs(inputs, {.out_dtype = DType::kFloat64});
  EXPECT_TRUE(test::same_bits(run.outputs.o, o));
  ASSERT_EQ(kda_backward_plan_create(forward, &gradients, nullptr, &plan), KDA_OK)
      << kda_last_error();
  ASSERT_EQ(kda_backward(plan, &problem, &gradients, nullptr, 0), KDA_OK) << kda_last_error();
  check::GradientBuffers expected = check::make_gradients(inputs, {.d_o_dtype = DType::kFloat64});
  test::run_backward(inputs, &expected);
  EXPECT_TRUE(test::same_gradients(expected, buffers));
}

TEST_F(Float64InC, IsRefusedByOtherBackendsAndOnAGpu) {
  const char* only = "q: dtype fp64, only backend oracle computes it, on the CPU";
  options_.backend = "blocked";
  EXPECT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_UNAVAILABLE);
  EXPECT_NE(std::strstr(kda_last_error(), only), nullptr) << kda_last_error();
  options_.backend = nullptr;
  options_.device_kind = KDA_CUDA;
  EXPECT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_UNSUPPORTED);
  EXPECT_STREQ(kda_last_error(), only);
  EXPECT_EQ(kda_supported(&problem, &options_), KDA_UNSUPPORTED);
  EXPECT_STREQ(kda_last_error(), only);
  EXPECT_EQ(forward, nullptr);
  options_.device_kind = KDA_CPU;
  ASSERT_EQ(kda_plan_create(&problem, nullptr, &options_, &forward), KDA_OK);
  options_.backend = "blocked";
  EXPECT_EQ(kda_backward_plan_create(forward, &gradients, &options_, &plan), KDA_UNAVAILABLE);
  EXPECT_NE(std::strstr(kda_last_error(), only), nullptr) << kda_last_error();
  problem.q.alignment = 4;
  kda_plan* other = nullptr;
  EXPECT_EQ(kda_plan_create(&problem, nullptr, nullptr, &other), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "q: alignment 4 is below the 8 bytes of fp64");
}

}  // namespace
}  // namespace kda
