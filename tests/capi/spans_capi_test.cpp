// SPDX-License-Identifier: Apache-2.0
// The C ABI's spans: the bits of the C++ calls, and errors that name what was given.
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kda/kda.h"
#include "support/harness.hpp"

namespace kda {
namespace {

using Floats = std::vector<float>;
constexpr int64_t kTokens = 40, kHeads = 2, kK = 8, kV = 12;

class SpansInC : public testing::Test {
 protected:
  void SetUp() override {
    if (test::on_cuda()) GTEST_SKIP() << "maps of spans are made on the CPU";
    inputs = check::generate(test::shape(kTokens, kHeads, kK, kV));
    const Problem& p = inputs.problem;
    kda_problem_init(&problem);
    problem.gate_mode = static_cast<int32_t>(p.gate_mode);
    problem.beta_mode = static_cast<int32_t>(p.beta_mode);
    problem.qk_l2norm = p.qk_l2norm;
    problem.lower_bound = p.lower_bound;
    problem.num_tokens = kTokens;
    problem.num_heads = problem.num_value_heads = kHeads;
    problem.key_dim = kK;
    problem.value_dim = kV;
    o = Floats(kTokens * kHeads * kV);
    const auto describe = [](kda_tensor* target, void* data, std::vector<int64_t> shape) {
      ASSERT_EQ(kda_tensor_contiguous(target, data, KDA_FP32, static_cast<int32_t>(shape.size()),
                                      shape.data()),
                KDA_OK);
    };
    describe(&problem.q, inputs.q.data(), {1, kTokens, kHeads, kK});
    describe(&problem.k, inputs.k.data(), {1, kTokens, kHeads, kK});
    describe(&problem.v, inputs.v.data(), {1, kTokens, kHeads, kV});
    describe(&problem.g, inputs.g.data(), {1, kTokens, kHeads, kK});
    describe(&problem.beta, inputs.beta.data(), {1, kTokens, kHeads});
    describe(&problem.o, o.data(), {1, kTokens, kHeads, kV});
    if (p.A_log) describe(&problem.A_log, inputs.A_log.data(), {kHeads});
    if (p.dt_bias) describe(&problem.dt_bias, inputs.dt_bias.data(), {kHeads, kK});
    kda_plan* raw = nullptr;
    ASSERT_EQ(kda_plan_create(&problem, nullptr, nullptr, &raw), KDA_OK) << kda_last_error();
    plan.reset(raw);
    workspace = io::Buffer(kda_plan_workspace_bytes(raw));
    maps.struct_size = sizeof(maps);
    maps.M = M.data();
    maps.B = B.data();
    fold.struct_size = sizeof(fold);
    fold.num_value_heads = kHeads;
    fold.key_dim = kK;
    fold.value_dim = kV;
    fold.num_maps = fold.num_states = 1;
    fold.map_stride = kHeads * kK * kV;
    fold.M = M.data();
    fold.A = B.data();
    fold.states = state.data();
    fold.num_steps = 1;
    fold.steps = &step;
  }

  kda_status map() {
    return kda_span_maps(plan.get(), &problem, &maps, workspace.data(), workspace.size());
  }

  struct Destroy {
    void operator()(kda_plan* p) const { kda_plan_destroy(p); }
  };
  check::Inputs inputs;
  kda_problem problem;
  std::unique_ptr<kda_plan, Destroy> plan;
  io::Buffer workspace;
  Floats o, M = Floats(kHeads * kK * kK), B = Floats(kHeads * kK * kV), state = B;
  kda_maps maps{};
  kda_fold fold{};
  kda_fold_step step{KDA_FOLD_ZERO, 0, 0};
};

TEST_F(SpansInC, FoldFromZeroIsTheFinalState) {
  ASSERT_EQ(map(), KDA_OK) << kda_last_error();
  ASSERT_EQ(kda_fold_states(&fold), KDA_OK) << kda_last_error();
  EXPECT_EQ(state, B);
  const test::Result run = test::run_inputs(inputs);
  EXPECT_TRUE(std::equal(B.begin(), B.end(), run.outputs.final_state.as<float>()));
}

TEST_F(SpansInC, DComesWithM) {
  Floats D(B.size());
  maps.D = D.data();
  maps.d_o = o.data();
  maps.d_o_dtype = KDA_FP32;
  o.assign(o.size(), 1);
  ASSERT_EQ(map(), KDA_OK) << kda_last_error();
  EXPECT_NE(D, Floats(B.size()));
  maps.M = nullptr;
  EXPECT_EQ(map(), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "M: pointer is null, and D needs M");
}

TEST_F(SpansInC, HalvesSayWhatIsWrong) {
  const auto begin = [&] {
    return kda_span_begin(plan.get(), &problem, &maps, workspace.data(), workspace.size());
  };
  EXPECT_EQ(begin(), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "plan: was made without spans in its options");
  EXPECT_EQ(kda_span_finish(plan.get(), &problem, M.data(), workspace.data(), workspace.size()),
            KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "plan: was made without spans in its options");
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.spans = 1;
  kda_plan* raw = nullptr;
  EXPECT_EQ(kda_plan_create(&problem, nullptr, &options, &raw), KDA_UNSUPPORTED);
  EXPECT_NE(std::string(kda_last_error()).find("has no forward in two phases"), std::string::npos);
  EXPECT_EQ(raw, nullptr);
}

TEST_F(SpansInC, FoldOfEarlierCallersAndInRows) {
  ASSERT_EQ(map(), KDA_OK) << kda_last_error();
  fold.maps_per_row = -1;  // behind what an earlier struct has
  fold.struct_size = offsetof(kda_fold, maps_per_row);
  ASSERT_EQ(kda_fold_states(&fold), KDA_OK) << kda_last_error();
  EXPECT_EQ(state, B);
  fold.struct_size = sizeof(fold);
  EXPECT_EQ(kda_fold_states(&fold), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "maps_per_row = -1 is negative");
  fold.maps_per_row = 1;
  fold.row_stride = fold.map_stride;
  state.assign(state.size(), 0);
  ASSERT_EQ(kda_fold_states(&fold), KDA_OK) << kda_last_error();
  EXPECT_EQ(state, B);
  fold.device_kind = 7;
  EXPECT_EQ(kda_fold_states(&fold), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "device_kind: value 7 is unknown");
}

TEST_F(SpansInC, HalvesOfABackwardSayWhatIsWrong) {
  kda_gradients gradients{};
  gradients.struct_size = sizeof(gradients);
  Floats d_state(B.size());
  const std::vector<int64_t> rows = {1, kTokens, kHeads, kV}, states = {1, kHeads, kK, kV};
  const auto describe = [](kda_tensor* target, Floats* data, const std::vector<int64_t>& shape) {
    return kda_tensor_contiguous(target, data->data(), KDA_FP32, 4, shape.data());
  };
  ASSERT_EQ(describe(&gradients.d_o, &o, rows), KDA_OK);
  ASSERT_EQ(describe(&gradients.dv, &o, rows), KDA_OK);
  ASSERT_EQ(describe(&gradients.d_final_state, &d_state, states), KDA_OK);
  kda_backward_plan* raw = nullptr;
  ASSERT_EQ(kda_backward_plan_create(plan.get(), &gradients, nullptr, &raw), KDA_OK)
      << kda_last_error();
  const auto begin = [&](const kda_backward_plan* of) {
    return kda_span_backward_begin(of, &problem, &gradients, nullptr, 0, nullptr, 0);
  };
  EXPECT_EQ(begin(raw), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "plan: was made without spans in its options");
  EXPECT_EQ(kda_span_backward_finish(raw, &problem, &gradients, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "plan: was made without spans in its options");
  EXPECT_EQ(begin(nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "plan: is null");
  using Call =
      std::function<kda_status(const kda_backward_plan*, const kda_problem*, const kda_gradients*)>;
  const std::vector<Call> calls = {[](const auto* of, const auto* p, const auto* g) {
                                     return kda_backward(of, p, g, nullptr, 0);
                                   },
                                   [](const auto* of, const auto* p, const auto* g) {
                                     return kda_span_backward_begin(of, p, g, nullptr, 0, nullptr,
                                                                    0);
                                   },
                                   [](const auto* of, const auto* p, const auto* g) {
                                     return kda_span_backward_finish(of, p, g, nullptr, 0);
                                   }};
  for (const Call& call : calls) {
    EXPECT_EQ(call(nullptr, &problem, &gradients), KDA_INVALID_ARGUMENT);
    EXPECT_STREQ(kda_last_error(), "plan: is null");
    EXPECT_EQ(call(raw, nullptr, &gradients), KDA_INVALID_ARGUMENT);
    EXPECT_STREQ(kda_last_error(), "problem: is null");
    EXPECT_EQ(call(raw, &problem, nullptr), KDA_INVALID_ARGUMENT);
    EXPECT_STREQ(kda_last_error(), "gradients: is null");
    kda_problem other = problem;
    other.num_tokens += 1;
    EXPECT_EQ(call(raw, &other, &gradients), KDA_INVALID_ARGUMENT);
    kda_gradients more = gradients;
    more.d_o = kda_tensor{};
    EXPECT_EQ(call(raw, &problem, &more), KDA_INVALID_ARGUMENT);
  }
  kda_backward_plan_destroy(raw);
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.spans = 1;
  EXPECT_EQ(kda_backward_plan_create(plan.get(), &gradients, &options, &raw), KDA_UNSUPPORTED);
  EXPECT_NE(std::string(kda_last_error()).find("has no backward in two phases"), std::string::npos);
}

TEST_F(SpansInC, SaysWhatIsWrong) {
  EXPECT_EQ(kda_span_maps(plan.get(), &problem, nullptr, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "maps: is null");
  EXPECT_EQ(kda_span_maps(nullptr, &problem, &maps, nullptr, 0), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_fold_states(nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "fold: is null");
  fold.steps = nullptr;
  EXPECT_EQ(kda_fold_states(&fold), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "steps: pointer is null");
  fold.num_steps = -1;
  EXPECT_EQ(kda_fold_states(&fold), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "num_steps = -1 is negative");
  fold.struct_size = 3;
  EXPECT_EQ(kda_fold_states(&fold), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("struct_size = 3"), std::string::npos);
}

}  // namespace
}  // namespace kda
