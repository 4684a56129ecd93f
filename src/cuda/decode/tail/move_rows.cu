// SPDX-License-Identifier: Apache-2.0
// Rows of tails that are copied before and behind a decode.
#include "cuda/decode/tail/copy_row.cuh"
#include "cuda/decode/tail/sequence.cuh"

namespace kda::cuda::tail {
namespace {

constexpr int kThreads = 128;

/// First element of the row of a position, in slot `slot`.
__device__ int64_t row_at(const TailArgs& a, const RowView& view, int64_t slot, int64_t head,
                          int64_t position) {
  return slot * view.stride_b + position % a.rows * view.stride_t + head * view.stride_h;
}

/// A block has a head of q and k: its rows of k, and those of its value heads. Rows ascend, so that
/// one is read before another takes its place.
__global__ void __launch_bounds__(kThreads)
    move_accepted_kernel(const __grid_constant__ TailArgs a) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto H = static_cast<unsigned>(a.shape.H);
  const int64_t n = blockIdx.x / H;
  const int q_head = static_cast<int>(blockIdx.x % H);
  const Start start = start_of(a, n, value_head_of(a, q_head, 0), /*rows_moved=*/false);
  const bool has_rows = !start.skip && start.source >= 0;
  const bool wrong = has_rows && !has_accepted_rows(a, n, start);
  if (q_head == 0 && threadIdx.x == 0) a.wrong_accepted[n] = wrong;
  if (!has_rows || wrong) return;
  const int32_t count = num_accepted(a, n);
  const int32_t* rows = a.accepted + n * a.accepted_columns;
  const int64_t first = start.position - count;
  const auto move = [&](const RowView& view, int64_t head, int size) {
    for (int32_t i = 0; i < count; ++i)
      if (rows[i] != i)
        copy_row(view, row_at(a, view, start.slot, head, first + rows[i]), view,
                 row_at(a, view, start.slot, head, first + i), size, static_cast<int>(threadIdx.x),
                 kThreads);
  };
  move(a.tail_k, q_head, a.shape.K);
  for (int j = 0; j < static_cast<int>(a.shape.group.value); ++j) {
    const int head = value_head_of(a, q_head, j);
    move(a.tail_g, head, gate_step(a) == 0 ? 1 : a.shape.K);
    move(a.tail_v_new, head, a.shape.V);
    if (!a.rest.base) continue;
    move(a.tail_v, head, a.shape.V);
    move(a.tail_beta, head, 1);
  }
}

/// A block has a head of q and k of one sequence.
__global__ void __launch_bounds__(kThreads) append_keys_kernel(const __grid_constant__ TailArgs a) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const auto H = static_cast<unsigned>(a.shape.H);
  const int64_t n = blockIdx.x / H, q_head = blockIdx.x % H;
  const Start start = start_of(a, n, value_head_of(a, static_cast<int>(q_head), 0));
  if (start.skip) return;
  const TokenRange tokens = decode::tokens_of(a, n);
  const int32_t count = num_computed(a, n, tokens);
  for (int32_t t = 0; t < count; ++t)
    copy_row(a.k, row_offset(a.k, a.map, a.lengths ? 0 : n, tokens.begin + t, q_head), a.tail_k,
             row_at(a, a.tail_k, start.slot, q_head, int64_t{start.position} + t), a.shape.K,
             static_cast<int>(threadIdx.x), kThreads);
}

}  // namespace

Status launch_move_accepted(const TailArgs& args, const Launch& where) {
  return launch_kernel("move_accepted", move_accepted_kernel, args.map.num_sequences * args.shape.H,
                       kThreads, 0, where, args);
}

Status launch_append_keys(const TailArgs& args, const Launch& where) {
  return launch_kernel("append_keys", append_keys_kernel, args.map.num_sequences * args.shape.H,
                       kThreads, 0, where, args);
}

}  // namespace kda::cuda::tail
