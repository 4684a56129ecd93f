// SPDX-License-Identifier: Apache-2.0
// Pass: the unit of work of the blocked backend: some value columns of one head over one span of
// tokens. Forward, scan and the one-pass form are passes with other columns, sources and sinks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.hpp"
#include "cpu/blocked/kernels.hpp"
#include "kda/plan.hpp"
#include "stage/forward.hpp"

namespace kda::cpu::blocked {

/// So that whatever stands behind it in a workspace is aligned.
constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

/// One state in memory: [K, columns], or [columns, K] if `transposed`.
struct StateRef {
  char* data = nullptr;  ///< null: none
  DType dtype = DType::kFloat32;
  int64_t row_stride_bytes = 0;
  bool transposed = false;
};

/// Slot `slot` of a problem's state buffer; none if the slot is negative.
StateRef state_ref(const Problem& problem, const StateDesc& desc, void* base, int64_t slot,
                   int64_t head);
/// Entry (index, head) of a dense fp32 [.., HV, K, columns] buffer.
StateRef dense_ref(const Problem& problem, const float* base, int64_t index, int64_t head,
                   int64_t columns);
/// Where sequence n starts from; none means zero.
StateRef initial_ref(const stage::Call& call, int64_t n, int64_t head);
/// Where the final state of sequence n goes; none means nowhere.
StateRef final_ref(const stage::Call& call, int64_t n, int64_t head);

/// One output tensor at (first token, head); null: no output.
struct RowSink {
  char* data = nullptr;
  int64_t token_stride_bytes = 0;
  DType dtype = DType::kFloat32;
};

/// States after every `every` tokens of the sequence that the span belongs to.
struct CheckpointSink {
  int64_t every = 0;            ///< 0: none
  int64_t sequence_begin = 0;   ///< flattened token
  int64_t first_index = 0;      ///< of the sequence's checkpoints
  const float* kept = nullptr;  ///< dense states of a backward; null: the problem's checkpoints
};

struct Pass {
  int64_t begin = 0;  ///< flattened tokens
  int64_t end = 0;
  int64_t head = 0;
  int64_t num_columns = 0;   ///< of the state: V, or K for the transition M
  int64_t first_column = 0;  ///< this pass: [first_column, last_column), multiples of kBlockV
  int64_t last_column = 0;
  bool identity_start = false;  ///< start from I instead of `state_in`
  StateRef state_in;
  StateRef state_out;
  RowSource v;  ///< null data: zero
  RowSink out;
  CheckpointSink checkpoints;
  CheckpointSink kept;
  /// Stop once the Frobenius norm of the state is at most this (the rest then counts as zero).
  float exit_norm = -1;
};

/// Memory of one thread, carved from the call's scratch.
struct ThreadScratch {
  Group* group;
  float* v;            ///< [kGroupTokens, kBlockV]
  float* o;            ///< [kGroupTokens, kBlockV]
  float* row;          ///< [kRowStride]
  const char** lines;  ///< what prefetches ask for
  float* decode;       ///< [2, kChunk, kMaxHeadDim] v and o of a decode chunk
  float* states;       ///< blocks of [K rounded up, kBlockV], as many as the wider of V and K needs
  float* next;         ///< one block
};

std::size_t thread_scratch_bytes(const Problem& problem);
ThreadScratch thread_scratch(const stage::Call& call, int32_t slot);

inline int64_t state_rows(const Problem& p) {
  return (p.key_dim + kRowTile - 1) / kRowTile * kRowTile;
}
/// Elements of a row of g in memory.
inline int64_t gate_columns(const Problem& p) { return has_head_gate(p) ? 1 : p.key_dim; }
inline int64_t num_blocks(int64_t columns) { return (columns + kBlockV - 1) / kBlockV; }

/// Modes and parameters of a head for prepare(), without the rows of its tokens.
PrepareArgs mode_args(const stage::Call& call, int64_t head);
/// Source of q, k, g, beta for prepare(), from flattened token `begin`.
PrepareArgs prepare_args(const stage::Call& call, int64_t begin, int64_t head);
RowSource row_source(const Problem& p, const TensorDesc& desc, const void* base, int64_t token,
                     int64_t head);

/// One block of columns between memory and [K rounded up, kBlockV] fp32.
void load_block(const Kernels& kernels, const Problem& p, const StateRef& ref, int64_t column,
                int64_t num_columns, float* row, float* block);
void store_block(const Kernels& kernels, const Problem& p, const float* block, int64_t column,
                 int64_t num_columns, float* row, const StateRef& ref);

/// Collects the cache lines of rows. Rows of one head lie far apart in memory, which the
/// processor's own prefetcher does not follow.
class LineList {
 public:
  explicit LineList(const char** lines) : first_(lines), end_(lines) {}

  void add(const char* rows, int64_t stride_bytes, int64_t count, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t at = 0; at < bytes; at += kLine) *end_++ = rows + i * stride_bytes + at;
  }
  LineQueue queue() const { return {first_, end_}; }

 private:
  const char** first_;
  const char** end_;
};

/// Runs the pass; returns the number of tokens before an early exit (all without one).
int64_t run_pass(const Kernels& kernels, const stage::Call& call, const Pass& pass,
                 const ThreadScratch& scratch);

}  // namespace kda::cpu::blocked
