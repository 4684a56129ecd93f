// SPDX-License-Identifier: Apache-2.0
// Ledger: the one place that sizes the caller's memory and hands out its blocks, by name.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "kda/plan.hpp"

namespace kda::plan {

namespace block {
// Blocks of the library's own checks and of the CPU backends. The buffers that stages share are in
// stage/buffers.hpp, blocks of one backend in its own folder.
inline constexpr const char* kThreadScratch = "thread_scratch";
inline constexpr const char* kFinalSlotMarks = "final_slot_marks";
inline constexpr const char* kCheckpointSlotMarks = "checkpoint_slot_marks";
/// int32, a slot every checkpoint_every tokens of each sequence, from checkpoint_offsets.
inline constexpr const char* kCheckpointPlaces = "checkpoint_places";
}  // namespace block

/// Appends a block (nothing for 0 bytes) to blocks that take `total` bytes so far. False if the
/// total would overflow.
inline bool add_block(std::vector<WorkspaceBlock>& blocks, std::size_t& total,
                      std::string_view name, std::size_t count, std::size_t size) {
  std::size_t bytes = 0;
  std::size_t rounded = 0;
  if (__builtin_mul_overflow(count, size, &bytes) ||
      __builtin_add_overflow(bytes, kWorkspaceAlignment - 1, &rounded))
    return false;
  rounded -= rounded % kWorkspaceAlignment;
  if (rounded == 0) return true;
  const std::size_t offset = total;
  if (__builtin_add_overflow(offset, rounded, &total) || total > (std::size_t{1} << 62))
    return false;
  blocks.push_back({std::string(name), offset, rounded});
  return true;
}

/// Address of a block at `base`; null if there is none of that name.
inline void* find_block(const std::vector<WorkspaceBlock>& blocks, void* base,
                        std::string_view name) {
  for (const WorkspaceBlock& entry : blocks)
    if (entry.name == name) return static_cast<char*>(base) + entry.offset;
  return nullptr;
}

/// Address of a block of the plan's workspace; null if it has none of that name.
inline void* find_block(const Plan& plan, void* workspace, std::string_view name) {
  return find_block(plan.workspace, workspace, name);
}

}  // namespace kda::plan
