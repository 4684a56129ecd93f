// SPDX-License-Identifier: Apache-2.0
// Gradients in the C ABI.
#include <memory>

#include "capi/handles.hpp"
#include "capi/structs.hpp"
#include "kda/span.hpp"

using namespace kda::capi;

extern "C" {

kda_status kda_backward_plan_create(const kda_plan* forward, const kda_gradients* gradients,
                                    const kda_plan_options* options, kda_backward_plan** plan) {
  return guarded_call([&] {
    if (!plan) return kda::invalid("plan: is null");
    *plan = nullptr;
    if (!forward) return kda::invalid("forward: is null");
    kda_gradients c{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &c));
    kda::DeviceFacts unused;
    kda::PlanOptions plan_options;
    KDA_RETURN_IF_ERROR(read_options(options, &unused, &plan_options));
    auto made = std::make_unique<kda_backward_plan>();
    made->forward = forward->plan->problem;
    KDA_RETURN_IF_ERROR(kda::make_backward_plan(
        *forward->plan, gradients_of(made->forward, c).gradients, plan_options, &made->plan));
    *plan = made.release();
    return kda::Status{};
  });
}

void kda_backward_plan_destroy(kda_backward_plan* plan) { delete plan; }

size_t kda_backward_plan_workspace_bytes(const kda_backward_plan* plan) {
  return plan ? plan->plan.plan.workspace_bytes : 0;
}

}  // extern "C"

namespace {

/// run(tensors, gradients, stream) of a backward's plan, once what was given is read.
template <class Run>
kda_status run_with(const kda_backward_plan* plan, const kda_problem* problem,
                    const kda_gradients* gradients, Run&& run) {
  return guarded_call([&] {
    if (!plan) return kda::invalid("plan: is null");
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_problem(problem, &c));
    KDA_RETURN_IF_ERROR(check_call(plan->forward, c));
    kda_gradients g{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &g));
    KDA_RETURN_IF_ERROR(check_gradients(plan->plan.gradients, g));
    return run(tensors_of(c), gradients_of(plan->forward, g).tensors, c.stream);
  });
}

}  // namespace

extern "C" {

kda_status kda_backward(const kda_backward_plan* plan, const kda_problem* problem,
                        const kda_gradients* gradients, void* workspace, size_t workspace_bytes) {
  return run_with(
      plan, problem, gradients, [&](const auto& tensors, const auto& all, void* stream) {
        return kda::backward(plan->plan, tensors, all, workspace, workspace_bytes, stream);
      });
}

kda_status kda_span_backward_begin(const kda_backward_plan* plan, const kda_problem* problem,
                                   const kda_gradients* gradients, float* D, int32_t from_final,
                                   void* workspace, size_t workspace_bytes) {
  return run_with(plan, problem, gradients,
                  [&](const auto& tensors, const auto& all, void* stream) {
                    return kda::span_backward_begin(plan->plan, tensors, all, {D, from_final != 0},
                                                    workspace, workspace_bytes, stream);
                  });
}

kda_status kda_span_backward_finish(const kda_backward_plan* plan, const kda_problem* problem,
                                    const kda_gradients* gradients, void* workspace,
                                    size_t workspace_bytes) {
  return run_with(plan, problem, gradients,
                  [&](const auto& tensors, const auto& all, void* stream) {
                    return kda::span_backward_finish(plan->plan, tensors, all, workspace,
                                                     workspace_bytes, stream);
                  });
}

}  // extern "C"
