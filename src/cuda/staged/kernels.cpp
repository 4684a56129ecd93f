// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/kernels.hpp"

#include "cuda/common/common.hpp"
#include "cuda/segments/kernels.hpp"

namespace kda::cuda::staged {

ForwardKernels kernels_of(const Plan& plan) {
  const Problem& p = plan.problem;
  const auto chains = plan.segmented ? static_cast<int64_t>(plan.segments.size()) : p.num_sequences;
  ForwardKernels kernels;
  kernels.fp16 = p.q.dtype == DType::kFloat16;
  kernels.tokens = plan.resolved.intra_form == IntraForm::kToken;
  kernels.chains = {.hopper = has_hopper_kernels(plan.device),
                    .fp16 = kernels.fp16,
                    .num_sms = plan.device.num_sms};
  kernels.scan = kernels.chains;
  const auto narrow = [&](int64_t columns) {
    return !kernels.chains.hopper &&
           narrow_tiles(plan.device.num_sms, chains * p.num_value_heads, columns);
  };
  kernels.chains.narrow = narrow(p.value_dim);
  kernels.scan.narrow = narrow(p.value_dim + p.key_dim);
  return kernels;
}

namespace {

std::string why_of(const ChainKernel& chain) {
  if (chain.hopper) return "compute capability 9.0 has warpgroup products";
  return chain.narrow ? "32 columns of V a block: 64 would leave SMs idle" : "";
}

}  // namespace

void list_kernels(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const ForwardKernels kernels = kernels_of(plan);
  plan_expand_bias(builder, "chunk_intra");
  builder.kernel("chunk_intra", kernels.tokens ? "chunk_intra_tokens" : "chunk_intra",
                 kernels.tokens ? "intra_form asks for it" : "");
  if (plan.segmented) {
    builder.kernel("segment_scan", kernels.scan.hopper ? "segment_scan_sm90" : "segment_scan",
                   why_of(kernels.scan));
    builder.kernel("segment_merge", merge_kernel(plan.device, plan.problem.key_dim));
  }
  builder.kernel("forward", kernels.chains.hopper ? "chunk_delta_h_sm90" : "chunk_delta_h",
                 why_of(kernels.chains));
}

}  // namespace kda::cuda::staged
