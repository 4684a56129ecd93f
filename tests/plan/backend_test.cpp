// SPDX-License-Identifier: Apache-2.0
// A backend from outside: a row that a test brings plans for itself, keeps a block between two
// calls and runs.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "plan/builder.hpp"
#include "plan/ledger.hpp"
#include "plan/planner.hpp"
#include "run/run_rows.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

constexpr const char* kScratch = "fake_scratch";
constexpr const char* kStates = "fake_states";
constexpr std::size_t kStateBytes = 100;

void plan_fake(plan::PlanBuilder& builder) {
  builder.cut(
      {.automatic = [](const plan::Workload&, CostEstimate*) { return plan::uncut("fake: never"); },
       .unit = 32});
  builder.join("");
  builder.stage("forward", builder.problem().num_tokens, "one token a task");
  builder.book(kScratch, 3, 64);
  builder.save(kStates, 2, kStateBytes);
}

/// Writes what it is given where the plan says.
Status forward_fake(const stage::Forward& forward) {
  const stage::Call& call = forward.call;
  std::memset(plan::find_block(*call.plan, call.workspace, kScratch), 1, 192);
  std::memset(plan::find_block(call.plan->saved, call.tensors.saved, kStates), 2, 2 * kStateBytes);
  return {};
}

const char* available() noexcept { return nullptr; }

std::string decline_long(const Problem& p) {
  return p.num_tokens > 100 ? "more than 100 tokens" : "";
}

constexpr registry::ForwardRow fake_row(void (*plan)(plan::PlanBuilder&)) {
  return {.head = {.name = "cpu.fake",
                   .device = DeviceKind::kCpu,
                   .chunk_size = 32,
                   .unavailable = available,
                   .plan = plan,
                   .decline = decline_long},
          .forward = forward_fake,
          .segments = {},
          .chunk_stages = {}};
}

const registry::ForwardRow kFake = fake_row(plan_fake);
const registry::ForwardRow* const kRows[] = {&kFake};
const registry::Head* const kHeads[] = {&kFake.head};

Status plan_for(const Problem& p, std::span<const registry::Head* const> heads,
                const PlanOptions& options, Plan* plan) {
  const std::span<const int64_t> none;
  return plan::plan_with(heads, p, &none, cpu_facts(), options, plan);
}

class FakeBackend : public testing::Test {
 protected:
  void SetUp() override {
    inputs_ = check::generate(test::shape(70, 1, 16, 16));
    outputs_ = check::make_outputs(&inputs_.problem, DType::kFloat32);
    tensors_ = inputs_.tensors();
    outputs_.attach(&tensors_);
    ASSERT_TRUE(plan_for(inputs_.problem, kHeads, test::fixed_segments(2), &plan_).ok());
    workspace_ = io::Buffer(plan_.workspace_bytes);
    saved_ = io::Buffer(plan_.saved_bytes + kWorkspaceAlignment);
    tensors_.saved = saved_.data();
    tensors_.saved_bytes = plan_.saved_bytes;
  }
  Status run_it() {
    return run_rows::forward(kRows, plan_, tensors_, workspace_.data(), workspace_.size(), nullptr);
  }

  check::Inputs inputs_;
  check::Outputs outputs_;
  Tensors tensors_;
  Plan plan_;
  io::Buffer workspace_, saved_;
};

TEST_F(FakeBackend, PlansForItself) {
  EXPECT_EQ(plan_.implementation, "cpu.fake");
  EXPECT_EQ(plan_.chunk_size, 32);
  ASSERT_EQ(plan_.segments.size(), 2u);
  EXPECT_EQ(plan_.segments[0].end, 64);  // fixed counts chunks of 64 tokens
  ASSERT_EQ(plan_.stages.size(), 1u);
  EXPECT_EQ(plan_.stages[0].what, "one token a task");
  ASSERT_EQ(plan_.workspace.size(), 1u);
  EXPECT_EQ(plan_.workspace[0].bytes, 192u);
}

TEST_F(FakeBackend, SavedBlocksAreSizedAndPrinted) {
  ASSERT_EQ(plan_.saved.size(), 1u);
  EXPECT_EQ(plan_.saved[0].name, kStates);
  EXPECT_EQ(plan_.saved[0].offset, 0u);
  EXPECT_EQ(plan_.saved_bytes, 256u);  // 200, aligned
  EXPECT_NE(plan_.to_text().find("saved           256 B\n  fake_states"), std::string::npos)
      << plan_.to_text();
  const nlohmann::json json = nlohmann::json::parse(plan_.to_json());
  EXPECT_EQ(json["saved_bytes"], 256);
  EXPECT_EQ(json["saved"][0]["name"], kStates);
}

TEST_F(FakeBackend, RunsOnTheCallersBlocks) {
  plan_.segmented = false;
  ASSERT_TRUE(run_it().ok()) << run_it().message();
  EXPECT_EQ(saved_.as<unsigned char>()[2 * kStateBytes - 1], 2);
  EXPECT_EQ(workspace_.as<unsigned char>()[191], 1);
}

TEST_F(FakeBackend, SavedMemoryIsChecked) {
  plan_.segmented = false;
  tensors_.saved = nullptr;
  EXPECT_EQ(run_it().message(), "saved: is null, needs 256 bytes");
  tensors_.saved = saved_.data();
  tensors_.saved_bytes = 255;
  EXPECT_EQ(run_it().message(), "saved: has 255 bytes, needs 256");
  tensors_.saved = saved_.data() + 8;
  tensors_.saved_bytes = 256;
  EXPECT_EQ(run_it().message(), "saved: is not aligned to 64 bytes");
}

TEST_F(FakeBackend, WhatWasAskedForStaysBesideWhatCameOfIt) {
  PlanOptions options = test::fixed_segments(4, SegmentMethod::kOnePass);
  options.backend = "fake";
  Plan plan;
  const registry::ForwardRow declines = fake_row([](plan::PlanBuilder& builder) {
    plan_fake(builder);
    builder.drop_segments();
  });
  const registry::Head* const heads[] = {&declines.head};
  ASSERT_TRUE(plan_for(inputs_.problem, heads, options, &plan).ok());
  EXPECT_EQ(plan.requested.context_parallel, SegmentPolicy::kFixed);
  EXPECT_EQ(plan.requested.num_segments, 4);
  EXPECT_EQ(plan.requested.backend, "fake");
  EXPECT_EQ(plan.resolved.context_parallel, SegmentPolicy::kOff);
  EXPECT_EQ(plan.resolved.num_segments, 0);
  EXPECT_EQ(plan.resolved.backend, "cpu.fake");
  EXPECT_GE(plan.resolved.num_threads, 1);
}

TEST_F(FakeBackend, ABlockIsBookedOnce) {
  Plan plan;
  for (const auto twice : {+[](plan::PlanBuilder& builder) { builder.book(kStates, 1, 1); },
                           +[](plan::PlanBuilder& builder) { builder.save(kScratch, 1, 1); }}) {
    static void (*again)(plan::PlanBuilder&) = nullptr;
    again = twice;
    const registry::ForwardRow row = fake_row([](plan::PlanBuilder& builder) {
      plan_fake(builder);
      again(builder);
    });
    const registry::Head* const heads[] = {&row.head};
    const Status status = plan_for(inputs_.problem, heads, {}, &plan);
    EXPECT_EQ(status.code(), StatusCode::kInternal);
    EXPECT_NE(status.message().find("is booked twice"), std::string::npos) << status.message();
  }
}

TEST_F(FakeBackend, SizesThatOverflowAreRefused) {
  Plan plan;
  const registry::ForwardRow row =
      fake_row([](plan::PlanBuilder& builder) { builder.save(kStates, std::size_t{1} << 62, 4); });
  const registry::Head* const heads[] = {&row.head};
  EXPECT_EQ(plan_for(inputs_.problem, heads, {}, &plan).message(), "saved: more than 2^62 bytes");
}

TEST_F(FakeBackend, DeclinesWithItsReason) {
  const check::Inputs inputs = check::generate(test::shape(101, 1, 16, 16));
  Plan plan;
  ASSERT_TRUE(plan_for(inputs.problem, kHeads, {}, &plan).ok());
  EXPECT_TRUE(plan.implementation.empty());
  EXPECT_EQ(plan.candidates[0].reason, "more than 100 tokens");
  PlanOptions options;
  options.backend = "fake";
  EXPECT_EQ(plan_for(inputs.problem, kHeads, options, &plan).message(),
            "backend: cpu.fake cannot serve: more than 100 tokens");
}

/// Operations have lists of their own.
TEST(Registry, StagedDoesNotDecode) {
  Problem p;
  p.operation = Operation::kDecode;
  p.num_tokens = 1;
  p.q = p.k = p.v = p.g = p.o = contiguous(DType::kBFloat16, {1, 1, 1, 128});
  p.beta = contiguous(DType::kBFloat16, {1, 1, 1});
  StateDesc pool;
  pool.num_slots = 1;
  pool.tensor = contiguous(DType::kFloat32, {1, 1, 128, 128});
  p.initial_state = pool;
  Plan plan;
  const Status status = make_plan(p, {}, gpu_facts(132), test::with_backend("staged"), &plan);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "backend: cuda.sm80.staged cannot serve: it has no decode");
  ASSERT_TRUE(make_plan(p, {}, gpu_facts(132), {}, &plan).ok());
  for (const Candidate& row : plan.candidates) EXPECT_NE(row.name, "cuda.sm80.staged");
}

TEST(Registry, HeadsAreThoseOfTheRows) {
  const auto heads = registry::heads(Operation::kDecode);
  const auto rows = registry::decode_rows();
  ASSERT_EQ(heads.size(), rows.size());
  for (std::size_t i = 0; i < heads.size(); ++i) EXPECT_EQ(heads[i], &rows[i]->head);
  EXPECT_EQ(registry::heads(Operation::kForward).size(), registry::forward_rows().size());
}

}  // namespace
}  // namespace kda
