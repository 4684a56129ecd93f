// SPDX-License-Identifier: Apache-2.0
#include "cpu/blocked/pass.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kda::cpu::blocked {
namespace {

constexpr std::size_t kTileBytes = sizeof(float) * kGroupTokens * kBlockV;
constexpr std::size_t kRowBytes = sizeof(float) * kRowStride;
/// Lines of q, k, g, v and o: rows of up to 256 floats.
constexpr std::size_t kLinesBytes =
    sizeof(const char*) * 5 * kGroupTokens * (kMaxHeadDim * sizeof(float) / 64);
constexpr std::size_t kDecodeBytes = sizeof(float) * 2 * kChunk * kMaxHeadDim;

std::size_t block_bytes(const Problem& p) {
  return sizeof(float) * static_cast<std::size_t>(state_rows(p) * kBlockV);
}

void start_state(const Kernels& kernels, const Problem& p, const Pass& pass,
                 const ThreadScratch& scratch) {
  const int64_t block_elems = state_rows(p) * kBlockV;
  float* block = scratch.states;
  for (int64_t column = pass.first_column; column < pass.last_column; column += kBlockV) {
    if (pass.state_in.data) {
      load_block(kernels, p, pass.state_in, column, pass.num_columns, scratch.row, block);
    } else {
      std::memset(block, 0, block_bytes(p));
      const int64_t last = std::min(column + kBlockV, p.key_dim);
      for (int64_t d = column; pass.identity_start && d < last; ++d)
        block[d * kBlockV + d - column] = 1;
    }
    block += block_elems;
  }
}

void write_state(const Kernels& kernels, const Problem& p, const Pass& pass,
                 const ThreadScratch& scratch, const StateRef& ref) {
  if (!ref.data) return;
  const float* block = scratch.states;
  for (int64_t column = pass.first_column; column < pass.last_column; column += kBlockV) {
    store_block(kernels, p, block, column, pass.num_columns, scratch.row, ref);
    block += state_rows(p) * kBlockV;
  }
}

bool below_norm(const Problem& p, const Pass& pass, const ThreadScratch& scratch) {
  if (pass.exit_norm < 0) return false;
  double sum = 0;
  const int64_t blocks = num_blocks(pass.last_column - pass.first_column);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < p.key_dim * kBlockV; ++i) {
      const double x = scratch.states[b * state_rows(p) * kBlockV + i];
      sum += x * x;
    }
  return std::sqrt(sum) <= pass.exit_norm;  // false for NaN: M then runs to the end
}

/// Sweeps the prepared tokens [token, token + count) over every block of the pass.
void sweep_group(const Kernels& kernels, const Problem& p, const Pass& pass,
                 const ThreadScratch& scratch, int64_t token, int count, LineQueue& lines) {
  const int64_t since = token - pass.begin;
  float* block = scratch.states;
  for (int64_t column = pass.first_column; column < pass.last_column; column += kBlockV) {
    const int width = static_cast<int>(std::min<int64_t>(kBlockV, pass.num_columns - column));
    if (pass.v.data) {
      const char* v =
          pass.v.data + since * pass.v.token_stride_bytes + column * dtype_size(pass.v.dtype);
      for (int i = 0; i < count; ++i)
        kernels.load_row(v + i * pass.v.token_stride_bytes, pass.v.dtype, width, kBlockV,
                         scratch.v + i * kBlockV);
      // A short last chunk: its missing rows are read (and masked by beta = 0).
      const int padded = (count + kChunk - 1) / kChunk * kChunk;
      std::memset(scratch.v + count * kBlockV, 0,
                  sizeof(float) * static_cast<std::size_t>((padded - count) * kBlockV));
    }
    kernels.sweep(*scratch.group, block, pass.v.data ? scratch.v : nullptr,
                  pass.out.data ? scratch.o : nullptr, lines);
    if (pass.out.data) {
      char* out =
          pass.out.data + since * pass.out.token_stride_bytes + column * dtype_size(pass.out.dtype);
      for (int i = 0; i < count; ++i)
        kernels.store_row(scratch.o + i * kBlockV, pass.out.dtype, width,
                          out + i * pass.out.token_stride_bytes);
    }
    block += state_rows(p) * kBlockV;
  }
}

/// The inputs of the next group and the outputs of this one.
LineQueue lines_around(const Problem& p, const Pass& pass, const PrepareArgs& args, int64_t token,
                       const ThreadScratch& scratch) {
  const int64_t done = args.num_tokens;
  const int64_t count = std::min<int64_t>(kGroupTokens, pass.end - token - done);
  const int64_t since = token - pass.begin;
  LineList lines(scratch.lines);
  const auto add_inputs = [&](const RowSource& rows, int64_t first, int64_t elems) {
    lines.add(rows.data + first * rows.token_stride_bytes, rows.token_stride_bytes, count,
              elems * dtype_size(rows.dtype));
  };
  if (pass.out.data)
    lines.add(pass.out.data + since * pass.out.token_stride_bytes, pass.out.token_stride_bytes,
              done, pass.num_columns * dtype_size(pass.out.dtype));
  add_inputs(args.q, done, p.key_dim);
  add_inputs(args.k, done, p.key_dim);
  add_inputs(args.g, done, gate_columns(p));
  if (pass.v.data) add_inputs(pass.v, since + done, pass.num_columns);
  return lines.queue();
}

/// The state after `token` tokens, if one is wanted there.
void write_checkpoint(const Kernels& kernels, const stage::Call& call, const Pass& pass,
                      const CheckpointSink& sink, const ThreadScratch& scratch, int64_t token) {
  const int64_t done = token - sink.sequence_begin;
  if (sink.every == 0 || done % sink.every != 0) return;
  const Problem& p = call.problem;
  const int64_t index = sink.first_index + done / sink.every - 1;
  if (sink.kept)
    return write_state(kernels, p, pass, scratch,
                       dense_ref(p, sink.kept, index, pass.head, p.value_dim));
  const int64_t slot = state_slot(p, *p.checkpoints, call.tensors.checkpoint_indices, index);
  write_state(kernels, p, pass, scratch,
              state_ref(p, *p.checkpoints, call.tensors.checkpoints, slot, pass.head));
}

/// Tokens from `token` up to the next group, checkpoint or end.
int group_length(const Pass& pass, int64_t token) {
  int64_t count = std::min<int64_t>(kGroupTokens, pass.end - token);
  for (const CheckpointSink* sink : {&pass.checkpoints, &pass.kept})
    if (sink->every > 0)
      count = std::min(count, sink->every - (token - sink->sequence_begin) % sink->every);
  return static_cast<int>(count);
}

}  // namespace

StateRef state_ref(const Problem& p, const StateDesc& desc, void* base, int64_t slot,
                   int64_t head) {
  if (slot < 0) return {};
  StateRef ref;
  ref.data = at_bytes(base, desc.tensor, state_offset(desc, slot, head));
  ref.dtype = desc.tensor.dtype;
  ref.row_stride_bytes = desc.tensor.strides[2] * dtype_size(desc.tensor.dtype);
  ref.transposed = p.state_layout == StateLayout::kVK;
  return ref;
}

StateRef dense_ref(const Problem& p, const float* base, int64_t index, int64_t head,
                   int64_t columns) {
  StateRef ref;
  const int64_t at = (index * p.num_value_heads + head) * p.key_dim * columns;
  ref.data = reinterpret_cast<char*>(const_cast<float*>(base + at));
  ref.row_stride_bytes = columns * static_cast<int64_t>(sizeof(float));
  return ref;
}

StateRef initial_ref(const stage::Call& call, int64_t n, int64_t head) {
  const Problem& p = call.problem;
  if (!p.initial_state) return {};
  if (p.initial_state_mask && call.tensors.initial_state_mask[n] == 0) return {};
  const int64_t slot = state_slot(p, *p.initial_state, call.tensors.initial_state_indices, n);
  return state_ref(p, *p.initial_state, call.tensors.initial_state, slot, head);
}

StateRef final_ref(const stage::Call& call, int64_t n, int64_t head) {
  const Problem& p = call.problem;
  if (!p.final_state) return {};
  const int64_t slot = state_slot(p, *p.final_state, call.tensors.final_state_indices, n);
  return state_ref(p, *p.final_state, call.tensors.final_state, slot, head);
}

std::size_t thread_scratch_bytes(const Problem& p) {
  const auto blocks = static_cast<std::size_t>(num_blocks(std::max(p.key_dim, p.value_dim)));
  return align_up(sizeof(Group)) + 2 * align_up(kTileBytes) + align_up(kRowBytes) +
         align_up(kDecodeBytes) + align_up(kLinesBytes) + (blocks + 1) * align_up(block_bytes(p));
}

ThreadScratch thread_scratch(const stage::Call& call, int32_t slot) {
  const Problem& p = call.problem;
  char* at =
      static_cast<char*>(call.scratch) + static_cast<std::size_t>(slot) * thread_scratch_bytes(p);
  const auto take = [&at](std::size_t bytes) {
    char* taken = at;
    at += align_up(bytes);
    return taken;
  };
  ThreadScratch scratch;
  scratch.group = reinterpret_cast<Group*>(take(sizeof(Group)));
  scratch.v = reinterpret_cast<float*>(take(kTileBytes));
  scratch.o = reinterpret_cast<float*>(take(kTileBytes));
  scratch.row = reinterpret_cast<float*>(take(kRowBytes));
  scratch.decode = reinterpret_cast<float*>(take(kDecodeBytes));
  scratch.lines = reinterpret_cast<const char**>(take(kLinesBytes));
  scratch.next = reinterpret_cast<float*>(take(block_bytes(p)));
  scratch.states = reinterpret_cast<float*>(at);
  return scratch;
}

RowSource row_source(const Problem& p, const TensorDesc& desc, const void* base, int64_t token,
                     int64_t head) {
  return {at_bytes(base, desc, row_offset(p, desc, token, head)),
          desc.strides[1] * dtype_size(desc.dtype), desc.dtype};
}

PrepareArgs mode_args(const stage::Call& call, int64_t head) {
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  PrepareArgs args;
  args.k.dtype = p.k.dtype;
  args.g.dtype = p.g.dtype;
  args.key_dim = static_cast<int>(p.key_dim);
  args.one_gate = has_head_gate(p);
  args.one_bias = has_head_bias(p);
  args.gate_mode = p.gate_mode;
  if (p.A_log)
    args.gate_factor = static_cast<float>(std::exp(
        static_cast<double>(static_cast<const float*>(t.A_log)[head * p.A_log->strides[0]])));
  args.lower_bound = static_cast<float>(p.lower_bound);
  if (p.dt_bias) args.dt_bias = static_cast<const float*>(t.dt_bias) + head * p.dt_bias->strides[0];
  args.beta_mode = p.beta_mode;
  args.qk_l2norm = p.qk_l2norm;
  args.scale = static_cast<float>(effective_scale(p));
  return args;
}

PrepareArgs prepare_args(const stage::Call& call, int64_t begin, int64_t head) {
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  const int64_t q_head = q_head_of(p, head);
  PrepareArgs args = mode_args(call, head);
  args.q = row_source(p, p.q, t.q, begin, q_head);
  args.k = row_source(p, p.k, t.k, begin, q_head);
  args.g = row_source(p, p.g, t.g, begin, head);
  args.beta = row_source(p, p.beta, t.beta, begin, head);
  return args;
}

void load_block(const Kernels& kernels, const Problem& p, const StateRef& ref, int64_t column,
                int64_t num_columns, float* row, float* block) {
  const int width = static_cast<int>(std::min<int64_t>(kBlockV, num_columns - column));
  const int64_t K = p.key_dim;
  if (!ref.transposed) {
    for (int64_t d = 0; d < K; ++d)
      kernels.load_row(ref.data + d * ref.row_stride_bytes + column * dtype_size(ref.dtype),
                       ref.dtype, width, kBlockV, block + d * kBlockV);
  } else {
    std::memset(block, 0, block_bytes(p));
    for (int c = 0; c < width; ++c) {
      kernels.load_row(ref.data + (column + c) * ref.row_stride_bytes, ref.dtype,
                       static_cast<int>(K), static_cast<int>(K), row);
      for (int64_t d = 0; d < K; ++d) block[d * kBlockV + c] = row[d];
    }
  }
  std::memset(block + K * kBlockV, 0,
              block_bytes(p) - sizeof(float) * static_cast<std::size_t>(K * kBlockV));
}

void store_block(const Kernels& kernels, const Problem& p, const float* block, int64_t column,
                 int64_t num_columns, float* row, const StateRef& ref) {
  const int width = static_cast<int>(std::min<int64_t>(kBlockV, num_columns - column));
  const int64_t K = p.key_dim;
  if (!ref.transposed) {
    for (int64_t d = 0; d < K; ++d)
      kernels.store_row(block + d * kBlockV, ref.dtype, width,
                        ref.data + d * ref.row_stride_bytes + column * dtype_size(ref.dtype));
    return;
  }
  for (int c = 0; c < width; ++c) {
    for (int64_t d = 0; d < K; ++d) row[d] = block[d * kBlockV + c];
    kernels.store_row(row, ref.dtype, static_cast<int>(K),
                      ref.data + (column + c) * ref.row_stride_bytes);
  }
}

int64_t run_pass(const Kernels& kernels, const stage::Call& call, const Pass& pass,
                 const ThreadScratch& scratch) {
  const Problem& p = call.problem;
  start_state(kernels, p, pass, scratch);
  int64_t token = pass.begin;
  while (token < pass.end) {
    const int count = group_length(pass, token);
    PrepareArgs args = prepare_args(call, token, pass.head);
    args.num_tokens = count;
    kernels.prepare(args, *scratch.group);
    LineQueue lines = lines_around(p, pass, args, token, scratch);
    sweep_group(kernels, p, pass, scratch, token, count, lines);
    token += count;
    write_checkpoint(kernels, call, pass, pass.checkpoints, scratch, token);
    write_checkpoint(kernels, call, pass, pass.kept, scratch, token);
    if (below_norm(p, pass, scratch)) {
      const auto blocks =
          static_cast<std::size_t>(num_blocks(pass.last_column - pass.first_column));
      std::memset(scratch.states, 0, blocks * block_bytes(p));
      break;
    }
  }
  write_state(kernels, p, pass, scratch, pass.state_out);
  return token - pass.begin;
}

}  // namespace kda::cpu::blocked
