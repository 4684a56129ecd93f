// SPDX-License-Identifier: Apache-2.0
// run() and the stage calls: checks, then the chosen implementation's stages.
#include "kda/run.hpp"

#include <tuple>

#include "core/guard.hpp"
#include "core/text.hpp"
#include "cuda/host/device.hpp"
#include "plan/ledger.hpp"
#include "run/check_tensors.hpp"
#include "stage/implementation.hpp"

namespace kda {
namespace {

namespace block = plan::block;

/// Null: there is none of this name.
const stage::Implementation* find_implementation(const Plan& plan) {
  for (const stage::Implementation* row : stage::registry())
    if (plan.implementation == row->name) return row;
  return nullptr;
}

template <class T>
T* block_of(const Plan& plan, void* workspace, const char* name) {
  return static_cast<T*>(plan::find_block(plan, workspace, name));
}

template <class Body>
Status checked_call(const Plan& plan, const Tensors& tensors, void* workspace,
                    std::size_t workspace_bytes, void* stream, Body&& body) noexcept {
  return guarded([&] {
    const stage::Implementation* implementation = find_implementation(plan);
    if (!implementation)
      return Status(StatusCode::kUnsupported,
                    cat("plan: no implementation of this build runs on ", plan.device.name));
    if (const char* reason = implementation->unavailable())
      return Status(StatusCode::kUnavailable,
                    cat("plan: ", implementation->name, " cannot run here: ", reason));
    KDA_RETURN_IF_ERROR(check_workspace(plan, workspace, workspace_bytes));
    // Device memory is not looked at from here.
    const bool host = plan.device.kind == DeviceKind::kCpu;
    const stage::Sequences sequences(plan.problem, plan.cu_seqlens,
                                     host ? tensors.cu_seqlens : nullptr);
    if (!host) KDA_RETURN_IF_ERROR(cuda::check_device(plan, tensors.trusted, workspace, stream));
    KDA_RETURN_IF_ERROR(check_tensors(plan, tensors, sequences, workspace));
    return body(*implementation,
                stage::Call{plan.problem, tensors, sequences, plan.num_threads,
                            plan::find_block(plan, workspace, block::kThreadScratch), &plan,
                            workspace, stream});
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
  KDA_RETURN_IF_ERROR(
      implementation.segment_merge({call, plan.segments, M, B, states, /*prepared=*/true}));
  return implementation.forward({call, plan.segments, states, /*prepared=*/true});
}

Status run_one_pass(const Plan& plan, const stage::Implementation& implementation,
                    const stage::Call& call, void* workspace) {
  auto* M = block_of<float>(plan, workspace, block::kSegmentM);
  auto* B = block_of<float>(plan, workspace, block::kSegmentB);
  auto* states = block_of<float>(plan, workspace, block::kSegmentStates);
  auto* o_zero = block_of<float>(plan, workspace, block::kOutputFromZero);
  auto* Qt = block_of<void>(plan, workspace, block::kTransitionOutput);
  auto* alive = block_of<int64_t>(plan, workspace, block::kExitToken);
  KDA_RETURN_IF_ERROR(implementation.segment_scan(
      {call, plan.segments, M, B, /*skip_last=*/false, o_zero, Qt, alive}));
  KDA_RETURN_IF_ERROR(implementation.segment_merge(
      {call, plan.segments, M, B, states, /*prepared=*/false, /*behind_first=*/true}));
  return implementation.segment_correct({call, plan.segments, M, B, states, o_zero, Qt, alive});
}

Status check_segments(const Plan& plan, const SegmentTensors& segments, bool needs_scan,
                      bool needs_states) {
  if (!plan.segmented) return invalid("plan: is not segmented");
  if (needs_scan && !segments.M) return invalid("M: pointer is null");
  if (needs_scan && !segments.B) return invalid("B: pointer is null");
  if (needs_states && !segments.states_in) return invalid("states_in: pointer is null");
  if (plan.device.kind == DeviceKind::kCpu) return {};
  for (const auto& [name, pointer, needed] :
       {std::tuple{"M", segments.M, needs_scan}, std::tuple{"B", segments.B, needs_scan},
        std::tuple{"states_in", segments.states_in, needs_states}})
    if (needed) KDA_RETURN_IF_ERROR(cuda::check_pointer(name, pointer));
  return {};
}

}  // namespace

Status run(const Plan& plan, const Tensors& tensors, void* workspace, std::size_t workspace_bytes,
           void* stream) noexcept {
  return checked_call(
      plan, tensors, workspace, workspace_bytes, stream,
      [&](const stage::Implementation& implementation, const stage::Call& call) {
        if (plan.problem.operation == Operation::kDecode) return implementation.decode({call});
        if (!plan.segmented) return implementation.forward({call, {}, nullptr});
        const bool one_pass = plan.options.segment_method == SegmentMethod::kOnePass;
        return one_pass ? run_one_pass(plan, implementation, call, workspace)
                        : run_scan_merge_forward(plan, implementation, call, workspace);
      });
}

Status segment_scan(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                    void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(
      plan, tensors, workspace, workspace_bytes, stream,
      [&](const stage::Implementation& implementation, const stage::Call& call) {
        KDA_RETURN_IF_ERROR(check_segments(plan, segments, true, false));
        return implementation.segment_scan({call, plan.segments, segments.M, segments.B});
      });
}

Status segment_merge(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(plan, tensors, workspace, workspace_bytes, stream,
                      [&](const stage::Implementation& implementation, const stage::Call& call) {
                        KDA_RETURN_IF_ERROR(check_segments(plan, segments, true, true));
                        return implementation.segment_merge(
                            {call, plan.segments, segments.M, segments.B, segments.states_in});
                      });
}

Status segment_forward(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                       void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(plan, tensors, workspace, workspace_bytes, stream,
                      [&](const stage::Implementation& implementation, const stage::Call& call) {
                        KDA_RETURN_IF_ERROR(check_segments(plan, segments, false, true));
                        return implementation.forward({call, plan.segments, segments.states_in});
                      });
}

namespace {

/// The buffers that a stage reads or writes; null ones are named.
Status check_stage(const Plan& plan, stage::ChunkStage which, const StageTensors& s) {
  using stage::ChunkStage;
  const bool intra = which == ChunkStage::kIntra, wu = which == ChunkStage::kRecomputeWU;
  const bool delta = which == ChunkStage::kDeltaH, o = which == ChunkStage::kO;
  const struct {
    const char* name;
    const void* pointer;
    bool needed;
  } rows[] = {{"w", s.w, !o},
              {"u", s.u, !o},
              {"kg", s.kg, delta},
              {"qg", s.qg, o},
              {"Aqk", s.Aqk, intra || o},
              {"T", s.T, wu},
              {"gamma", s.gamma, intra || delta},
              {"beta", s.beta, intra || delta},
              {"diag", s.diag, intra || o},
              {"h", s.h, delta || o},
              {"vn", s.vn, delta || o}};
  for (const auto& row : rows) {
    if (row.needed && !row.pointer) return invalid(row.name, ": pointer is null");
    if (plan.device.kind == DeviceKind::kCuda)
      KDA_RETURN_IF_ERROR(cuda::check_pointer(row.name, row.pointer));
    if (reinterpret_cast<std::uintptr_t>(row.pointer) % 16 != 0)
      return invalid(row.name, ": pointer is not aligned to 16 bytes");
  }
  return {};
}

Status run_chunk_stage(stage::ChunkStage which, const Plan& plan, const Tensors& tensors,
                       const StageTensors& stages, void* workspace, std::size_t workspace_bytes,
                       void* stream) noexcept {
  return checked_call(plan, tensors, workspace, workspace_bytes, stream,
                      [&](const stage::Implementation& implementation, const stage::Call& call) {
                        if (!implementation.chunk)
                          return Status(StatusCode::kUnsupported,
                                        cat("plan: ", implementation.name,
                                            " has no chunk stages (backend staged has)"));
                        KDA_RETURN_IF_ERROR(check_stage(plan, which, stages));
                        return implementation.chunk({call, which, stages});
                      });
}

}  // namespace

Status stage_sizes(const Plan& plan, StageSizes* sizes) noexcept {
  return guarded([&] {
    if (!sizes) return invalid("sizes: is null");
    for (const stage::Implementation* row : stage::registry())
      if (plan.implementation == row->name && row->stage_sizes) {
        *sizes = row->stage_sizes(plan);
        return Status{};
      }
    return Status(StatusCode::kUnsupported, cat("plan: '", plan.implementation,
                                                "' has no chunk stages (backend staged has)"));
  });
}

Status chunk_intra(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                   void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(stage::ChunkStage::kIntra, plan, tensors, stages, workspace,
                         workspace_bytes, stream);
}
Status recompute_w_u(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(stage::ChunkStage::kRecomputeWU, plan, tensors, stages, workspace,
                         workspace_bytes, stream);
}
Status chunk_delta_h(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(stage::ChunkStage::kDeltaH, plan, tensors, stages, workspace,
                         workspace_bytes, stream);
}
Status chunk_o(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
               void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(stage::ChunkStage::kO, plan, tensors, stages, workspace, workspace_bytes,
                         stream);
}

}  // namespace kda
