// SPDX-License-Identifier: Apache-2.0
// Packed sequences with tokens of no sequence behind them, as a padded batch in a CUDA graph has
// them. Lengths of the host must cover all tokens, so such inputs are for plans from bounds.
#pragma once

#include "support/harness.hpp"

namespace kda::test {

/// `inputs`, whose rows are dense, without their last sequence: its tokens stay, and hold NaN, Inf
/// and huge values.
inline check::Inputs with_rows_behind(check::Inputs inputs) {
  Problem& p = inputs.problem;
  inputs.cu_seqlens.pop_back();
  --p.num_sequences;
  if (p.initial_state && !p.initial_state->indexed) p.initial_state->num_slots = p.num_sequences;
  poison_rows(&inputs, inputs.cu_seqlens.back(), p.num_tokens);
  return inputs;
}

/// Those inputs without the tokens of no sequence.
inline check::Inputs without_rows_behind(check::Inputs inputs) {
  inputs.problem.num_tokens = inputs.cu_seqlens.back();
  return inputs;
}

/// Whether every byte of rows [begin, end) of a row-major buffer of `rows` rows is 0.
inline bool rows_are_zero(const io::Buffer& buffer, int64_t rows, int64_t begin, int64_t end) {
  const auto row = static_cast<int64_t>(buffer.size()) / rows;
  return std::all_of(buffer.data() + begin * row, buffer.data() + end * row,
                     [](std::byte x) { return x == std::byte{0}; });
}

}  // namespace kda::test
