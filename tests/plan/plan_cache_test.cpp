// SPDX-License-Identifier: Apache-2.0
// Equal arguments give the same plan again, and anything else gives another.
#include "kda/plan_cache.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "kda/kda.h"
#include "support/harness.hpp"

namespace kda {
namespace {

using Found = std::shared_ptr<const Plan>;

struct Arguments {
  Problem problem;
  DeviceFacts device = gpu_facts(132);
  PlanOptions options;
  std::vector<int64_t> cu_seqlens = {0, 30, 100};

  Arguments() {
    Problem& p = problem;
    p.num_tokens = 100;
    p.num_sequences = 2;
    p.num_heads = p.num_value_heads = 2;
    p.cu_seqlens = DType::kInt64;
    p.q = p.k = p.v = p.g = p.o = contiguous(DType::kBFloat16, {1, 100, 2, 128});
    p.beta = contiguous(DType::kBFloat16, {1, 100, 2});
    p.gate_mode = GateMode::kBounded;
    p.A_log = contiguous(DType::kFloat32, {2});
    p.dt_bias = contiguous(DType::kFloat32, {2, 128});
    StateDesc state;
    state.num_slots = 4;
    state.indexed = true;
    state.tensor = contiguous(DType::kFloat32, {4, 2, 128, 128});
    p.initial_state = p.final_state = p.checkpoints = state;
    p.checkpoint_every = 64;
  }
};

Found find(PlanCache& cache, const Arguments& a) {
  Found plan;
  throw_if_error(cache.find(a.problem, a.cu_seqlens, a.device, a.options, &plan));
  return plan;
}

TEST(PlanCache, EqualArgumentsGiveTheSamePlan) {
  PlanCache cache;
  const Found plan = find(cache, {});
  EXPECT_EQ(find(cache, {}), plan);
  Plan made;
  const Arguments a;
  throw_if_error(make_plan(a.problem, a.cu_seqlens, a.device, a.options, &made));
  EXPECT_EQ(plan->to_json(), made.to_json());
  EXPECT_EQ(cache.size(), 1u);
}

/// Every field that a plan can depend on.
TEST(PlanCache, AnythingElseGivesAnother) {
  using Change = std::function<void(Arguments&)>;
  const Change changes[] = {
      [](Arguments& a) { a.problem.num_tokens = 101, a.cu_seqlens[2] = 101; },
      [](Arguments& a) { a.problem.num_heads = 1; },
      [](Arguments& a) { a.problem.q.dtype = DType::kFloat16; },
      [](Arguments& a) { a.problem.k.strides[1] += 8; },
      [](Arguments& a) { a.problem.v.alignment = 8; },
      [](Arguments& a) { a.problem.g.dtype = DType::kFloat32; },
      [](Arguments& a) { a.problem.beta.strides[1] += 2, a.problem.beta.alignment = 2; },
      [](Arguments& a) { a.problem.o.strides[1] += 8; },
      [](Arguments& a) { a.problem.gate_mode = GateMode::kSoftplus; },
      [](Arguments& a) { a.problem.lower_bound = -4; },
      [](Arguments& a) { a.problem.A_log.reset(); },
      [](Arguments& a) { a.problem.dt_bias->strides[0] += 4; },
      [](Arguments& a) { a.problem.beta_mode = BetaMode::kSigmoid; },
      [](Arguments& a) { a.problem.qk_l2norm = true; },
      [](Arguments& a) { a.problem.scale = 1; },
      [](Arguments& a) { a.problem.cu_seqlens = DType::kInt32; },
      [](Arguments& a) { a.problem.state_layout = StateLayout::kVK; },
      [](Arguments& a) { a.problem.initial_state.reset(); },
      [](Arguments& a) { a.problem.initial_state_mask = true; },
      [](Arguments& a) { a.problem.final_state->num_slots = 5; },
      [](Arguments& a) { a.problem.checkpoints->tensor.strides[0] += 4; },
      [](Arguments& a) { a.problem.checkpoint_every = 32; },
      [](Arguments& a) { a.problem.checkpoint_offsets = true; },
      [](Arguments& a) { a.problem.first_slot = 1; },
      [](Arguments& a) { a.problem.batch_invariant = true; },
      [](Arguments& a) { a.problem.head_map = HeadMap::kTiled; },
      [](Arguments& a) { a.cu_seqlens[1] = 31; },
      [](Arguments& a) { a.device.num_sms = 78; },
      [](Arguments& a) { a.device.compute_capability = 80; },
      [](Arguments& a) { a.device.memory_bytes_per_second *= 2; },
      [](Arguments& a) { a.device.gigahertz *= 2; },
      [](Arguments& a) { a.device.name = "another"; },
      [](Arguments& a) { a.device = cpu_facts(); },
      [](Arguments& a) { a.options.context_parallel = SegmentPolicy::kOff; },
      [](Arguments& a) { a.options.num_segments = 3; },
      [](Arguments& a) { a.options.segment_method = SegmentMethod::kOnePass; },
      [](Arguments& a) { a.options.intra_form = IntraForm::kToken; },
      [](Arguments& a) { a.options.backend = "recurrent"; },
      [](Arguments& a) { a.options.num_threads = 3; },
      [](Arguments& a) { a.options.keep = KeepPolicy::kStates; },
      [](Arguments& a) { a.options.kept_state_every = 128; },
  };
  PlanCache cache;
  std::vector<Found> plans = {find(cache, {})};
  for (std::size_t i = 0; i < std::size(changes); ++i) {
    Arguments changed;
    changes[i](changed);
    const Found plan = find(cache, changed);
    for (std::size_t j = 0; j < plans.size(); ++j) EXPECT_NE(plan, plans[j]) << i << ", " << j;
    EXPECT_EQ(find(cache, changed), plan) << i;
    plans.push_back(plan);
  }
  EXPECT_EQ(cache.size(), plans.size());
}

/// What only decode has.
TEST(PlanCache, AnythingElseOfDecodeGivesAnother) {
  const auto decode = [](const std::function<void(Problem&)>& change) {
    Arguments a;
    a.problem.operation = Operation::kDecode;
    a.problem.num_tokens = 4;
    a.cu_seqlens = {0, 2, 4};
    a.problem.final_state.reset();
    a.problem.checkpoints.reset();
    a.problem.checkpoint_every = 0;
    a.problem.state_index_columns = 4;
    change(a.problem);
    return a;
  };
  PlanCache cache;
  const Found plan = find(cache, decode([](Problem&) {}));
  EXPECT_NE(find(cache, decode([](Problem& p) { p.state_index_columns = 3; })), plan);
  EXPECT_NE(find(cache, decode([](Problem& p) { p.num_accepted_tokens = true; })), plan);
  EXPECT_NE(find(cache, decode([](Problem& p) { p.token_parents = true; })), plan);
  EXPECT_NE(find(cache, decode([](Problem& p) { p.zero_skipped = true; })), plan);
  EXPECT_EQ(cache.size(), 5u);
}

TEST(PlanCache, BoundsAreNotLengths) {
  PlanCache cache;
  const Arguments a;
  Found bounds;
  throw_if_error(cache.find_from_bounds(a.problem, a.device, a.options, &bounds));
  EXPECT_FALSE(bounds->lengths_known);
  EXPECT_TRUE(find(cache, a)->lengths_known);
}

TEST(PlanCache, DropsTheOneNotAskedForLongest) {
  PlanCache cache(2);
  const auto with_sms = [&](int32_t sms) {
    Arguments a;
    a.device = gpu_facts(sms);
    return find(cache, a);
  };
  const Found first = with_sms(10), second = with_sms(20);
  EXPECT_EQ(with_sms(10), first);
  with_sms(30);  // drops the second
  EXPECT_EQ(with_sms(10), first);
  EXPECT_NE(with_sms(20), second);
  EXPECT_EQ(second->device.num_sms, 20);  // still good
  EXPECT_EQ(cache.size(), 2u);
}

TEST(PlanCache, FailuresAreNotKept) {
  PlanCache cache;
  Arguments a;
  a.cu_seqlens[1] = 101;
  Found plan;
  EXPECT_EQ(cache.find(a.problem, a.cu_seqlens, a.device, a.options, &plan).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(cache.find(a.problem, a.cu_seqlens, a.device, a.options, nullptr).message(),
            "plan: is null");
  EXPECT_EQ(cache.size(), 0u);
}

TEST(PlanCache, ThreadsShareIt) {
  PlanCache cache(4);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (std::size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        Arguments a;
        a.device = gpu_facts(1 + (i * 7 + static_cast<int>(t)) % 6);
        wrong[t] += find(cache, a)->device.num_sms != a.device.num_sms;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
  EXPECT_EQ(cache.size(), 4u);
}

TEST(PlanCache, InC) {
  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_tokens = 64;
  const int64_t shape[] = {1, 64, 1, 128};
  std::vector<float> memory(64 * 128 + 16);
  for (kda_tensor* tensor : {&problem.q, &problem.k, &problem.v, &problem.g, &problem.o})
    ASSERT_EQ(kda_tensor_contiguous(tensor, nullptr, KDA_FP32, 4, shape), KDA_OK);
  ASSERT_EQ(kda_tensor_contiguous(&problem.beta, nullptr, KDA_FP32, 3, shape), KDA_OK);
  kda_plan_cache* cache = nullptr;
  ASSERT_EQ(kda_plan_cache_create(0, &cache), KDA_OK);
  const auto json = [&] {
    kda_plan* plan = nullptr;
    EXPECT_EQ(kda_plan_cache_find(cache, &problem, nullptr, nullptr, &plan), KDA_OK)
        << kda_last_error();
    const std::string text = kda_plan_json(plan);
    kda_plan_destroy(plan);
    return text;
  };
  const std::string first = json();
  problem.q.data = memory.data();
  EXPECT_EQ(json(), first);
  kda_plan* kept = nullptr;
  ASSERT_EQ(kda_plan_cache_find(cache, &problem, nullptr, nullptr, &kept), KDA_OK);
  EXPECT_EQ(kda_plan_cache_find(nullptr, &problem, nullptr, nullptr, &kept), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "cache: is null");
  kda_plan_cache_destroy(cache);
  EXPECT_EQ(kda_plan_json(kept), first);
  kda_plan_destroy(kept);
  EXPECT_EQ(kda_plan_cache_create(1, nullptr), KDA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kda
