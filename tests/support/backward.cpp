// SPDX-License-Identifier: Apache-2.0
#include "support/backward.hpp"

#include <cstdio>
#include <cstdlib>
#include <span>

#include "check/tolerances.hpp"
#include "core/layout.hpp"
#include "plan/ledger.hpp"
#include "plan/planner.hpp"
#include "support/gpu.hpp"

namespace kda::test {

std::vector<std::string> backward_backends() {
  return names_that_serve_all(registry::backward_heads());
}

std::vector<DType> backward_types() {
  if (!on_cuda()) return {DType::kFloat32};
  return {DType::kFloat32, DType::kBFloat16};
}

std::vector<BackwardForm> backward_forms() {
  if (!on_cuda()) return {{DType::kFloat32, 0}};
  return {{DType::kFloat32, 0}, {DType::kBFloat16, 0}, {DType::kBFloat16, 3}};
}

check::GradientBuffers gradients_in_fp32(const check::Inputs& inputs,
                                         check::GradientOptions options) {
  options.d_o_dtype = inputs.problem.v.dtype;
  options.out_dtype = DType::kFloat32;
  return check::make_gradients(inputs, options);
}

BackwardCall::BackwardCall(const check::Inputs& inputs, const Gradients& gradients,
                           const BackwardRun& run)
    : tensors(inputs.tensors()) {
  PlanOptions options = run.segments > 0 ? fixed_segments(run.segments) : PlanOptions{};
  if (run.whole) options.context_parallel = SegmentPolicy::kOff;
  options.num_threads = run.num_threads;
  options.backend = run.backend;
  options.kept_state_every = run.kept_every;
  if (run.kept_every > 0 && !on_cuda()) options.keep = KeepPolicy::kStates;
  if (run.keep_chunks) options.keep = KeepPolicy::kChunks;
  Problem p = inputs.problem;
  check::Outputs outputs =
      check::make_outputs(&p, run.keep_chunks ? p.v.dtype : check::state_type(p));
  DeviceFacts facts = device_of(run.backend);
  if (run.num_sms > 0) facts.num_sms = run.num_sms;
  throw_if_error(run.from_bounds ? make_plan_from_bounds(p, facts, options, &forward)
                                 : make_plan(p, inputs.cu_seqlens, facts, options, &forward));
  if (run.from_bounds) tensors.cu_seqlens = inputs.cu_seqlens.data();
  saved = io::Buffer(forward.saved_bytes);
  saved.fill(0xff);
  tensors.initial_state_indices = run.state_indices;
  tensors.initial_state_mask = run.state_mask;
  tensors.saved = saved.data();
  tensors.saved_bytes = saved.size();
  if (forward.saved_bytes > 0) {
    io::Buffer room(forward.workspace_bytes);
    room.fill(0xff);
    outputs.attach(&tensors);
    throw_if_error(check::run_and_wait(forward, tensors, room.data(), room.size()));
  }
  tensors.o = nullptr;  // no output of the forward is looked at
  options.spans = run.spans;
  throw_if_error(make_backward_plan(forward, gradients, options, &plan));
  workspace = io::Buffer(plan.plan.workspace_bytes);
  workspace.fill(0xff);
}

Status BackwardCall::run(check::GradientBuffers* buffers) {
  return check::run_backward_and_wait(plan, tensors, buffers->tensors(), workspace.data(),
                                      workspace.size());
}

void run_backward(const check::Inputs& inputs, check::GradientBuffers* buffers,
                  const BackwardRun& run) {
  throw_if_error(BackwardCall(inputs, buffers->gradients, run).run(buffers));
}

check::GradientBuffers run_planned_by(const registry::Head& head,
                                      void (*plan_backward)(plan::PlanBuilder&),
                                      const check::Inputs& inputs, check::GradientBuffers buffers,
                                      std::string* text, const BackwardRun& run) {
  BackwardCall call(inputs, buffers.gradients, run);
  registry::Head other = head;
  other.plan = plan_backward;
  const registry::Head* const heads[] = {&other};
  const Plan whole = call.plan.plan;
  const std::span<const int64_t> lengths = whole.problem.cu_seqlens
                                               ? std::span<const int64_t>(whole.cu_seqlens)
                                               : std::span<const int64_t>();
  throw_if_error(plan::plan_with(heads, whole.problem, run.from_bounds ? nullptr : &lengths,
                                 whole.device, whole.requested, &call.plan.plan,
                                 &buffers.gradients));
  *text = call.plan.to_text(true);
  call.workspace = io::Buffer(call.plan.plan.workspace_bytes);
  call.workspace.fill(0xff);
  throw_if_error(call.run(&buffers));
  return buffers;
}

void expect_clamped(const check::Inputs& inputs, const check::GradientBuffers& buffers,
                    const std::vector<int64_t>& wrong, BackwardRun run) {
  check::GradientBuffers host = buffers, device = buffers;
  BackwardCall on_host(inputs, buffers.gradients, run);
  throw_if_error(on_host.run(&host));
  check::Inputs given = inputs;
  given.cu_seqlens = wrong;
  run.from_bounds = true;
  BackwardCall on_device(given, buffers.gradients, run);
  const Plan& plan = on_device.plan.plan;
  ASSERT_EQ(plan.implementation, on_host.plan.plan.implementation);
  ASSERT_TRUE(plan.device_cut.on && on_host.plan.plan.segmented);
  throw_if_error(on_device.run(&device));
  EXPECT_EQ(*static_cast<const int32_t*>(
                plan::find_block(plan, on_device.workspace.data(), "device_flags")),
            kBadSequences);
  EXPECT_TRUE(same_gradients(host, device));
}

void scale_by(io::Buffer* tensor, DType type, const std::function<double(int64_t)>& factor) {
  const auto count =
      static_cast<int64_t>(tensor->size() / static_cast<std::size_t>(dtype_size(type)));
  for (int64_t i = 0; i < count; ++i)
    store_element(tensor->data(), type, i,
                  static_cast<float>(factor(i) * load_double(tensor->data(), type, i)));
}

void expect_gradients_within(const check::Inputs& inputs, check::GradientBuffers buffers,
                             BackwardCall* call, bool many, bool half, const std::string& what) {
  throw_if_error(call->run(&buffers));
  const check::GradientComparison comparison =
      check::compare_gradients(inputs, buffers,
                               {.marginal = check::is_marginal(inputs),
                                .operands = check::operands_of(call->plan.plan),
                                .num_threads = oracle_threads()});
  for (const auto& [name, errors] : comparison.errors) {
    const check::HeadError* worst = check::worst_error(errors);
    EXPECT_LE(worst->error, worst->tolerance)
        << what << ": " << name << " of sequence " << worst->sequence << ", head " << worst->head;
  }
  const auto expect_all = [&](std::span<const check::GradientBound> bounds) {
    for (const check::GradientBound& bound : bounds) {
      const auto found = comparison.all_heads.find(bound.name);
      if (many && found != comparison.all_heads.end() && found->first != "dA_log") {
        EXPECT_LE(found->second, bound.all_heads) << what << ": " << bound.name;
      }
    }
  };
  expect_all(check::kBf16Gradients);
  if (half) expect_all(check::kFp16ChainGradients);
  if (call->plan.plan.problem.q.dtype == DType::kFloat16) expect_all(check::kFp16RowGradients);
  if (std::getenv("KDA_TEST_VERBOSE"))
    for (const auto& [name, error] : comparison.all_heads)
      std::printf("  %-28s %-16s %.2e\n", what.c_str(), name.c_str(), error);
}

void restride_gradients(const Problem& p, check::GradientBuffers* buffers, int64_t unit) {
  Gradients& g = buffers->gradients;
  if (g.d_o) pad_tensor(&buffers->d_o, &*g.d_o, v_shape(p), unit);
  pad_tensor(&buffers->dq, &*g.dq, qk_shape(p), 1);
  pad_tensor(&buffers->dk, &*g.dk, qk_shape(p), 1);
  pad_tensor(&buffers->dv, &*g.dv, v_shape(p), 1);
  const Shape beta = beta_shape(p);
  const std::array<int64_t, 4> spread{beta[1] * (beta[2] * 3 + 2) + 1, beta[2] * 3 + 2, 3, 0};
  if (is_a_head(p, *g.dg))
    buffers->dg = spread_tensor(buffers->dg, &*g.dg, beta, spread);
  else
    pad_tensor(&buffers->dg, &*g.dg, g_shape(p), 1);
  buffers->dbeta = spread_tensor(buffers->dbeta, &*g.dbeta, beta, spread);
}

std::vector<const io::Buffer*> gradient_outputs(const check::GradientBuffers& buffers) {
  return {&buffers.dq,    &buffers.dk,     &buffers.dv,       &buffers.dg,
          &buffers.dbeta, &buffers.dA_log, &buffers.ddt_bias, &buffers.d_initial_state};
}

testing::AssertionResult same_gradients(const check::GradientBuffers& a,
                                        const check::GradientBuffers& b) {
  const auto left = gradient_outputs(a), right = gradient_outputs(b);
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!same_bits(*left[i], *right[i]))
      return testing::AssertionFailure() << check::kGradientNames[i];
  return testing::AssertionSuccess();
}

}  // namespace kda::test
