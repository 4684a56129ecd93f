// SPDX-License-Identifier: Apache-2.0
// Ledger: the one place that sizes the workspace and hands out its blocks, by name.
#pragma once

#include <cstddef>
#include <string_view>

#include "kda/plan.hpp"

namespace kda::plan {

namespace block {
inline constexpr const char* kThreadScratch = "thread_scratch";
inline constexpr const char* kFinalSlotMarks = "final_slot_marks";
inline constexpr const char* kCheckpointSlotMarks = "checkpoint_slot_marks";
inline constexpr const char* kSegmentM = "segment_M";
inline constexpr const char* kSegmentB = "segment_B";
inline constexpr const char* kSegmentStates = "segment_states";
inline constexpr const char* kOutputFromZero = "output_from_zero";
inline constexpr const char* kTransitionOutput = "transition_output";
inline constexpr const char* kOutputResidual = "output_residual";
inline constexpr const char* kExitToken = "exit_token";
inline constexpr const char* kSegmentUnits = "segment_units";
inline constexpr const char* kSequenceMap = "sequence_map";
inline constexpr const char* kDeviceFlags = "device_flags";
inline constexpr const char* kFactorW = "factor_w";
inline constexpr const char* kFactorU = "factor_u";
inline constexpr const char* kFactorKg = "factor_kg";
inline constexpr const char* kFactorQg = "factor_qg";
inline constexpr const char* kFactorAqk = "factor_Aqk";
inline constexpr const char* kFactorScalars = "factor_scalars";
inline constexpr const char* kHandoffStates = "handoff_states";
inline constexpr const char* kHandoffFlags = "handoff_flags";
}  // namespace block

/// Appends a block (nothing for 0 bytes); false if the total would overflow.
inline bool add_block(Plan& plan, const char* name, std::size_t count, std::size_t size) {
  std::size_t bytes = 0;
  std::size_t rounded = 0;
  if (__builtin_mul_overflow(count, size, &bytes) ||
      __builtin_add_overflow(bytes, kWorkspaceAlignment - 1, &rounded))
    return false;
  rounded -= rounded % kWorkspaceAlignment;
  if (rounded == 0) return true;
  const std::size_t offset = plan.workspace_bytes;
  if (__builtin_add_overflow(offset, rounded, &plan.workspace_bytes) ||
      plan.workspace_bytes > (std::size_t{1} << 62))
    return false;
  plan.workspace.push_back({name, offset, rounded});
  return true;
}

/// Address of a block; null if the plan has none of that name.
inline void* find_block(const Plan& plan, void* workspace, std::string_view name) {
  for (const WorkspaceBlock& entry : plan.workspace)
    if (entry.name == name) return static_cast<char*>(workspace) + entry.offset;
  return nullptr;
}

}  // namespace kda::plan
