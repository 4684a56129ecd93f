// SPDX-License-Identifier: Apache-2.0
// Context parallelism on the CPU: scan, merge and correct (equations: stage/segment_scan.hpp,
// _merge, _correct).
#include <algorithm>
#include <cstring>

#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

/// 2^-20 would be invisible in 16-bit outputs; fp32 results and decayed states deserve more, and
/// strong gates pass this bound too within some 30 tokens.
constexpr float kDropNorm = 0x1p-100f;

bool is_first(std::span<const Segment> segments, int64_t s) {
  const auto i = static_cast<std::size_t>(s);
  return i == 0 || segments[i - 1].sequence != segments[i].sequence;
}
bool is_last(std::span<const Segment> segments, int64_t s) {
  const auto i = static_cast<std::size_t>(s);
  return i + 1 == segments.size() || segments[i + 1].sequence != segments[i].sequence;
}

RowSink dense_rows(const Problem& p, float* base, int64_t token, int64_t head, int64_t columns) {
  if (!base) return {};
  const int64_t stride = p.num_value_heads * columns;
  return {reinterpret_cast<char*>(base + token * stride + head * columns),
          stride * static_cast<int64_t>(sizeof(float)), DType::kFloat32};
}

/// B, or M if `transition`, of one segment and head.
void scan_segment(const Kernels& kernels, const stage::SegmentScan& args, int64_t s, int64_t head,
                  bool transition, const ThreadScratch& scratch) {
  const Problem& p = args.call.problem;
  const Segment& segment = args.segments[static_cast<std::size_t>(s)];
  Pass pass;
  pass.begin = segment.begin;
  pass.end = segment.end;
  pass.head = head;
  pass.num_columns = transition ? p.key_dim : p.value_dim;
  pass.last_column = pass.num_columns;
  pass.identity_start = transition;
  pass.state_out = dense_ref(p, transition ? args.M : args.B, s, head, pass.num_columns);
  pass.out = dense_rows(p, transition ? static_cast<float*>(args.Qt) : args.o_zero, segment.begin,
                        head, pass.num_columns);
  if (!transition && segment.begin < segment.end)
    pass.v = row_source(p, p.v, args.call.tensors.v, segment.begin, head);
  if (transition && args.exit_token && stage::transition_norm_never_grows(p))
    pass.exit_norm = kDropNorm;
  const int64_t alive = run_pass(kernels, args.call, pass, scratch);
  if (transition && args.exit_token) args.exit_token[s * p.num_value_heads + head] = alive;
}

/// One block of M S + B: `block` -> `out`.
void apply_segment(const Kernels& kernels, const Problem& p, const float* M, const float* B,
                   int64_t s, int64_t head, int64_t column, const float* block, float* row,
                   float* out) {
  load_block(kernels, p, dense_ref(p, B, s, head, p.value_dim), column, p.value_dim, row, out);
  const StateRef transition = dense_ref(p, M, s, head, p.key_dim);
  const int K = static_cast<int>(p.key_dim);
  kernels.matmul_block(reinterpret_cast<const float*>(transition.data), K, K, K, block, out);
}

/// states_in of every segment of one sequence, for one head and block of columns.
void merge_block(const Kernels& kernels, const stage::SegmentMerge& args, int64_t first,
                 int64_t head, int64_t column, const ThreadScratch& scratch) {
  const Problem& p = args.call.problem;
  float* state = scratch.states;
  float* next = scratch.next;
  const StateRef initial =
      initial_ref(args.call, args.segments[static_cast<std::size_t>(first)].sequence, head);
  if (initial.data)
    load_block(kernels, p, initial, column, p.value_dim, scratch.row, state);
  else
    std::memset(state, 0, sizeof(float) * static_cast<std::size_t>(state_rows(p) * kBlockV));
  for (int64_t s = first;; ++s) {
    store_block(kernels, p, state, column, p.value_dim, scratch.row,
                dense_ref(p, args.states_in, s, head, p.value_dim));
    if (is_last(args.segments, s)) return;
    apply_segment(kernels, p, args.M, args.B, s, head, column, state, scratch.row, next);
    std::swap(state, next);
  }
}

/// o of one segment, head and block of columns.
void correct_block(const Kernels& kernels, const stage::SegmentCorrect& args, int64_t s,
                   int64_t head, int64_t column, const ThreadScratch& scratch) {
  const Problem& p = args.call.problem;
  const Segment& segment = args.segments[static_cast<std::size_t>(s)];
  const int width = static_cast<int>(std::min<int64_t>(kBlockV, p.value_dim - column));
  const int64_t o_stride = p.num_value_heads * p.value_dim;
  const int64_t qt_stride = p.num_value_heads * p.key_dim;
  const int64_t alive_end = segment.begin + args.exit_token[s * p.num_value_heads + head];
  float* state = scratch.states;
  load_block(kernels, p, dense_ref(p, args.states_in, s, head, p.value_dim), column, p.value_dim,
             scratch.row, state);
  for (int64_t token = segment.begin; token < segment.end; token += kGroupTokens) {
    const int64_t count = std::min<int64_t>(kGroupTokens, segment.end - token);
    const float* o_zero = args.o_zero + token * o_stride + head * p.value_dim + column;
    for (int64_t i = 0; i < count; ++i)
      kernels.load_row(o_zero + i * o_stride, DType::kFloat32, width, kBlockV,
                       scratch.o + i * kBlockV);
    const auto alive = static_cast<int>(std::clamp<int64_t>(alive_end - token, 0, count));
    kernels.matmul_block(static_cast<const float*>(args.Qt) + token * qt_stride + head * p.key_dim,
                         qt_stride, alive, static_cast<int>(p.key_dim), state, scratch.o);
    for (int64_t i = 0; i < count; ++i)
      kernels.store_row(
          scratch.o + i * kBlockV, p.o.dtype, width,
          at_bytes(args.call.tensors.o, p.o, row_offset(p, p.o, token + i, head) + column));
  }
  const StateRef final_state = final_ref(args.call, segment.sequence, head);
  if (!is_last(args.segments, s) || !final_state.data) return;
  apply_segment(kernels, p, args.M, args.B, s, head, column, state, scratch.row, scratch.next);
  store_block(kernels, p, scratch.next, column, p.value_dim, scratch.row, final_state);
}

}  // namespace

Status segment_scan(const Kernels& kernels, const stage::SegmentScan& args) {
  const int64_t heads = args.call.problem.num_value_heads;
  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    const int64_t s = idx / 2 / heads;
    if (args.skip_last && is_last(args.segments, s)) return;
    scan_segment(kernels, args, s, idx / 2 % heads, idx % 2 == 1, thread_scratch(args.call, slot));
  };
  const auto count = static_cast<int64_t>(args.segments.size());
  return parallel_tasks(count * heads * 2, args.call.num_threads, task);
}

Status segment_merge(const Kernels& kernels, const stage::SegmentMerge& args) {
  const Problem& p = args.call.problem;
  const int64_t blocks = num_blocks(p.value_dim);
  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    const int64_t s = idx / blocks / p.num_value_heads;
    if (!is_first(args.segments, s)) return;
    merge_block(kernels, args, s, idx / blocks % p.num_value_heads, idx % blocks * kBlockV,
                thread_scratch(args.call, slot));
  };
  const auto count = static_cast<int64_t>(args.segments.size());
  return parallel_tasks(count * p.num_value_heads * blocks, args.call.num_threads, task);
}

Status segment_correct(const Kernels& kernels, const stage::SegmentCorrect& args) {
  const Problem& p = args.call.problem;
  const int64_t blocks = num_blocks(p.value_dim);
  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    correct_block(kernels, args, idx / blocks / p.num_value_heads, idx / blocks % p.num_value_heads,
                  idx % blocks * kBlockV, thread_scratch(args.call, slot));
  };
  const auto count = static_cast<int64_t>(args.segments.size());
  return parallel_tasks(count * p.num_value_heads * blocks, args.call.num_threads, task);
}

}  // namespace kda::cpu::blocked
