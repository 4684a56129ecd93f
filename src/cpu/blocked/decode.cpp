// SPDX-License-Identifier: Apache-2.0
// decode(): tasks over (sequence, value head); one chunk of tokens each, or one token at a time
// where every token's state is stored.
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

int64_t pool_slot(const stage::Call& call, int64_t n, int64_t column) {
  const Problem& p = call.problem;
  return state_slot(p, *p.initial_state, call.tensors.initial_state_indices,
                    n * p.state_index_columns + column);
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

void zero_outputs(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t head,
                  const ThreadScratch& scratch) {
  std::fill_n(scratch.decode, num_blocks(call.problem.value_dim) * kBlockV, 0.0f);
  for (int64_t i = 0; i < call.sequences.length(n); ++i)
    move_rows(kernels, call, call.sequences.begin(n) + i, 1, head, false, scratch.decode);
}

void decode_in_place(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t head,
                     const ThreadScratch& scratch) {
  const Problem& p = call.problem;
  const auto slot_ref = [&](int64_t column) {
    return state_ref(p, *p.initial_state, call.tensors.initial_state, pool_slot(call, n, column),
                     head);
  };
  const int64_t accepted = p.num_accepted_tokens ? call.tensors.num_accepted_tokens[n] : 1;
  const StateRef source = slot_ref(accepted - 1);
  const int64_t begin = call.sequences.begin(n);
  const int64_t count = call.sequences.length(n);
  if (!source.data && zeroes_skipped(p)) zero_outputs(kernels, call, n, head, scratch);
  if (!source.data || count == 0) return;
  const bool masked = p.initial_state_mask && call.tensors.initial_state_mask[n] == 0;
  StateRef state = masked ? zero_ref(p, scratch) : source;
  if (p.state_index_columns == 1)
    return decode_chunk(kernels, call, begin, count, head, state, source, scratch);

  // A state a token. A token whose state is not stored leaves it in scratch for the next one.
  StateRef kept = source;
  kept.data = reinterpret_cast<char*>(scratch.states);
  kept.row_stride_bytes = (kept.transposed ? p.key_dim : p.value_dim) * dtype_size(kept.dtype);
  for (int64_t t = 0; t < count; ++t) {
    StateRef out = slot_ref(t);
    if (!out.data) out = kept;
    decode_chunk(kernels, call, begin + t, 1, head, state, out, scratch);
    state = out;
  }
}

}  // namespace

Status decode(const Kernels& kernels, const stage::Decode& args) {
  const stage::Call& call = args.call;
  const int64_t heads = call.problem.num_value_heads;
  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    (call.problem.final_state ? decode_across : decode_in_place)(
        kernels, call, idx / heads, idx % heads, thread_scratch(call, slot));
  };
  return parallel_tasks(call.sequences.count() * heads, call.num_threads, task);
}

}  // namespace kda::cpu::blocked
