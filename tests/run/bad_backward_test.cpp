// SPDX-License-Identifier: Apache-2.0
// Named bad calls of a backward: each is refused with a message that names the argument, before
// anything is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <ostream>

#include "support/backward.hpp"

namespace kda {
namespace {

using check::Inputs;

/// Everything a backward needs, all legal: three packed sequences, a pool, kept states.
struct Call {
  Inputs inputs;
  check::GradientBuffers buffers;
  PlanOptions options;
  Plan forward;
  BackwardPlan plan;
  io::Buffer saved, workspace, o;
  Tensors tensors;
  GradientTensors gradients;
  std::vector<int32_t> slots = {0, 4, -1};
  std::vector<uint8_t> mask = {1, 1, 0};
  std::size_t workspace_bytes = 0;
  bool keep_forward = true;  ///< the forward has run

  Call() {
    check::GenerateOptions shape = test::shape(0, 2, 16, 8);
    shape.num_value_heads = 4;
    shape.seq_lens = {130, 3, 70};
    shape.initial_state = true;
    inputs = check::generate(shape);
    buffers = check::make_gradients(inputs);
    StateDesc pool;
    pool.num_slots = 6;
    pool.indexed = true;
    pool.tensor = contiguous(DType::kFloat32, {6, 4, 16, 8});
    inputs.problem.initial_state = pool;
    inputs.problem.initial_state_mask = true;
    inputs.initial_state = io::Buffer(6 * 4 * 16 * 8 * 4);
    inputs.initial_state.fill(0);
    o = io::Buffer(inputs.v.size());
    options.keep = KeepPolicy::kStates;
    options.kept_state_every = 64;
    options.num_threads = 1;
  }

  Problem& problem() { return inputs.problem; }
  Gradients& wanted() { return buffers.gradients; }

  Status plan_it() {
    const Status planned =
        make_plan(inputs.problem, inputs.cu_seqlens, cpu_facts(), options, &forward);
    if (!planned.ok()) return planned;
    PlanOptions backward_options = options;
    return make_backward_plan(forward, buffers.gradients, backward_options, &plan);
  }

  /// Memory and pointers, after plan_it().
  void attach() {
    tensors = inputs.tensors();
    tensors.initial_state_indices = slots.data();
    tensors.initial_state_mask = mask.data();
    saved = io::Buffer(forward.saved_bytes);
    saved.fill(0xff);
    tensors.saved = saved.data();
    tensors.saved_bytes = saved.size();
    tensors.o = o.data();
    if (keep_forward) {
      io::Buffer room(forward.workspace_bytes);
      throw_if_error(run(forward, tensors, room.data(), room.size()));
    }
    tensors.o = nullptr;
    gradients = buffers.tensors();
    workspace = io::Buffer(plan.plan.workspace_bytes + kWorkspaceAlignment);
    workspace_bytes = plan.plan.workspace_bytes;
  }

  Status run_it() { return backward(plan, tensors, gradients, workspace.data(), workspace_bytes); }
};

struct BadCall {
  std::string name;
  std::string message;  ///< what it must say, and so name
  std::function<void(Call&)> spoil_plan;
  std::function<void(Call&)> spoil_run;
};

void PrintTo(const BadCall& call, std::ostream* out) { *out << call.name; }

using Member = std::optional<TensorDesc> Gradients::*;
const std::pair<const char*, Member> kMembers[] = {
    {"d_o", &Gradients::d_o},
    {"d_final_state", &Gradients::d_final_state},
    {"dq", &Gradients::dq},
    {"dk", &Gradients::dk},
    {"dv", &Gradients::dv},
    {"dg", &Gradients::dg},
    {"dbeta", &Gradients::dbeta},
    {"dA_log", &Gradients::dA_log},
    {"ddt_bias", &Gradients::ddt_bias},
    {"d_initial_state", &Gradients::d_initial_state}};

/// The pointer of a member of kMembers.
const void*& pointer_of(GradientTensors& g, std::size_t which) {
  const void** inputs[] = {&g.d_o, &g.d_final_state};
  void** outputs[] = {&g.dq,    &g.dk,     &g.dv,       &g.dg,
                      &g.dbeta, &g.dA_log, &g.ddt_bias, &g.d_initial_state};
  return which < 2 ? *inputs[which] : const_cast<const void*&>(*outputs[which - 2]);
}

std::vector<BadCall> bad_calls() {
  std::vector<BadCall> calls;
  const auto plan = [&](const std::string& name, const std::string& message,
                        std::function<void(Call&)> spoil) {
    calls.push_back({name, message, std::move(spoil), nullptr});
  };
  const auto run = [&](const std::string& name, const std::string& message,
                       std::function<void(Call&)> spoil,
                       std::function<void(Call&)> before = nullptr) {
    calls.push_back({name, message, std::move(before), std::move(spoil)});
  };
  for (std::size_t i = 0; i < std::size(kMembers); ++i) {
    const auto [name, member] = kMembers[i];
    const std::string tensor = name;
    const bool output = i >= 2;
    // A_log has one dimension, which is its innermost.
    const std::string stride_text =
        member == &Gradients::dA_log ? ": innermost stride" : ": stride";
    plan(tensor + "_of_integers", tensor + ": dtype int32",
         [member = member](Call& c) { (c.wanted().*member)->dtype = DType::kInt32; });
    plan(tensor + "_of_an_unknown_type", tensor + ": dtype",
         [member = member](Call& c) { (c.wanted().*member)->dtype = static_cast<DType>(77); });
    plan(tensor + "_never_described", tensor + ": ",
         [member = member](Call& c) { *(c.wanted().*member) = TensorDesc{DType::kFloat32}; });
    plan(tensor + "_alignment", tensor + ": alignment 3",
         [member = member](Call& c) { (c.wanted().*member)->alignment = 3; });
    plan(tensor + "_negative_stride", tensor + stride_text, [member = member](Call& c) {
      (c.wanted().*member)->strides = {-64, -64, -64, 1};
      if (member == &Gradients::ddt_bias) (c.wanted().*member)->strides = {-64, 1, 0, 0};
    });
    if (output)
      plan(tensor + "_elements_overlap", tensor + stride_text, [member = member](Call& c) {
        (c.wanted().*member)
            ->strides[member == &Gradients::dA_log || member == &Gradients::ddt_bias ? 0 : 1] = 0;
      });
    run(tensor + "_null", tensor + ": pointer is null",
        [i](Call& c) { pointer_of(c.gradients, i) = nullptr; });
  }
  for (const auto& [name, member] :
       {kMembers[0], kMembers[1], kMembers[2], kMembers[5], kMembers[9]})
    plan(std::string(name) + "_innermost_stride", std::string(name) + ": innermost stride is 2",
         [member = member](Call& c) { (c.wanted().*member)->strides[3] = 2; });
  plan("dg_of_a_gate_a_channel", "dg: innermost stride is 0, but g has a gate a channel",
       [](Call& c) { c.wanted().dg->strides[3] = 0; });
  plan("ddt_bias_of_a_bias_a_channel",
       "ddt_bias: innermost stride is 0, but dt_bias has a bias a channel",
       [](Call& c) { c.wanted().ddt_bias->strides[1] = 0; });
  plan("nothing_comes_in", "d_o, d_final_state: both are absent",
       [](Call& c) { c.wanted().d_o = c.wanted().d_final_state = std::nullopt; });
  plan("nothing_is_wanted", "gradients: none is wanted", [](Call& c) {
    for (std::size_t i = 2; i < std::size(kMembers); ++i) (c.wanted().*kMembers[i].second).reset();
  });
  plan("d_final_state_fp16", "d_final_state: dtype fp16 is not fp32, bf16 or fp64",
       [](Call& c) { c.wanted().d_final_state->dtype = DType::kFloat16; });
  plan("d_initial_state_fp16", "d_initial_state: dtype fp16 is not fp32, bf16 or fp64",
       [](Call& c) { c.wanted().d_initial_state->dtype = DType::kFloat16; });
  plan("dA_log_bf16", "dA_log: dtype bf16 is not fp32 or fp64",
       [](Call& c) { c.wanted().dA_log->dtype = DType::kBFloat16; });
  plan("ddt_bias_bf16", "ddt_bias: dtype bf16 is not fp32 or fp64",
       [](Call& c) { c.wanted().ddt_bias->dtype = DType::kBFloat16; });
  plan("dA_log_without_A_log", "dA_log: given, but", [](Call& c) { c.problem().A_log.reset(); });
  plan("ddt_bias_without_dt_bias", "ddt_bias: given, but",
       [](Call& c) { c.problem().dt_bias.reset(); });
  plan("d_initial_state_without_initial_state", "d_initial_state: given, but", [](Call& c) {
    c.problem().initial_state.reset();
    c.problem().initial_state_mask = false;
  });
  plan("stride_overflows", "dv: stride", [](Call& c) {
    c.wanted().dv->strides[1] = INT64_MAX / 8;
    c.wanted().dv->alignment = 4;
  });
  plan("a_bad_forward", "v: HV = 4 is not a multiple of H = 3",
       [](Call& c) { c.problem().num_heads = 3; });
  plan("keep_unknown", "keep: value 9",
       [](Call& c) { c.options.keep = static_cast<KeepPolicy>(9); });
  for (const int64_t every : {-64, 100, 1})
    plan("kept_state_every_" + std::to_string(every < 0 ? 0 : every),
         "kept_state_every: ", [every](Call& c) { c.options.kept_state_every = every; });
  plan("backend_unknown", "backend: 'nonsense'", [](Call& c) { c.options.backend = "nonsense"; });
  plan("backend_of_another_device", "backend: 'fused' names no implementation for cpu",
       [](Call& c) { c.options.backend = "fused"; });
  for (std::size_t i = 0; i < std::size(kMembers); ++i) {
    const auto [name, member] = kMembers[i];
    const std::string tensor = name;
    plan(tensor + "_fp64_in_blocked", tensor + ": dtype fp64, only backend oracle computes it",
         [member = member](Call& c) {
           (c.wanted().*member)->dtype = DType::kFloat64;
           (c.wanted().*member)->alignment = 8;
           c.options.backend = "blocked";
         });
    run(
        tensor + "_fp64_misaligned", tensor + ": pointer is not aligned",
        [i](Call& c) {
          const void*& pointer = pointer_of(c.gradients, i);
          pointer = static_cast<const char*>(pointer) + 4;
        },
        [member = member](Call& c) {
          (c.wanted().*member)->dtype = DType::kFloat64;
          (c.wanted().*member)->alignment = 8;
        });
  }

  for (const auto& [name, member] :
       {std::pair{"q", &Tensors::q}, std::pair{"k", &Tensors::k}, std::pair{"v", &Tensors::v},
        std::pair{"g", &Tensors::g}, std::pair{"beta", &Tensors::beta}})
    run(std::string(name) + "_null", std::string(name) + ": pointer is null",
        [member = member](Call& c) { c.tensors.*member = nullptr; });
  run("A_log_null", "A_log: pointer is null", [](Call& c) { c.tensors.A_log = nullptr; });
  run("dt_bias_null", "dt_bias: pointer is null", [](Call& c) { c.tensors.dt_bias = nullptr; });
  run("initial_state_null", "initial_state: pointer is null",
      [](Call& c) { c.tensors.initial_state = nullptr; });
  run("indices_null", "initial_state_indices: pointer is null",
      [](Call& c) { c.tensors.initial_state_indices = nullptr; });
  run("mask_null", "initial_state_mask: pointer is null",
      [](Call& c) { c.tensors.initial_state_mask = nullptr; });
  run("index_out_of_range", "initial_state_indices: entry 1 = 6", [](Call& c) { c.slots[1] = 6; });
  run("other_lengths", "cu_seqlens: entry 1 = 131", [](Call& c) {
    c.inputs.cu_seqlens[1] = 131;
    c.tensors.cu_seqlens = c.inputs.cu_seqlens.data();
  });
  run("dq_misaligned", "dq: pointer is not aligned",
      [](Call& c) { c.gradients.dq = static_cast<char*>(c.gradients.dq) + 2; });
  run("d_o_misaligned", "d_o: pointer is not aligned",
      [](Call& c) { c.gradients.d_o = static_cast<const char*>(c.gradients.d_o) + 2; });
  run("workspace_null", "workspace: is null", [](Call& c) { c.workspace = io::Buffer(); });
  run("workspace_short", "workspace: has", [](Call& c) { --c.workspace_bytes; });
  run("saved_null", "saved: is null", [](Call& c) { c.tensors.saved = nullptr; });
  run("saved_short", "saved: has", [](Call& c) { --c.tensors.saved_bytes; });
  run("saved_misaligned", "saved: is not aligned",
      [](Call& c) { c.tensors.saved = static_cast<char*>(c.tensors.saved) + 8; });
  run("saved_is_the_workspace", "saved: overlaps the workspace", [](Call& c) {
    c.workspace = io::Buffer(std::max(c.saved.size(), c.workspace_bytes));
    c.tensors.saved = c.workspace.data();
  });
  run(
      "saved_never_written", "saved: was not written", [](Call&) {},
      [](Call& c) { c.keep_forward = false; });
  run("saved_by_another_plan", "saved: was not written by a run of the forward", [](Call& c) {
    Call other;
    other.problem().scale = 2;
    throw_if_error(other.plan_it());
    other.attach();
    c.saved = other.saved;
    c.tensors.saved = c.saved.data();
  });
  run("dq_is_dk", "overlaps", [](Call& c) { c.gradients.dk = c.gradients.dq; });
  run("dv_is_d_o", "dv: overlaps d_o",
      [](Call& c) { c.gradients.dv = const_cast<void*>(c.gradients.d_o); });
  run("dg_is_g", "dg: overlaps g", [](Call& c) { c.gradients.dg = c.inputs.g.data(); });
  run("dq_is_q", "dq: overlaps q", [](Call& c) { c.gradients.dq = c.inputs.q.data(); });
  run("dbeta_in_dv", "overlaps", [](Call& c) { c.gradients.dbeta = c.gradients.dv; });
  run("d_initial_state_is_d_final_state", "d_initial_state: overlaps d_final_state",
      [](Call& c) { c.gradients.d_initial_state = const_cast<void*>(c.gradients.d_final_state); });
  run("d_initial_state_in_the_pool", "d_initial_state: overlaps initial_state",
      [](Call& c) { c.gradients.d_initial_state = c.inputs.initial_state.data(); });
  run("dq_over_slots", "dq: overlaps initial_state_indices in memory", [](Call& c) {
    c.slots.resize(1 << 16);
    c.tensors.initial_state_indices = c.slots.data();
    c.gradients.dq = c.slots.data();
  });
  run("dA_log_is_A_log", "dA_log: overlaps A_log",
      [](Call& c) { c.gradients.dA_log = c.inputs.A_log.as<float>(); });
  return calls;
}

class BadBackward : public testing::TestWithParam<BadCall> {};

TEST_P(BadBackward, IsRefusedAndWritesNothing) {
  const BadCall& bad = GetParam();
  Call call;
  if (bad.spoil_plan) bad.spoil_plan(call);
  Status status = call.plan_it();
  if (bad.spoil_run) {
    ASSERT_TRUE(status.ok()) << status.message();
    call.attach();
    bad.spoil_run(call);
    const check::GradientBuffers before = call.buffers;
    status = call.run_it();
    EXPECT_TRUE(test::same_gradients(before, call.buffers));
  }
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find(bad.message), std::string::npos) << status.message();
}

INSTANTIATE_TEST_SUITE_P(All, BadBackward, testing::ValuesIn(bad_calls()),
                         [](const auto& entry) { return entry.param.name; });

TEST(BadBackwardCount, IsAtLeastSixty) { EXPECT_GE(bad_calls().size(), 60u); }

TEST(GoodBackward, TheUnspoiledCallSucceedsTwice) {
  Call call;
  ASSERT_TRUE(call.plan_it().ok());
  call.attach();
  ASSERT_TRUE(call.run_it().ok());
  const check::GradientBuffers first = call.buffers;
  ASSERT_TRUE(call.run_it().ok());  // what was kept is only read
  EXPECT_TRUE(test::same_gradients(first, call.buffers));
}

/// The forward would write its states over what it is computing with.
TEST(BadForward, SavedIsTheWorkspace) {
  Call call;
  ASSERT_TRUE(call.plan_it().ok());
  call.attach();
  call.tensors.o = call.o.data();
  call.o.fill(0x7f);
  const io::Buffer before = call.o;
  const std::size_t needed = call.forward.workspace_bytes, kept = call.forward.saved_bytes;
  io::Buffer room(needed + kept);
  const auto refused = [&](std::size_t workspace, std::size_t saved) {
    call.tensors.saved = room.data() + saved;
    const Status status = run(call.forward, call.tensors, room.data() + workspace, needed);
    EXPECT_TRUE(test::same_bits(before, call.o) || status.ok());
    return status.message();
  };
  EXPECT_EQ(refused(0, 0), "saved: overlaps the workspace");
  EXPECT_EQ(refused(0, needed - kWorkspaceAlignment), "saved: overlaps the workspace");
  EXPECT_EQ(refused(kept - kWorkspaceAlignment, 0), "saved: overlaps the workspace");
  EXPECT_EQ(refused(kept, 0), "");
  EXPECT_EQ(refused(0, needed), "");
}

TEST(GoodBackward, ForwardsThatZeroRowsHaveNone) {
  Call call;
  Plan plan;
  plan.problem = call.problem();
  plan.problem.zero_skipped = true;
  const Status status = make_backward_plan(plan, call.wanted(), {}, &call.plan);
  EXPECT_EQ(status.message(), "zero_skipped: a forward with it has no backward");
}

TEST(GoodBackward, DecodeHasNone) {
  Call call;
  call.problem().operation = Operation::kDecode;
  call.options.keep = KeepPolicy::kNothing;
  call.plan.forward_id = 7;
  Plan decode;
  decode.problem = call.problem();
  const Status status = make_backward_plan(decode, call.wanted(), {}, &call.plan);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(call.plan.forward_id, 7u);
  EXPECT_FALSE(make_backward_plan(decode, call.wanted(), {}, nullptr).ok());
  call.options.keep = KeepPolicy::kStates;
  EXPECT_FALSE(make_plan(call.problem(), {}, cpu_facts(), call.options, &decode).ok());
}

TEST(GoodBackward, PlansFromBoundsGiveTheSameBits) {
  Call call;
  ASSERT_TRUE(call.plan_it().ok());
  call.attach();
  ASSERT_TRUE(call.run_it().ok());
  const check::GradientBuffers known = call.buffers;
  ASSERT_TRUE(make_plan_from_bounds(call.problem(), cpu_facts(), call.options, &call.forward).ok());
  ASSERT_TRUE(make_backward_plan(call.forward, call.wanted(), {}, &call.plan).ok());
  call.saved = io::Buffer(call.forward.saved_bytes);
  call.tensors.saved = call.saved.data();
  call.tensors.saved_bytes = call.saved.size();
  call.tensors.cu_seqlens = call.inputs.cu_seqlens.data();
  call.tensors.o = call.o.data();
  io::Buffer room(call.forward.workspace_bytes);
  ASSERT_TRUE(run(call.forward, call.tensors, room.data(), room.size()).ok());
  call.workspace = io::Buffer(call.plan.plan.workspace_bytes);
  call.workspace_bytes = call.workspace.size();
  ASSERT_TRUE(call.run_it().ok());
  EXPECT_TRUE(test::same_gradients(known, call.buffers));
}

TEST(GoodBackward, PlansSayWhatIsKept) {
  Call call;
  ASSERT_TRUE(call.plan_it().ok());
  // Two states of 130 tokens, none of 3, one of 70: 4 heads of 16 x 8 floats each, and a mark.
  EXPECT_EQ(call.forward.saved_bytes, 64u + 3 * 4 * 16 * 8 * 4);
  EXPECT_EQ(call.plan.plan.saved_bytes, call.forward.saved_bytes);
  const std::string text = call.plan.to_text(true);
  EXPECT_NE(text.find("backward, keep states"), std::string::npos) << text;
  EXPECT_NE(text.find("kept_states"), std::string::npos) << text;
  EXPECT_NE(call.plan.to_json().find("\"saved_bytes\""), std::string::npos);
  call.options.keep = KeepPolicy::kNothing;
  ASSERT_TRUE(call.plan_it().ok());
  EXPECT_EQ(call.forward.saved_bytes, 0u);
  call.options.keep = KeepPolicy::kChunks;
  ASSERT_TRUE(call.plan_it().ok());
  EXPECT_EQ(call.forward.resolved.keep, KeepPolicy::kStates);
}

}  // namespace
}  // namespace kda
