// SPDX-License-Identifier: Apache-2.0
#include "run/tail.hpp"

#include <cstdint>

#include "core/tail.hpp"
#include "core/text.hpp"

namespace kda {
namespace {

/// The words of a slot are one number, which is not behind `position`.
Status check_folded(const Problem& p, const Tensors& t, int64_t n, int64_t slot,
                    const char* of_source) {
  const int64_t folded = *tail_folded(p, t.tail, slot, 0);
  if (folded < 0)
    return invalid("tail.folded: ", of_source, "slot ", slot, " of sequence ", n, " has ", folded,
                   ", no tail was begun there");
  for (int64_t head = 1; head < p.num_value_heads; ++head)
    if (const int64_t other = *tail_folded(p, t.tail, slot, head); other != folded)
      return invalid("tail.folded: ", of_source, "slot ", slot, " of sequence ", n, " has ", folded,
                     " in head 0 and ", other, " in head ", head);
  if (folded > t.tail.positions[n])
    return invalid("positions: entry ", n, " = ", t.tail.positions[n], " is below ", folded,
                   ", the tokens that ", of_source, "slot ", slot, " has folded");
  return {};
}

Status check_accepted(const Problem& p, const Tensors& t, int64_t n, const TailStart& start) {
  const int64_t first = start.first_accepted();
  if (first < start.folded)
    return invalid("accepted_rows: sequence ", n, " has ", start.accepted,
                   ", more than the sure rows of its tail, ", start.sure());
  const int32_t* rows = t.tail.accepted_rows + n * p.tail->accepted_columns;
  for (int64_t i = 0; i < start.accepted; ++i) {
    if (i > 0 && rows[i] <= rows[i - 1])
      return invalid("accepted_rows: entry ", n, ", ", i, " = ", rows[i], " is not above ",
                     rows[i - 1]);
    if (first + rows[i] >= start.folded + p.tail->rows)
      return invalid("accepted_rows: entry ", n, ", ", i, " = ", rows[i],
                     " is beyond the rows of the tail, R = ", p.tail->rows);
  }
  return {};
}

Status check_sequence(const Problem& p, const Tensors& t, int64_t n, int64_t length) {
  const int64_t slot = state_slot(p, *p.initial_state, t.initial_state_indices, n);
  if (slot < 0) return {};
  if (p.tail->ring) {
    if (const int64_t rows = t.tail.positions[n]; rows < 0 || rows >= p.tail->rows)
      return invalid("positions: entry ", n, " = ", rows, " is outside 0..", p.tail->rows - 1,
                     ", the rows of a ring in front of a token");
    return {};
  }
  if (t.tail.positions[n] < 0)
    return invalid("positions: entry ", n, " = ", t.tail.positions[n], " is negative");
  if (t.tail.positions[n] > INT32_MAX - length)
    return invalid("positions: entry ", n, " = ", t.tail.positions[n], " and ", length,
                   " tokens are beyond int32");
  if (p.initial_state_mask && t.initial_state_mask[n] == 0) return {};
  const int64_t source = tail_source(p, t.tail, n, slot);
  if (source >= p.tail->num_slots)
    return invalid("sources: entry ", n, " = ", source, " is outside 0..", p.tail->num_slots - 1);
  if (source >= 0) KDA_RETURN_IF_ERROR(check_folded(p, t, n, source, "source "));
  const TailStart start = tail_start(p, t, n, 0);
  // A tail that begins writes the words of its slot; else they must be right, whichever state is
  // read.
  const bool begins = source >= 0 && start.position == *tail_folded(p, t.tail, source, 0);
  if (!begins) KDA_RETURN_IF_ERROR(check_folded(p, t, n, slot, ""));
  if (source >= 0 && start.folded < *tail_folded(p, t.tail, source, 0))
    return invalid("sources: entry ", n, ": slot ", slot, " has folded ", start.folded,
                   " tokens, fewer than its source ", source);
  if (start.sure() > p.tail->rows)
    return invalid("positions: entry ", n, " = ", start.position, " is ", start.sure(),
                   " tokens behind the boundary of slot ", slot, ", at ", start.folded,
                   ", and the tail has R = ", p.tail->rows, " rows");
  return check_accepted(p, t, n, start);
}

}  // namespace

Status check_tail(const Problem& problem, const Tensors& tensors,
                  const stage::Sequences& sequences) {
  for (int64_t n = 0; n < problem.num_sequences; ++n)
    KDA_RETURN_IF_ERROR(check_sequence(problem, tensors, n, sequences.length(n)));
  return {};
}

}  // namespace kda
