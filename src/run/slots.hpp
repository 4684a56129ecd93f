// SPDX-License-Identifier: Apache-2.0
// Checks of the slots of state pools: none is written twice, none is written by one sequence while
// another reads it.
#pragma once

#include "kda/run.hpp"
#include "stage/sequences.hpp"

namespace kda {

/// Refuses an index beyond a pool of `num_slots` slots.
Status check_index(const char* name, const int32_t* indices, int64_t count, int64_t num_slots);

/// Checkpoints of all sequences, where each has one every so many tokens.
int64_t total_checkpoints(const Problem& problem, const stage::Sequences& sequences);

/// Entries of checkpoint_indices.
int64_t num_checkpoint_indices(const Problem& problem, const stage::Sequences& sequences);

/// Two state buffers that are one pool: the same memory, looked at the same way.
bool same_pool(const StateDesc& a, const void* a_base, const StateDesc& b, const void* b_base);

/// Whether decode skips sequence n, which has no slot. Its num_accepted_tokens is in range.
bool is_skipped(const Problem& problem, const Tensors& tensors, int64_t n);

/// The workspace has the marks of slots, where the plan needs them. All indices are in range.
Status check_slots(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
                   void* workspace);

}  // namespace kda
