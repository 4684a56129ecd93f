// SPDX-License-Identifier: Apache-2.0
// Parts that the CPU backends plan alike.
#pragma once

#include "core/layout.hpp"
#include "plan/builder.hpp"
#include "plan/ledger.hpp"

namespace kda::cpu {

/// SegmentPolicy::kAuto.
inline plan::Partition never_cut(const plan::Workload&, CostEstimate*) {
  return plan::uncut("auto: the CPU never changes its algorithm by length or threads");
}

inline std::string serves_every_tail(const registry::Request&) { return {}; }

/// A tail's rows depend on each other, and its heads share keys.
inline void list_tail(plan::PlanBuilder& builder) {
  const Problem& p = builder.problem();
  builder.drop_segments();
  builder.stage("tail", p.num_sequences * p.num_heads,
                "one (sequence, q/k head) a task: folds, then rows from boundary states");
}

/// Room to look for slots that would be written twice, which only a host that reads the indices can
/// do (run/check_tensors.cpp).
inline void book_slot_marks(plan::PlanBuilder& builder) {
  const Problem& p = builder.problem();
  const auto& written = in_place(p) ? p.initial_state : p.final_state;
  const bool indexed = (p.initial_state && p.initial_state->indexed) ||
                       (p.final_state && p.final_state->indexed) ||
                       (p.checkpoints && p.checkpoints->indexed);
  if (written && indexed)
    builder.book(plan::block::kFinalSlotMarks, static_cast<std::size_t>(written->num_slots),
                 sizeof(int32_t));
  if (p.checkpoints && indexed)
    builder.book(plan::block::kCheckpointSlotMarks,
                 static_cast<std::size_t>(p.checkpoints->num_slots), sizeof(int32_t));
}

}  // namespace kda::cpu
