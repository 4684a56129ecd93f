// SPDX-License-Identifier: Apache-2.0
// Where elements live: the shapes that a Problem implies for each of its tensors, and addresses.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "kda/problem.hpp"

namespace kda {

using Shape = std::array<int64_t, 4>;  // unused trailing dimensions are 1

inline Shape qk_shape(const Problem& p) { return {p.batch, p.num_tokens, p.num_heads, p.key_dim}; }
inline Shape v_shape(const Problem& p) {
  return {p.batch, p.num_tokens, p.num_value_heads, p.value_dim};
}
inline Shape g_shape(const Problem& p) {
  return {p.batch, p.num_tokens, p.num_value_heads, p.key_dim};
}
inline Shape beta_shape(const Problem& p) { return {p.batch, p.num_tokens, p.num_value_heads, 1}; }
inline Shape state_shape(const Problem& p, const StateDesc& state) {
  const bool kv = p.state_layout == StateLayout::kKV;
  return {state.num_slots, p.num_value_heads, kv ? p.key_dim : p.value_dim,
          kv ? p.value_dim : p.key_dim};
}

inline Shape tail_k_shape(const Problem& p, const TailDesc& tail) {
  return {tail.num_slots, p.num_heads, tail.rows, p.key_dim};
}
inline Shape tail_g_shape(const Problem& p, const TailDesc& tail) {
  return {tail.num_slots, p.num_value_heads, tail.rows, p.key_dim};
}
inline Shape tail_v_new_shape(const Problem& p, const TailDesc& tail) {
  return {tail.num_slots, p.num_value_heads, tail.rows, p.value_dim};
}
inline Shape tail_beta_shape(const Problem& p, const TailDesc& tail) {
  return {tail.num_slots, p.num_value_heads, tail.rows, 1};
}
inline Shape tail_folded_shape(const Problem& p, const TailDesc& tail) {
  return {tail.num_slots, p.num_value_heads, 1, 1};
}

inline bool has_split_states(const Problem& p) { return p.tail && p.tail->split; }
inline bool has_ring(const Problem& p) { return p.tail && p.tail->ring; }

/// First element of row (flattened token, head) of a [B, T, heads, ..] tensor.
inline int64_t row_offset(const Problem& p, const TensorDesc& desc, int64_t flat_token,
                          int64_t head) {
  const int64_t b = flat_token / p.num_tokens;
  const int64_t t = flat_token % p.num_tokens;
  return b * desc.strides[0] + t * desc.strides[1] + head * desc.strides[2];
}

inline int64_t state_offset(const StateDesc& state, int64_t slot, int64_t head) {
  return slot * state.tensor.strides[0] + head * state.tensor.strides[1];
}

/// The slot that an index names; -1: none.
inline int64_t slot_or_none(const Problem& p, int64_t index) {
  return index < p.first_slot ? -1 : index;
}

/// Slot that entry `i` of a buffer's index array names (slot i without one); -1: none.
inline int64_t state_slot(const Problem& p, const StateDesc& state, const int32_t* indices,
                          int64_t i) {
  if (!state.indexed) return i;
  return slot_or_none(p, indices[i]);
}

/// A call that writes into the pool of initial_state.
inline bool in_place(const Problem& p) {
  return p.tail || (p.operation == Operation::kDecode && !p.final_state);
}

/// Columns of the index arrays of initial_state, and of final_state.
inline int64_t initial_columns(const Problem& p) {
  return in_place(p) && !p.tail ? p.state_index_columns : 1;
}
inline int64_t final_columns(const Problem& p) { return p.state_index_columns; }

/// Decode skips a sequence whose initial_state has no slot: in place, and where it stores a state a
/// token.
inline bool skips_sequences(const Problem& p) { return in_place(p) || p.state_index_columns > 1; }
/// It writes zeros where no token is computed.
inline bool zeroes_skipped(const Problem& p) { return p.zero_skipped || p.first_slot > 0; }

/// A forward does so in the rows of sequences whose initial_state has no slot.
inline bool zeroes_without_slot(const Problem& p) {
  return p.operation == Operation::kForward && p.zero_skipped;
}

/// Most tokens a sequence of a decode with a tail: the others are at most 15 sure rows. A ring is
/// folded behind each token.
inline int64_t most_tail_tokens(const TailDesc& tail) {
  return tail.ring ? 1 : tail.rows - (kTailBoundary - 1);
}

/// Most tokens a sequence of such a call. `cu_seqlens`: empty where nobody knows lengths yet.
inline int64_t tail_tokens(const Problem& p, std::span<const int64_t> cu_seqlens) {
  if (!p.cu_seqlens) return p.num_tokens;
  if (cu_seqlens.empty()) return std::min(p.num_tokens, most_tail_tokens(*p.tail));
  int64_t most = 0;
  for (std::size_t n = 0; n + 1 < cu_seqlens.size(); ++n)
    most = std::max(most, cu_seqlens[n + 1] - cu_seqlens[n]);
  return most;
}

/// Whether arrays have S columns, one a token of a sequence.
inline bool has_token_columns(const Problem& p) {
  return p.state_index_columns > 1 || p.token_parents;
}

/// Most tokens a sequence of a decode.
inline int64_t most_decode_tokens(const Problem& p) {
  return p.tail ? most_tail_tokens(*p.tail) : kMaxDecodeTokens;
}

/// Tokens of sequence n that are computed, of `length`: those before the first one that its tree
/// leaves out. `parents`: [N, S], or null.
inline int64_t computed_tokens(const Problem& p, const int32_t* parents, int64_t n,
                               int64_t length) {
  for (int64_t t = 1; p.token_parents && t < length; ++t)
    if (parents[n * p.state_index_columns + t] < 0) return t;
  return length;
}

/// Value heads of a q/k head.
inline int64_t group_size(const Problem& p) { return p.num_value_heads / p.num_heads; }

inline int64_t q_head_of(const Problem& p, int64_t value_head) {
  return p.head_map == HeadMap::kTiled ? value_head % p.num_heads : value_head / group_size(p);
}

/// Value head `j` of those that read a q/k head, 0 <= j < group_size().
inline int64_t value_head_of(const Problem& p, int64_t q_head, int64_t j) {
  return p.head_map == HeadMap::kTiled ? q_head + j * p.num_heads : q_head * group_size(p) + j;
}

/// Whether g, or its gradient, has one element a head for all channels.
inline bool is_a_head(const Problem& p, const TensorDesc& gate) {
  return p.key_dim > 1 && gate.strides[3] == 0;
}
inline bool has_head_gate(const Problem& p) { return is_a_head(p, p.g); }
/// [HV, K] of dt_bias and its gradient, and whether it has one element a head for all channels.
inline Shape bias_shape(const Problem& p) { return {p.num_value_heads, p.key_dim, 1, 1}; }
inline bool is_bias_a_head(const Problem& p, const TensorDesc& bias) {
  return p.key_dim > 1 && bias.strides[1] == 0;
}
inline bool has_head_bias(const Problem& p) { return p.dt_bias && is_bias_a_head(p, *p.dt_bias); }

inline const char* at_bytes(const void* base, const TensorDesc& desc, int64_t element) {
  return static_cast<const char*>(base) + element * dtype_size(desc.dtype);
}
inline char* at_bytes(void* base, const TensorDesc& desc, int64_t element) {
  return static_cast<char*>(base) + element * dtype_size(desc.dtype);
}

/// Number of checkpoints of one sequence.
inline int64_t num_checkpoints(const Problem& p, int64_t length) {
  return p.checkpoints ? length / p.checkpoint_every : 0;
}

}  // namespace kda
