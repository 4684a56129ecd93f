// SPDX-License-Identifier: Apache-2.0
// Where the sequences of a forward with a tail end, before anything of it is computed.
#include "cuda/decode/tail/sequence.cuh"

namespace kda::cuda::tail {
namespace {

constexpr int kThreads = 128;

/// Tokens in front of S_0 when the forward is done: fold_target_behind() of core/tail.hpp after all
/// of its blocks, one of which ends at every multiple of 16 on the way.
__device__ int32_t boundary_behind(const Start& start, int32_t length) {
  const int32_t end = start.position + length, last = last_boundary(end);
  const bool folds = last >= start.position || end - start.folded >= kTailBoundary;
  return folds ? last : start.folded;
}

/// The start of sequence n, where it has a slot. Returns whether its tail is wrong.
__device__ bool find_start(const TailArgs& a, int64_t n, int64_t length, Start* start) {
  const int64_t slot = a.initial.indices[n];
  if (lacks_slot(a.initial, slot)) return false;
  *start = start_of(a, n, 0);
  bool wrong = start->wrong || length > INT32_MAX - start->position;
  for (int head = static_cast<int>(threadIdx.x); head < a.shape.HV; head += kThreads) {
    const Start other = start_of(a, n, head);
    wrong |= other.wrong || other.folded != start->folded || other.source != start->source;
  }
  if (!__syncthreads_or(wrong)) return false;
  start->skip = true;
  return true;
}

__device__ void write_ends(const EndsArgs& a, int64_t n, const TokenRange& tokens,
                           const Start& start) {
  const auto length = static_cast<int32_t>(tokens.end - tokens.begin);
  const int32_t boundary = start.skip ? 0 : boundary_behind(start, length);
  const int32_t front = start.skip ? 0 : max(boundary - start.position, 0);
  const bool folds = !start.skip && (boundary > start.folded || start.source != start.slot);
  a.fold_slots[n] = folds ? start.slot : -1;
  a.boundaries[n] = boundary;
  const auto of_states = static_cast<int32_t>(n);
  a.forward_slots[2 * n] = front == 0 ? -1 : a.tail.rest.base ? of_states : start.slot;
  a.forward_slots[2 * n + 1] = a.row_slots[2 * n] = -1;
  a.row_slots[2 * n + 1] = !start.skip && length > front ? start.slot : -1;
  a.row_positions[2 * n] = 0;
  a.row_positions[2 * n + 1] = max(start.position, boundary);
  const int64_t M = a.packed ? a.tail.map.num_sequences : 1, in_pack = a.packed ? n : 0;
  int64_t* cu_seqlens = a.cu_seqlens + (n - in_pack) * 3 + 2 * in_pack;
  cu_seqlens[0] = tokens.begin;
  cu_seqlens[1] = tokens.begin + front;
  if (in_pack + 1 == M) cu_seqlens[2] = tokens.end;
}

/// A block has a sequence. Another one looks at what has nothing to do with tails.
__global__ void __launch_bounds__(kThreads) ends_kernel(const __grid_constant__ EndsArgs a) {
  const int64_t n = blockIdx.x, N = a.tail.map.num_sequences;
  if (n == N) {
    const DecodeArgs& base = a.tail;
    decode::write_flags(base);
    if (N == 0 && threadIdx.x == 0) *a.cu_seqlens = 0;
    return;
  }
  TokenRange tokens = decode::tokens_of(a.tail, n);
  if (!a.packed) tokens = {n, 0, a.tail.map.num_tokens};
  Start start;
  const bool wrong = find_start(a.tail, n, tokens.end - tokens.begin, &start);
  if (threadIdx.x != 0) return;
  a.found[n] = wrong ? 1 : 0;
  write_ends(a, n, tokens, start);
}

}  // namespace

Status launch_ends(const EndsArgs& args, const Launch& where) {
  return launch_kernel("tail_ends", ends_kernel, args.tail.map.num_sequences + 1, kThreads, 0,
                       where, args);
}

}  // namespace kda::cuda::tail
