// SPDX-License-Identifier: Apache-2.0
#include "cuda/fused/kernels.hpp"

#include <algorithm>

#include "core/layout.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/segments/kernels.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::fused {

bool has_fp16_operands(const Problem& problem) {
  return stage::transition_norm_never_grows(problem) && problem.g.dtype == problem.q.dtype;
}

int64_t check_tokens_of(const Problem& problem) {
  return stage::transition_norm_never_grows(problem) && !problem.batch_invariant
             ? sm90::kNormCheckTokens
             : 0;
}

Kernels kernels_of(const Plan& plan) {
  return {.fp16_operands = has_fp16_operands(plan.problem),
          .head_gate = has_head_gate(plan.problem),
          .keeps = plan.resolved.keep == KeepPolicy::kChunks};
}

std::string why_operands(const Problem& problem) {
  if (has_fp16_operands(problem)) return "operands in fp16, as no factor and no decay is above 1";
  return problem.g.dtype == problem.q.dtype || has_head_gate(problem)
             ? "operands in bf16, as factors or decays may be above 1"
             : "operands in bf16, as g has another type than q";
}

namespace {

const char* name_of(const Kernels& kernels) {
  if (kernels.head_gate) return "fused_prefill_head_gate";
  if (kernels.keeps)
    return kernels.fp16_operands ? "fused_prefill_keep_fp16" : "fused_prefill_keep";
  return kernels.fp16_operands ? "fused_prefill_fp16" : "fused_prefill";
}

/// Whether a sequence has a third segment: the scan has given second ones their start states.
bool merges_behind_first(const Plan& plan) {
  for (std::size_t n = 0; n + 1 < plan.segment_offsets.size(); ++n)
    if (plan.segment_offsets[n + 1] - plan.segment_offsets[n] > 2) return true;
  return false;
}

}  // namespace

void list_kernels(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Kernels kernels = kernels_of(plan);
  const char* name = name_of(kernels);
  if (plan.device_cut.on) {
    builder.kernel("segment_cut", "device_cut");
    builder.kernel("segment_scan", name, why_operands(plan.problem));
    builder.kernel("segment_merge", "segment_merge_walking", "sequences that are cut, if any");
    return builder.kernel("segment_correct", "segment_correct_walking",
                          "sequences that are cut, if any");
  }
  const bool one_pass = plan.segmented && plan.resolved.segment_method == SegmentMethod::kOnePass;
  builder.kernel(plan.segmented ? "segment_scan" : "forward", name, why_operands(plan.problem));
  if (!plan.segmented) return;
  if (plan.requested.spans) {
    builder.kernel("segment_scan", "segment_compose", "the maps of spans");
    builder.kernel("segment_merge", "segment_place", "the states before spans");
  }
  if (!one_pass) {
    builder.kernel("segment_merge", merge_kernel(plan.device, plan.problem.key_dim));
    return builder.kernel("forward", name);
  }
  if (merges_behind_first(plan)) builder.kernel("segment_merge", "segment_merge_sm90");
  builder.kernel("segment_correct", "segment_correct");
}

}  // namespace kda::cuda::fused
