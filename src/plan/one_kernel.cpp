// SPDX-License-Identifier: Apache-2.0
#include "plan/one_kernel.hpp"

#include <cmath>

#include "core/text.hpp"
#include "plan/cost_model.hpp"

namespace kda::plan {
namespace {

constexpr int64_t kTypicalTokens = 8192;

double predicted_us(const Workload& work, const DeviceFacts& device, bool one_kernel,
                    bool may_cut) {
  CostEstimate cost;
  if (may_cut)
    auto_partition(work, device, one_kernel, &cost);
  else
    cost = predict_one_kernel(work, device);
  if (cost.segmented_us > 0) return cost.segmented_us;
  return one_kernel ? cost.one_kernel_us : cost.serial_us;
}

}  // namespace

bool asks_for_segments(const PlanOptions& options) {
  return options.context_parallel != ContextParallel::kAuto &&
         options.context_parallel != ContextParallel::kOff;
}

std::string stages_preferred(const Plan& plan, bool may_cut) {
  if (asks_for_segments(plan.options)) return "context_parallel asks for segments";
  if (plan.options.intra_form != IntraForm::kAuto) return "intra_form asks for a form of stages";
  const Problem& p = plan.problem;
  const Workload typical{.lengths = {kTypicalTokens},
                         .num_value_heads = p.num_value_heads,
                         .key_dim = p.key_dim,
                         .value_dim = p.value_dim,
                         .num_sms = plan.device.num_sms};
  const double one_kernel = predicted_us(typical, plan.device, true, may_cut),
               stages = predicted_us(typical, plan.device, false, may_cut);
  if (one_kernel <= stages) return {};
  return cat("a sequence of ", kTypicalTokens, " tokens and ", p.num_value_heads,
             " value heads is predicted to take ", std::llround(one_kernel), " us in one kernel, ",
             std::llround(stages), " us in stages");
}

CostEstimate predict_one_kernel(const Workload& work, const DeviceFacts& device) {
  const CostConstants constants = costs_of(device.compute_capability, work.key_dim);
  const CostInput in{work.lengths,   work.num_value_heads, work.key_dim,
                     work.value_dim, work.num_sms,         device.memory_bytes_per_second};
  if (total_tokens(in) == 0) return {};
  return {.roofline_us = roofline_us(in, constants),
          .serial_us = serial_us(in, constants),
          .one_kernel_us = one_kernel_us(in, constants)};
}

}  // namespace kda::plan
