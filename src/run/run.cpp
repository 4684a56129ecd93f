// SPDX-License-Identifier: Apache-2.0
// run() and the stage calls: checks, then the chosen implementation's stages.
#include "kda/run.hpp"

#include "core/guard.hpp"
#include "core/text.hpp"
#include "plan/ledger.hpp"
#include "run/check_tensors.hpp"
#include "stage/implementation.hpp"

namespace kda {
namespace {

namespace block = plan::block;

Status find_implementation(const Plan& plan, const stage::Implementation** found) {
  for (const stage::Implementation* row : stage::registry())
    if (plan.implementation == row->name && !row->unavailable()) {
      *found = row;
      return {};
    }
  return Status(StatusCode::kUnsupported,
                cat("plan: no implementation of this build runs on ", plan.device.name));
}

template <class T>
T* block_of(const Plan& plan, void* workspace, const char* name) {
  return static_cast<T*>(plan::find_block(plan, workspace, name));
}

template <class Body>
Status checked_call(const Plan& plan, const Tensors& tensors, void* workspace,
                    std::size_t workspace_bytes, Body&& body) noexcept {
  return guarded([&] {
    const stage::Implementation* implementation = nullptr;
    KDA_RETURN_IF_ERROR(find_implementation(plan, &implementation));
    KDA_RETURN_IF_ERROR(check_workspace(plan, workspace, workspace_bytes));
    const stage::Sequences sequences(plan.problem, plan.cu_seqlens, tensors.cu_seqlens);
    KDA_RETURN_IF_ERROR(check_tensors(plan, tensors, sequences, workspace));
    return body(*implementation,
                stage::Call{plan.problem, tensors, sequences, plan.num_threads,
                            plan::find_block(plan, workspace, block::kThreadScratch)});
  });
}

Status run_scan_merge_forward(const Plan& plan, const stage::Implementation& implementation,
                              const stage::Call& call, void* workspace) {
  auto* M = block_of<float>(plan, workspace, block::kSegmentM);
  auto* B = block_of<float>(plan, workspace, block::kSegmentB);
  auto* states = block_of<float>(plan, workspace, block::kSegmentStates);
  stage::SegmentScan scan{call, plan.segments, M, B};
  scan.skip_last = true;
  KDA_RETURN_IF_ERROR(implementation.segment_scan(scan));
  KDA_RETURN_IF_ERROR(implementation.segment_merge({call, plan.segments, M, B, states}));
  return implementation.forward({call, plan.segments, states});
}

Status run_one_pass(const Plan& plan, const stage::Implementation& implementation,
                    const stage::Call& call, void* workspace) {
  auto* M = block_of<float>(plan, workspace, block::kSegmentM);
  auto* B = block_of<float>(plan, workspace, block::kSegmentB);
  auto* states = block_of<float>(plan, workspace, block::kSegmentStates);
  auto* o_zero = block_of<float>(plan, workspace, block::kOutputFromZero);
  auto* Qt = block_of<float>(plan, workspace, block::kTransitionOutput);
  auto* alive = block_of<int64_t>(plan, workspace, block::kAliveTokens);
  KDA_RETURN_IF_ERROR(implementation.segment_scan(
      {call, plan.segments, M, B, /*skip_last=*/false, o_zero, Qt, alive}));
  KDA_RETURN_IF_ERROR(implementation.segment_merge({call, plan.segments, M, B, states}));
  return implementation.segment_correct({call, plan.segments, M, B, states, o_zero, Qt, alive});
}

Status check_segments(const Plan& plan, const SegmentTensors& segments, bool needs_scan,
                      bool needs_states) {
  if (!plan.segmented) return invalid("plan: is not segmented");
  if (needs_scan && !segments.M) return invalid("M: pointer is null");
  if (needs_scan && !segments.B) return invalid("B: pointer is null");
  if (needs_states && !segments.states_in) return invalid("states_in: pointer is null");
  return {};
}

}  // namespace

Status run(const Plan& plan, const Tensors& tensors, void* workspace,
           std::size_t workspace_bytes) noexcept {
  return checked_call(
      plan, tensors, workspace, workspace_bytes,
      [&](const stage::Implementation& implementation, const stage::Call& call) {
        if (plan.problem.operation == Operation::kDecode) return implementation.decode({call});
        if (!plan.segmented) return implementation.forward({call, {}, nullptr});
        const bool one_pass = plan.options.segment_method == SegmentMethod::kOnePass;
        return one_pass ? run_one_pass(plan, implementation, call, workspace)
                        : run_scan_merge_forward(plan, implementation, call, workspace);
      });
}

Status segment_scan(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                    void* workspace, std::size_t workspace_bytes) noexcept {
  return checked_call(
      plan, tensors, workspace, workspace_bytes,
      [&](const stage::Implementation& implementation, const stage::Call& call) {
        KDA_RETURN_IF_ERROR(check_segments(plan, segments, true, false));
        return implementation.segment_scan({call, plan.segments, segments.M, segments.B});
      });
}

Status segment_merge(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                     void* workspace, std::size_t workspace_bytes) noexcept {
  return checked_call(plan, tensors, workspace, workspace_bytes,
                      [&](const stage::Implementation& implementation, const stage::Call& call) {
                        KDA_RETURN_IF_ERROR(check_segments(plan, segments, true, true));
                        return implementation.segment_merge(
                            {call, plan.segments, segments.M, segments.B, segments.states_in});
                      });
}

Status segment_forward(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                       void* workspace, std::size_t workspace_bytes) noexcept {
  return checked_call(plan, tensors, workspace, workspace_bytes,
                      [&](const stage::Implementation& implementation, const stage::Call& call) {
                        KDA_RETURN_IF_ERROR(check_segments(plan, segments, false, true));
                        return implementation.forward({call, plan.segments, segments.states_in});
                      });
}

}  // namespace kda
