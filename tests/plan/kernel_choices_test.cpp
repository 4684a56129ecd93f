// SPDX-License-Identifier: Apache-2.0
// Which kernels the staged backward's plans name, and why: a change of each thing that they ask.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "cuda/staged/backward/kernels.hpp"
#include "kda/backward.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

using cuda::staged::BackwardKernels;
using Chains = BackwardKernels::Chains;
using Grad = BackwardKernels::Grad;

struct Call {
  Problem problem;
  Gradients gradients;
  PlanOptions options;
  DeviceFacts device = gpu_facts(132, 90);

  TensorDesc rows(int64_t heads, int64_t columns) const {
    return contiguous(DType::kBFloat16, {1, problem.num_tokens, heads, columns});
  }
  /// Describes tensors by the sizes of the problem; all gradients are wanted.
  void describe() {
    Problem& p = problem;
    p.q = p.k = rows(p.num_heads, p.key_dim);
    p.v = p.o = rows(p.num_value_heads, p.value_dim);
    p.g = rows(p.num_value_heads, p.key_dim);
    p.beta = contiguous(DType::kBFloat16, {1, p.num_tokens, p.num_value_heads});
    p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
    gradients.d_o = gradients.dv = p.v;
    gradients.dq = gradients.dk = p.q;
    gradients.dg = p.g;
    gradients.dbeta = p.beta;
  }
  BackwardPlan plan() const {
    Plan forward;
    throw_if_error(make_plan(problem, {}, device, options, &forward));
    BackwardPlan backward;
    PlanOptions staged;
    staged.backend = "sm80.staged";
    throw_if_error(make_backward_plan(forward, gradients, staged, &backward));
    return backward;
  }
  BackwardKernels kernels() const {
    const BackwardPlan made = plan();
    return cuda::staged::kernels_of(made.plan, made.gradients);
  }
};

/// 8,192 tokens, 64 heads, K = V = 128: all of it is Hopper's, with chains in fp16.
Call usual(int64_t heads = 64, int64_t value_heads = 64, int64_t size = 128) {
  Call call;
  Problem& p = call.problem;
  p.num_tokens = 8192;
  p.num_heads = heads, p.num_value_heads = value_heads;
  p.key_dim = p.value_dim = size;
  p.gate_mode = GateMode::kSoftplus;
  p.beta_mode = BetaMode::kSigmoid;
  p.qk_l2norm = true;
  call.options.context_parallel = SegmentPolicy::kOff;
  call.describe();
  return call;
}

BackwardKernels changed(const std::function<void(Call&)>& change, Call call = usual()) {
  change(call);
  return call.kernels();
}

bool hopper_built() {
  Call call = usual();
  return call.kernels().on_hopper();  // else a build with CUDA and without sm_90a
}

class BackwardChoices : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hopper_built()) GTEST_SKIP() << "no kernels of sm_90a";
  }
};

TEST_F(BackwardChoices, AreHoppersForTheUsualCall) {
  const BackwardKernels kernels = usual().kernels();
  EXPECT_EQ(kernels.chains, Chains::kWgmmaFp16);
  EXPECT_EQ(kernels.grad, Grad::kHopper);
  EXPECT_TRUE(kernels.grad_stores_dv);
  EXPECT_FALSE(kernels.may_fall_back);
}

TEST_F(BackwardChoices, ChainsInFp16NeedBoundsOfFactors) {
  const auto chains = [](const std::function<void(Call&)>& change) {
    return changed(change).chains;
  };
  EXPECT_EQ(chains([](Call& c) { c.problem.qk_l2norm = false; }), Chains::kWgmma);
  EXPECT_EQ(chains([](Call& c) { c.problem.beta_mode = BetaMode::kPlain; }), Chains::kWgmma);
  EXPECT_EQ(chains([](Call& c) { c.problem.scale = 0x1p-9; }), Chains::kWgmma);
  EXPECT_EQ(chains([](Call& c) { c.problem.scale = -0x1p-8; }), Chains::kWgmmaFp16);
  EXPECT_EQ(chains([](Call& c) { c.problem.scale = 17; }), Chains::kWgmma);
  EXPECT_EQ(chains([](Call& c) { c.device = gpu_facts(132, 80); }), Chains::kPortable);
  EXPECT_EQ(usual(64, 64, 64).kernels().chains, Chains::kWgmma);
  EXPECT_TRUE(changed([](Call& c) {
                c.problem.gate_mode = GateMode::kLog;
                c.problem.A_log.reset();
              }).may_fall_back);
  Call cut = usual(2, 2);
  cut.options.context_parallel = SegmentPolicy::kFixed;
  cut.options.num_segments = 4;
  EXPECT_EQ(cut.kernels().chains, Chains::kWgmma);
  EXPECT_TRUE(cut.kernels().one_merge);
}

TEST_F(BackwardChoices, HoppersChunkGradNeedsBf16RowsOf16Bytes) {
  const auto grad = [](const std::function<void(Call&)>& change) { return changed(change).grad; };
  EXPECT_EQ(grad([](Call& c) { c.gradients.dq->dtype = DType::kFloat32; }), Grad::kPortable);
  EXPECT_EQ(grad([](Call& c) { c.gradients.dk->alignment = 8; }), Grad::kPortable);
  EXPECT_EQ(grad([](Call& c) { c.gradients.dq.reset(); }), Grad::kHopper);
  EXPECT_EQ(grad([](Call& c) { c.device = gpu_facts(132, 100); }), Grad::kPortable);
  EXPECT_EQ(usual(64, 64, 64).kernels().grad, Grad::kHopper);
  EXPECT_EQ(usual(32, 64, 64).kernels().grad, Grad::kPortable);
  EXPECT_EQ(usual(32, 64).kernels().grad, Grad::kHopper);
  EXPECT_EQ(usual(64, 64, 32).kernels().grad, Grad::kPortable);
  const auto stores_dv = [](const std::function<void(Call&)>& change) {
    return changed(change).grad_stores_dv;
  };
  EXPECT_FALSE(stores_dv([](Call& c) { c.gradients.dv->dtype = DType::kFloat32; }));
  EXPECT_FALSE(stores_dv([](Call& c) { c.gradients.dv.reset(); }));
  const auto only_dv = [](Call& c) {
    const std::optional<TensorDesc> dv = c.gradients.dv, d_o = c.gradients.d_o;
    c.gradients = {};
    c.gradients.dv = dv, c.gradients.d_o = d_o;
  };
  EXPECT_EQ(grad(only_dv), Grad::kNone);
  EXPECT_FALSE(stores_dv(only_dv));
}

TEST_F(BackwardChoices, HoppersChunkGradTakesGatesOfAnyKind) {
  const auto gates = [](const std::function<void(Call&)>& change, Call call = usual()) {
    const BackwardKernels kernels = changed(change, std::move(call));
    EXPECT_EQ(kernels.grad, Grad::kHopper);
    return kernels.grad_gates;
  };
  using cuda::GradGates;
  EXPECT_EQ(gates([](Call&) {}), GradGates::kTiles);
  EXPECT_EQ(gates([](Call& c) { c.gradients.dg.reset(); }), GradGates::kTiles);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    EXPECT_EQ(gates([&](Call& c) { c.problem.g.dtype = dtype; }), GradGates::kRows);
    EXPECT_EQ(gates([&](Call& c) { c.gradients.dg->dtype = dtype; }), GradGates::kRows);
  }
  EXPECT_EQ(gates([](Call& c) { c.problem.g.alignment = 4; }), GradGates::kRows);
  EXPECT_EQ(gates([](Call& c) {
              c.gradients.dg->strides[1] += 4;
              c.gradients.dg->alignment = 8;
            }),
            GradGates::kRows);
  const auto tiled = [](Call& c) { c.problem.head_map = HeadMap::kTiled; };
  EXPECT_EQ(gates(tiled, usual(8, 16)), GradGates::kRows);
  const auto a_head = [](Call& c) {
    Problem& p = c.problem;
    p.g = head_gates(DType::kFloat32, 1, p.num_tokens, p.num_value_heads);
  };
  EXPECT_EQ(gates(a_head), GradGates::kRows);  // dg has a gradient a channel
  for (const auto& [heads, size] : {std::pair{8, 128}, std::pair{16, 64}})
    EXPECT_EQ(gates(
                  [&](Call& c) {
                    a_head(c), tiled(c);
                    c.gradients.dg = c.problem.g;
                  },
                  usual(heads, 16, size)),
              GradGates::kHead);
}

TEST_F(BackwardChoices, FewLongTurnsAreLeftToThePortableKernel) {
  using cuda::staged::has_units_enough;
  EXPECT_TRUE(has_units_enough(1, 4, 132));
  EXPECT_TRUE(has_units_enough(44, 8, 132));
  EXPECT_FALSE(has_units_enough(43, 8, 132));
  const auto grad = [](int64_t chunks, SegmentPolicy policy, bool invariant) {
    Call call = usual(1, 8);
    call.problem.num_tokens = chunks * 64;
    call.problem.batch_invariant = invariant;
    call.options.context_parallel = policy;
    call.describe();
    return call.kernels().grad;
  };
  EXPECT_EQ(grad(128, SegmentPolicy::kAuto, false), Grad::kHopper);
  EXPECT_EQ(grad(43, SegmentPolicy::kAuto, false), Grad::kPortable);
  // Tokens do not choose a kernel where the rest of a batch may not.
  EXPECT_EQ(grad(43, SegmentPolicy::kAuto, true), Grad::kHopper);
  EXPECT_EQ(grad(43, SegmentPolicy::kOff, false), Grad::kHopper);
}

TEST_F(BackwardChoices, StandInTheTextsOfThePlan) {
  const std::string text = usual().plan().to_text(true);
  for (const char* name :
       {"chunk_intra_fp16", "backward_chains_fp16", "chunk_grad_sm90", "kernels\n"})
    EXPECT_NE(text.find(name), std::string::npos) << name << "\n" << text;
  EXPECT_EQ(text.find("unless"), std::string::npos) << text;
  const auto text_of = [](const std::function<void(Call&)>& change) {
    Call call = usual();
    change(call);
    return call.plan().to_text(true);
  };
  const std::string rows = text_of([](Call& c) { c.problem.g.dtype = DType::kFloat32; });
  EXPECT_NE(rows.find("chunk_grad_sm90, gates by rows"), std::string::npos) << rows;
  EXPECT_NE(rows.find("; g is not of bf16 rows aligned to 16 bytes"), std::string::npos) << rows;
  const std::string a_head = text_of([](Call& c) {
    c.gradients.dg = c.problem.g = head_gates(DType::kFloat32, 1, c.problem.num_tokens, 64);
  });
  EXPECT_NE(a_head.find("chunk_grad_sm90, a gate a head"), std::string::npos) << a_head;
  Call plain = usual();
  plain.problem.beta_mode = BetaMode::kPlain;
  EXPECT_NE(plain.plan().to_text(true).find("bf16: no sigmoid bounds beta"), std::string::npos);
  EXPECT_NE(plain.plan().plan.to_json().find("\"kernel\": \"backward_chains\""), std::string::npos)
      << plain.plan().plan.to_json();
}

/// Every stage of a plan has a kernel, and every kernel a stage.
TEST(PlannedKernels, AreOfTheStagesOfThePlan) {
  for (const int32_t capability : {80, 90, 100})
    for (const SegmentPolicy policy : {SegmentPolicy::kOff, SegmentPolicy::kFixed})
      for (const int64_t size : {64, 128}) {
        Call call = usual(2, 2, size);
        call.device = gpu_facts(132, capability);
        call.options.context_parallel = policy;
        call.options.num_segments = 4;
        const Plan plan = call.plan().plan;
        for (const StagePlan& stage : plan.stages)
          EXPECT_TRUE(std::any_of(plan.kernels.begin(), plan.kernels.end(),
                                  [&](const KernelChoice& k) { return k.stage == stage.name; }))
              << stage.name << "\n"
              << plan.to_text(true);
        for (const KernelChoice& kernel : plan.kernels)
          EXPECT_TRUE(std::any_of(plan.stages.begin(), plan.stages.end(),
                                  [&](const StagePlan& s) { return s.name == kernel.stage; }))
              << kernel.stage << "\n"
              << plan.to_text(true);
      }
}

}  // namespace
}  // namespace kda
