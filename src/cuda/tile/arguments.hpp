// SPDX-License-Identifier: Apache-2.0
// Arguments of kernels: plain structs, filled by launches.cpp of a backend and passed by value.
#pragma once

#include <cstdint>

#include "cuda/tile/divisor.hpp"
#include "kda/types.hpp"

namespace kda::cuda {

enum class Element : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

/// A [B, T, heads, size] tensor; size has stride 1 (or `stride_c` for beta's heads).
struct RowView {
  void* base = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;  // elements
  Element type = Element::kBFloat16;
  bool whole_words = false;  ///< rows begin at multiples of 4 bytes
};

/// A buffer of states [slots, HV, rows, columns]; rows are K (kv) or V (vk).
struct StateView {
  void* base = nullptr;  ///< null: no such buffer
  int64_t stride_slot = 0, stride_head = 0, stride_row = 0;
  int64_t num_slots = 0;
  const int32_t* indices = nullptr;  ///< null: sequence n uses slot n
  const uint8_t* mask = nullptr;     ///< null: every sequence has its state
  int32_t bf16 = 0;
  int32_t vk = 0;
  int32_t vectors = 0;     ///< rows may be read four elements at a time
  int32_t first_slot = 0;  ///< an index below it means none
};

/// Transforms of g and beta (docs/operation.md).
struct GateView {
  GateMode gate_mode = GateMode::kLog;
  BetaMode beta_mode = BetaMode::kPlain;
  int32_t l2norm = 0;
  float lower_bound = -5;
  float scale = 1;
  const float* A_log = nullptr;    ///< [HV]
  const float* dt_bias = nullptr;  ///< [HV, K]
  int64_t stride_A = 0, stride_dt = 0;
};

/// Tokens of a sequence or of a part of it.
struct TokenRange {
  int64_t sequence = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

/// Where sequences and segments lie. Without `cu_seqlens` every sequence has `num_tokens` tokens.
/// `cu_seqlens` and `chunk_offsets` are checked copies in the workspace: non-decreasing, in range.
struct SequenceMap {
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;                  ///< T
  const int64_t* cu_seqlens = nullptr;     ///< [N + 1]
  const int64_t* chunk_offsets = nullptr;  ///< [N + 1] chunks of 64 tokens before each sequence
  const TokenRange* segments = nullptr;    ///< [num_segments]; null: one span a sequence
  int64_t num_segments = 0;
  Divisor chunks;  ///< without cu_seqlens: of each sequence
};

struct Shape {
  int64_t H = 1, HV = 1;
  int32_t K = 128, V = 128;
  Divisor heads;  ///< HV
  Divisor group;  ///< HV / H: value head -> q/k head
};

}  // namespace kda::cuda
