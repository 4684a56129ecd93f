// SPDX-License-Identifier: Apache-2.0
// forward(): tasks over (span, value head, part of the value columns).
#include <algorithm>

#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/blocked/work.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

/// Share of a head's work that every part of a V split repeats (prepare(); measured 14-16%).
constexpr double kSharedWork = 0.15;

/// Parts to cut the value columns into, so that few tasks still fill the threads. The split
/// changes no result: columns never meet.
int64_t choose_v_parts(int64_t tasks, int64_t blocks, int32_t threads) {
  int64_t best = 1;
  double best_time = 0;
  for (int64_t parts = 1; parts <= blocks; ++parts) {
    const int64_t rounds = (tasks * parts + threads - 1) / threads;
    const int64_t largest_part = (blocks + parts - 1) / parts;
    const double share = static_cast<double>(largest_part) / static_cast<double>(blocks);
    const double time = static_cast<double>(rounds) * (kSharedWork + (1 - kSharedWork) * share);
    if (parts == 1 || time < 0.95 * best_time) {
      best = parts;
      best_time = time;
    }
  }
  return best;
}

struct SpanRange {
  int64_t sequence;
  int64_t begin;
  int64_t end;
  bool last;  // of its sequence
};

SpanRange span_of(const stage::Forward& args, int64_t idx) {
  const stage::Sequences& sequences = args.call.sequences;
  if (args.segments.empty()) return {idx, sequences.begin(idx), sequences.end(idx), true};
  const Segment& segment = args.segments[static_cast<std::size_t>(idx)];
  return {segment.sequence, segment.begin, segment.end,
          segment.end == sequences.end(segment.sequence)};
}

Pass make_pass(const stage::Forward& args, int64_t span_idx, int64_t head) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const SpanRange span = span_of(args, span_idx);
  Pass pass;
  pass.begin = span.begin;
  pass.end = span.end;
  pass.head = head;
  pass.num_columns = p.value_dim;
  pass.state_in = args.states_in ? dense_ref(p, args.states_in, span_idx, head, p.value_dim)
                                 : initial_ref(call, span.sequence, head);
  if (span.last) pass.state_out = final_ref(call, span.sequence, head);
  if (span.begin < span.end) {
    pass.v = row_source(p, p.v, call.tensors.v, span.begin, head);
    pass.out.data = at_bytes(call.tensors.o, p.o, row_offset(p, p.o, span.begin, head));
    pass.out.token_stride_bytes = p.o.strides[1] * dtype_size(p.o.dtype);
    pass.out.dtype = p.o.dtype;
  }
  const int64_t begin = call.sequences.begin(span.sequence);
  if (p.checkpoints)
    pass.checkpoints = {p.checkpoint_every, begin,
                        call.sequences.states_before(span.sequence, p.checkpoint_every)};
  if (args.kept_every_states)
    pass.kept = {args.kept_every, begin,
                 call.sequences.states_before(span.sequence, args.kept_every),
                 args.kept_every_states};
  return pass;
}

}  // namespace

std::size_t scratch_bytes(const Problem& problem, int32_t num_threads) {
  return thread_scratch_bytes(problem) * static_cast<std::size_t>(num_threads);
}

Status forward(const Kernels& kernels, const stage::Forward& args) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const int64_t spans =
      args.segments.empty() ? call.sequences.count() : static_cast<int64_t>(args.segments.size());
  const int64_t heads = p.num_value_heads;
  const int64_t blocks = num_blocks(p.value_dim);
  const double work = forward_microseconds(call);
  const int32_t threads = work < kWorthWaking ? 1 : call.num_threads;
  const int64_t parts = choose_v_parts(spans * heads, blocks, threads);
  const int64_t part_columns = (blocks + parts - 1) / parts * kBlockV;

  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    const int64_t part = idx % parts;
    Pass pass = make_pass(args, idx / parts / heads, idx / parts % heads);
    pass.first_column = part * part_columns;
    pass.last_column = std::min(pass.first_column + part_columns, p.value_dim);
    if (pass.first_column < pass.last_column)
      run_pass(kernels, call, pass, thread_scratch(call, slot));
  };
  return parallel_tasks(spans * heads * parts, call.num_threads, task, work);
}

}  // namespace kda::cpu::blocked
