// SPDX-License-Identifier: Apache-2.0
#include "plan/one_kernel.hpp"

#include <cmath>
#include <utility>

#include "core/text.hpp"
#include "plan/cost_model.hpp"

namespace kda::plan {
namespace {

constexpr int64_t kTypicalTokens = 8192;

CostEstimate predict(const Plan& plan, std::vector<int64_t> lengths) {
  const Problem& p = plan.problem;
  const CostConstants constants = costs_of(plan.device.compute_capability);
  const CostInput in{std::move(lengths), p.num_value_heads,   p.key_dim,
                     p.value_dim,        plan.device.num_sms, plan.device.memory_bytes_per_second};
  if (total_tokens(in) == 0) return {};
  return {.roofline_us = roofline_us(in, constants),
          .serial_us = serial_us(in, constants),
          .one_kernel_us = one_kernel_us(in, constants)};
}

}  // namespace

bool asks_for_segments(const PlanOptions& options) {
  return options.context_parallel != ContextParallel::kAuto &&
         options.context_parallel != ContextParallel::kOff;
}

std::string stages_preferred(const Plan& plan) {
  if (asks_for_segments(plan.options)) return "context_parallel asks for segments";
  if (plan.options.intra_form != IntraForm::kAuto) return "intra_form asks for a form of stages";
  const CostEstimate one = predict(plan, {kTypicalTokens});
  if (one.one_kernel_us <= one.serial_us) return {};
  return cat("a sequence of ", kTypicalTokens, " tokens and ", plan.problem.num_value_heads,
             " value heads is predicted to take ", std::llround(one.one_kernel_us),
             " us in one kernel, ", std::llround(one.serial_us), " us in stages");
}

CostEstimate predict_one_kernel(const Plan& plan) {
  std::vector<int64_t> lengths;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
    lengths.push_back(plan.cu_seqlens[n + 1] - plan.cu_seqlens[n]);
  return predict(plan, std::move(lengths));
}

}  // namespace kda::plan
