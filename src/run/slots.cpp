// SPDX-License-Identifier: Apache-2.0
#include "run/slots.hpp"

#include <cstring>

#include "core/layout.hpp"
#include "core/tail.hpp"
#include "core/text.hpp"
#include "plan/ledger.hpp"

namespace kda {
namespace {

/// Who writes each slot of a pool: 0 nobody, n + 1 sequence n, -1 a checkpoint.
class SlotMarks {
 public:
  explicit SlotMarks(void* block, int64_t num_slots) : marks_(static_cast<int32_t*>(block)) {
    if (marks_) std::memset(marks_, 0, static_cast<std::size_t>(num_slots) * sizeof(int32_t));
  }
  Status write(const char* name, int64_t slot, int32_t writer) {
    if (!marks_ || slot < 0) return {};
    if (marks_[slot] != 0) return invalid(name, ": slot ", slot, " would be written twice");
    marks_[slot] = writer;
    return {};
  }
  Status read(const char* name, int64_t slot, int32_t reader) const {
    if (!marks_ || slot < 0 || marks_[slot] == 0 || marks_[slot] == reader) return {};
    return invalid(name, ": slot ", slot, " of sequence ", reader - 1,
                   " would be written by another while it is read");
  }

 private:
  int32_t* marks_;
};

class SlotChecker {
 public:
  SlotChecker(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
              void* workspace)
      : plan_(plan), p_(plan.problem), t_(tensors), sequences_(sequences), workspace_(workspace) {}

  Status run() { return in_place(p_) ? check_decode_slots() : check_forward_slots(); }

 private:
  Status check_decode_slots() {
    const int64_t S = initial_columns(p_);
    SlotMarks marks(plan::find_block(plan_, workspace_, plan::block::kFinalSlotMarks),
                    p_.initial_state->num_slots);
    if (!p_.initial_state->indexed) return {};
    const auto slot = [&](int64_t n, int64_t column) {
      return state_slot(p_, *p_.initial_state, t_.initial_state_indices, n * S + column);
    };
    for (int64_t n = 0; n < p_.num_sequences; ++n) {
      const int64_t source = slot(n, accepted(n) - 1);
      const int64_t written = S == 1 ? 1 : computed(n);
      if (source < 0) continue;
      for (int64_t t = 0; t < written; ++t)
        KDA_RETURN_IF_ERROR(
            marks.write("initial_state_indices", slot(n, t), static_cast<int32_t>(n + 1)));
    }
    for (int64_t n = 0; n < p_.num_sequences; ++n)
      if (reads_state(n))
        KDA_RETURN_IF_ERROR(marks.read("initial_state_indices", slot(n, accepted(n) - 1),
                                       static_cast<int32_t>(n + 1)));
    return p_.tail ? check_sources(marks) : Status{};
  }
  /// A boundary state that others read is nobody's slot in this call.
  Status check_sources(const SlotMarks& marks) const {
    for (int64_t n = 0; n < p_.num_sequences; ++n) {
      const int64_t own = state_slot(p_, *p_.initial_state, t_.initial_state_indices, n);
      if (own >= 0 && reads_state(n))
        KDA_RETURN_IF_ERROR(
            marks.read("sources", tail_source(p_, t_.tail, n, own), static_cast<int32_t>(n + 1)));
    }
    return {};
  }
  bool reads_state(int64_t n) const {
    return !p_.initial_state_mask || t_.initial_state_mask[n] != 0;
  }
  int64_t computed(int64_t n) const {
    return computed_tokens(p_, t_.token_parents, n, sequences_.length(n));
  }
  int64_t accepted(int64_t n) const {
    return p_.num_accepted_tokens ? t_.num_accepted_tokens[n] : 1;
  }

  Status check_forward_slots() {
    SlotMarks finals(plan::find_block(plan_, workspace_, plan::block::kFinalSlotMarks),
                     p_.final_state ? p_.final_state->num_slots : 0);
    SlotMarks others(plan::find_block(plan_, workspace_, plan::block::kCheckpointSlotMarks),
                     p_.checkpoints ? p_.checkpoints->num_slots : 0);
    const bool shared = p_.final_state && p_.checkpoints &&
                        same_pool(*p_.final_state, t_.final_state, *p_.checkpoints, t_.checkpoints);
    SlotMarks& checkpoints = shared ? finals : others;
    const int64_t S = final_columns(p_);
    for (int64_t n = 0; p_.final_state && n < p_.num_sequences; ++n) {
      const int64_t written = S == 1 ? 1 : is_skipped(p_, t_, n) ? 0 : computed(n);
      for (int64_t t = 0; t < written; ++t)
        KDA_RETURN_IF_ERROR(
            finals.write("final_state_indices",
                         state_slot(p_, *p_.final_state, t_.final_state_indices, n * S + t),
                         static_cast<int32_t>(n + 1)));
    }
    const int64_t count = num_checkpoint_indices(p_, sequences_);
    for (int64_t c = 0; c < count; ++c) {
      if (p_.checkpoint_offsets && t_.checkpoint_offsets[c] <= 0) continue;
      KDA_RETURN_IF_ERROR(checkpoints.write(
          "checkpoint_indices", state_slot(p_, *p_.checkpoints, t_.checkpoint_indices, c), -1));
    }
    if (!p_.initial_state) return {};
    if (p_.final_state &&
        same_pool(*p_.initial_state, t_.initial_state, *p_.final_state, t_.final_state))
      KDA_RETURN_IF_ERROR(check_reads(finals));
    if (p_.checkpoints &&
        same_pool(*p_.initial_state, t_.initial_state, *p_.checkpoints, t_.checkpoints))
      KDA_RETURN_IF_ERROR(check_reads(checkpoints));
    return {};
  }

  Status check_reads(const SlotMarks& marks) {
    for (int64_t n = 0; n < p_.num_sequences; ++n) {
      if (reads_state(n))
        KDA_RETURN_IF_ERROR(marks.read(
            "initial_state_indices", state_slot(p_, *p_.initial_state, t_.initial_state_indices, n),
            static_cast<int32_t>(n + 1)));
    }
    return {};
  }

  const Plan& plan_;
  const Problem& p_;
  const Tensors& t_;
  const stage::Sequences& sequences_;
  void* workspace_;
};

}  // namespace

Status check_index(const char* name, const int32_t* indices, int64_t count, int64_t num_slots) {
  if (count > 0 && !indices) return invalid(name, ": pointer is null");
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] >= num_slots) {
      if (num_slots == 0)
        return invalid(name, ": entry ", i, " = ", indices[i],
                       ", but the buffer has num_slots = 0");
      return invalid(name, ": entry ", i, " = ", indices[i], " is outside 0..", num_slots - 1,
                     " (a negative one means none)");
    }
  return {};
}

int64_t total_checkpoints(const Problem& problem, const stage::Sequences& sequences) {
  int64_t total = 0;
  for (int64_t n = 0; problem.checkpoints && n < problem.num_sequences; ++n)
    total += num_checkpoints(problem, sequences.length(n));
  return total;
}

int64_t num_checkpoint_indices(const Problem& problem, const stage::Sequences& sequences) {
  return problem.checkpoint_offsets ? problem.num_sequences : total_checkpoints(problem, sequences);
}

bool same_pool(const StateDesc& a, const void* a_base, const StateDesc& b, const void* b_base) {
  return a_base == b_base && a.num_slots == b.num_slots && a.tensor.dtype == b.tensor.dtype &&
         a.tensor.strides == b.tensor.strides;
}

bool is_skipped(const Problem& p, const Tensors& t, int64_t n) {
  if (!p.initial_state || !skips_sequences(p)) return false;
  const int64_t column = p.num_accepted_tokens ? t.num_accepted_tokens[n] - 1 : 0;
  return state_slot(p, *p.initial_state, t.initial_state_indices, n * initial_columns(p) + column) <
         0;
}

Status check_slots(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
                   void* workspace) {
  return SlotChecker(plan, tensors, sequences, workspace).run();
}

}  // namespace kda
