// SPDX-License-Identifier: Apache-2.0
// decode(): tasks over (sequence, value head); one chunk of tokens each, or one token at a time
// where every token's state is stored.
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/blocked/work.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

StateRef initial_slot(const stage::Call& call, int64_t n, int64_t column, int64_t head) {
  const Problem& p = call.problem;
  const int64_t slot = state_slot(p, *p.initial_state, call.tensors.initial_state_indices,
                                  n * initial_columns(p) + column);
  return state_ref(p, *p.initial_state, call.tensors.initial_state, slot, head);
}

/// Where the state after token t goes.
StateRef token_slot(const stage::Call& call, int64_t n, int64_t t, int64_t head) {
  if (in_place(call.problem)) return initial_slot(call, n, t, head);
  const Problem& p = call.problem;
  const int64_t slot =
      state_slot(p, *p.final_state, call.tensors.final_state_indices, n * final_columns(p) + t);
  return state_ref(p, *p.final_state, call.tensors.final_state, slot, head);
}

/// A state of zeros to start from: one row for all.
StateRef zero_ref(const Problem& p, const ThreadScratch& scratch) {
  std::fill(scratch.row, scratch.row + std::max(p.key_dim, p.value_dim), 0.0f);
  return {reinterpret_cast<char*>(scratch.row), DType::kFloat32, 0,
          p.state_layout == StateLayout::kVK};
}

void move_rows(const Kernels& kernels, const stage::Call& call, int64_t token, int64_t count,
               int64_t head, bool load, float* rows) {
  const Problem& p = call.problem;
  const int V = static_cast<int>(p.value_dim);
  const int padded = static_cast<int>(num_blocks(V)) * kBlockV;
  const TensorDesc& desc = load ? p.v : p.o;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = row_offset(p, desc, token + i, head);
    if (load)
      kernels.load_row(at_bytes(call.tensors.v, desc, at), desc.dtype, V, padded,
                       rows + i * padded);
    else
      kernels.store_row(rows + i * padded, desc.dtype, V, at_bytes(call.tensors.o, desc, at));
  }
}

/// Tokens [token, token + count) as one chunk: state_in -> outputs, state_out (may be none).
void decode_chunk(const Kernels& kernels, const stage::Call& call, int64_t token, int64_t count,
                  int64_t head, const StateRef& in, const StateRef& out,
                  const ThreadScratch& scratch) {
  const Problem& p = call.problem;
  PrepareArgs prepare = prepare_args(call, token, head);
  prepare.num_tokens = static_cast<int>(count);
  kernels.prepare(prepare, *scratch.group);

  const int64_t row_elems = kChunk * num_blocks(p.value_dim) * kBlockV;
  float* v = scratch.decode;
  float* o = scratch.decode + row_elems;
  std::fill(v, v + row_elems, 0.0f);
  move_rows(kernels, call, token, count, head, true, v);

  DecodeArgs args;
  args.group = scratch.group;
  args.state_in = in.data;
  args.state_out = out.data;
  args.row_stride_bytes_in = in.row_stride_bytes;
  args.row_stride_bytes_out = out.row_stride_bytes;
  args.dtype_in = in.dtype;
  args.dtype_out = out.dtype;
  args.value_dim = static_cast<int>(p.value_dim);
  args.v = v;
  args.o = o;
  (in.transposed ? kernels.decode_vk : kernels.decode_kv)(args);
  move_rows(kernels, call, token, count, head, false, o);
}

void copy_state(const Kernels& kernels, const Problem& p, const StateRef& in, const StateRef& out,
                const ThreadScratch& scratch) {
  for (int64_t column = 0; column < p.value_dim; column += kBlockV) {
    if (in.data)
      load_block(kernels, p, in, column, p.value_dim, scratch.row, scratch.next);
    else
      std::fill_n(scratch.next, state_rows(p) * kBlockV, 0.0f);
    store_block(kernels, p, scratch.next, column, p.value_dim, scratch.row, out);
  }
}

/// From a state of the caller's to a final_state of its own.
void decode_across(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t head,
                   const ThreadScratch& scratch) {
  StateRef in = initial_ref(call, n, head);
  const StateRef out = final_ref(call, n, head);
  const int64_t count = call.sequences.length(n);
  if (count == 0) {
    if (out.data) copy_state(kernels, call.problem, in, out, scratch);
    return;
  }
  if (!in.data) in = zero_ref(call.problem, scratch);
  decode_chunk(kernels, call, call.sequences.begin(n), count, head, in, out, scratch);
}

/// o is 0 from the sequence's token `first` on, or left alone.
void skip_tokens(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t first,
                 int64_t head, const ThreadScratch& scratch) {
  if (!zeroes_skipped(call.problem)) return;
  std::fill_n(scratch.decode, num_blocks(call.problem.value_dim) * kBlockV, 0.0f);
  for (int64_t i = first; i < call.sequences.length(n); ++i)
    move_rows(kernels, call, call.sequences.begin(n) + i, 1, head, false, scratch.decode);
}

/// A state a token, from that of its parent. A token whose state is not stored leaves it in scratch
/// for the next one.
void decode_drafts(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t head,
                   const StateRef& start, const ThreadScratch& scratch) {
  const Problem& p = call.problem;
  const int32_t* parents = p.token_parents ? call.tensors.token_parents : nullptr;
  const int64_t count = computed_tokens(p, parents, n, call.sequences.length(n));
  const DType stored = (in_place(p) ? p.initial_state : p.final_state)->tensor.dtype;
  const bool transposed = p.state_layout == StateLayout::kVK;
  const StateRef kept = {reinterpret_cast<char*>(scratch.states), stored,
                         (transposed ? p.key_dim : p.value_dim) * dtype_size(stored), transposed};
  StateRef state = start;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t parent = parents && t > 0 ? parents[n * p.state_index_columns + t] : t - 1;
    if (parent < t - 1) state = token_slot(call, n, parent, head);
    StateRef out = token_slot(call, n, t, head);
    if (!out.data) out = kept;
    decode_chunk(kernels, call, call.sequences.begin(n) + t, 1, head, state, out, scratch);
    state = out;
  }
  skip_tokens(kernels, call, n, count, head, scratch);
}

/// Sequences without a slot are skipped.
void decode_from_slot(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t head,
                      const ThreadScratch& scratch) {
  const Problem& p = call.problem;
  if (!p.initial_state) return decode_drafts(kernels, call, n, head, zero_ref(p, scratch), scratch);
  const int64_t accepted = p.num_accepted_tokens ? call.tensors.num_accepted_tokens[n] : 1;
  const StateRef source = initial_slot(call, n, accepted - 1, head);
  if (!source.data) return skip_tokens(kernels, call, n, 0, head, scratch);
  const int64_t count = call.sequences.length(n);
  const bool masked = p.initial_state_mask && call.tensors.initial_state_mask[n] == 0;
  if (count == 0) {
    if (masked && p.state_index_columns == 1) copy_state(kernels, p, {}, source, scratch);
    return;
  }
  const StateRef start = masked ? zero_ref(p, scratch) : source;
  if (p.state_index_columns > 1) return decode_drafts(kernels, call, n, head, start, scratch);
  decode_chunk(kernels, call, call.sequences.begin(n), count, head, start, source, scratch);
}

}  // namespace

Status decode(const Kernels& kernels, const stage::Decode& args) {
  const stage::Call& call = args.call;
  const int64_t heads = call.problem.num_value_heads;
  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    (skips_sequences(call.problem) ? decode_from_slot : decode_across)(
        kernels, call, idx / heads, idx % heads, thread_scratch(call, slot));
  };
  return parallel_tasks(call.sequences.count() * heads, call.num_threads, task,
                        decode_microseconds(call));
}

}  // namespace kda::cpu::blocked
