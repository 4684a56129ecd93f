// SPDX-License-Identifier: Apache-2.0
// Parts of kernels that cut a table of lengths into even segments, by one block:
//   sums        of all lengths
//   candidates  kLanes threads a number of segments: sums of that cut
//   times       a thread a candidate, so that few warps divide in double; of one segment, of no cut
//   walk        one thread goes through the numbers of segments, as best_partition() does
//               (neither where a number of segments is asked for)
//   offsets     segments before each sequence
//
// Files that include this are compiled without contraction of products and sums, as the planner is:
// times are compared, and the cut has to be the planner's. Loops stay loops: nothing hides the
// latency of one block, and less code is faster.
#pragma once

#include "cuda/common/cost_sizes.hpp"
#include "cuda/tile/arguments.hpp"
#include "cuda/tile/block_scan.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::sequence_cut {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTokens = static_cast<int>(plan::kAutoChunk);  // of a chunk
constexpr int kMost = static_cast<int>(plan::kAutoMaxSegments);
constexpr int kLanes = kThreads / kMost;  // of a candidate
static_assert(kLanes * kMost == kThreads && 32 % kLanes == 0);
static_assert(kTokens == kChunk);

struct Shared {
  uint64_t sums[kWarps];
  int longest, with_tokens;
  // By number of segments, less one.
  plan::Cut<int> cuts[kMost];
  double us[kMost];  // [0]: uncut
  bool is_cut;
  int segment;  // chunks of a segment, by predicted times
};

/// Called by all threads of the block. Arguments of a kernel have a map of sequences, a number of
/// segments that is asked for (0: by predicted times) and, beside them,
///   sizes_of(args)                       of the problem, without sums
///   minimum_step_of(args)                as in plan::CutSearch
///   time_us(args, sizes, tokens, cut)    with segments of so many tokens; 0: uncut
///   segment_offsets_of(args)             where the offsets go; all are 0 where nothing is cut
template <class Args>
struct Cutter {
  const Args& a;
  Shared& s;
  const int t, N;
  CostSizes sizes;

  __device__ Cutter(const Args& args, Shared& shared)
      : a(args),
        s(shared),
        t(static_cast<int>(threadIdx.x)),
        N(static_cast<int>(args.map.num_sequences)),
        sizes(sizes_of(args)) {
    if (t == 0) s.longest = s.with_tokens = s.segment = 0, s.is_cut = false;
    __syncthreads();
  }

  __device__ int length(int n) const {
    return static_cast<int>(a.map.cu_seqlens[n + 1] - a.map.cu_seqlens[n]);
  }
  __device__ int chunks(int n) const {
    return static_cast<int>(a.map.chunk_offsets[n + 1] - a.map.chunk_offsets[n]);
  }

  __device__ void sum() {
    int longest = 0, with_tokens = 0;
#pragma unroll 1
    for (int n = t; n < N; n += kThreads) {
      longest = plan::larger(longest, length(n));
      with_tokens += length(n) > 0;
    }
    atomicMax(&s.longest, longest);
    atomicAdd(&s.with_tokens, with_tokens);
    __syncthreads();
    sizes.sums.sequences = N;
    sizes.sums.tokens = a.map.cu_seqlens[N] - a.map.cu_seqlens[0];
    sizes.sums.longest = s.longest;
    sizes.sums.with_tokens = s.with_tokens;
  }

  // ---- the search

  /// Sums over the lanes of a candidate.
  __device__ static int sum_of_lanes(int x) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
  }
  __device__ static int most_of_lanes(int x) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      x = plan::larger(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
  }
  __device__ int num_chunks() const { return plan::ceil_div(s.longest, kTokens); }
  __device__ int chunks_of_segment(int segments) const {
    return plan::cut_lengths(num_chunks(), segments, 1).others;
  }

  /// Tokens of a segment; 0: uncut.
  __device__ int tokens_of(int segments) const {
    return segments > 1 ? chunks_of_segment(segments) * kTokens : 0;
  }
  __device__ void sum_candidates() const {
    const int segments = t / kLanes + 1, lane = t % kLanes;
    const bool exists = segments > 1 && segments <= num_chunks();
    const int tokens = tokens_of(segments);
    plan::Cut<int> cut;
#pragma unroll 1
    for (int n = lane; exists && n < N; n += kLanes) cut.add(length(n), tokens, tokens);
    cut.segments = sum_of_lanes(cut.segments);
    cut.behind = sum_of_lanes(cut.behind);
    cut.tokens_behind = sum_of_lanes(cut.tokens_behind);
    cut.most = most_of_lanes(cut.most);
    if (lane == 0) s.cuts[segments - 1] = cut;
  }
  __device__ void time_candidates() const {
    const int segments = t + 1;
    if (segments > plan::smaller(kMost, num_chunks())) return;
    const plan::Cut<int>& cut = s.cuts[t];
    s.us[t] = time_us(a, sizes, tokens_of(segments),
                      Cut{cut.segments, cut.behind, cut.tokens_behind, cut.most});
  }
  __device__ void walk() const {
    const double whole = s.us[0];
    plan::CutWalk walk{whole, minimum_step_of(a), kMost};
    const int most = plan::smaller(kMost, num_chunks());
#pragma unroll 1
    for (int segments = 2; segments <= most; ++segments) walk.take(segments, s.us[segments - 1]);
    s.is_cut = walk.segments > 0 && !(whole < plan::kMinimumGain * walk.best);
    if (s.is_cut) s.segment = chunks_of_segment(walk.segments);
  }
  /// So many as are asked for, where a sequence has them.
  __device__ void ask() const { s.is_cut = num_chunks() > 1; }
  __device__ void choose() const {
    if (sizes.sums.tokens == 0) return;
    if (a.fixed_segments == 0) {
      sum_candidates();
      __syncthreads();
      time_candidates();
    }
    __syncthreads();
    if (t == 0) a.fixed_segments == 0 ? walk() : ask();
    __syncthreads();
  }

  // ---- offsets

  __device__ int num_segments(int n) const {
    if (!s.is_cut) return 0;
    return a.fixed_segments > 0
               ? plan::fixed_segments_of(static_cast<int>(a.fixed_segments), chunks(n))
               : plan::num_segments_of<int>({0, s.segment}, chunks(n));
  }
  /// Segments before each sequence. Each thread owns a run of entries.
  __device__ void make_offsets() const {
    int64_t* const offsets = segment_offsets_of(a);
    const int run = (N + kThreads) / kThreads;
    const int begin = plan::smaller(t * run, N + 1), end = plan::smaller(begin + run, N + 1);
    uint64_t own = 0;
#pragma unroll 1
    for (int i = plan::larger(begin, 1); i < end; ++i)
      own += static_cast<uint64_t>(num_segments(i - 1));
    const uint64_t of_warp = scan_warp(own, s.sums);
    __syncthreads();
    auto before = static_cast<int64_t>(scan_block<kWarps>(of_warp, s.sums).before);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      if (i > 0) before += num_segments(i - 1);
      offsets[i] = before;
    }
    __syncthreads();
  }
  /// The last sequence before which there are no more than `i` segments.
  __device__ int sequence_of(int64_t i) const {
    const int64_t* const offsets = segment_offsets_of(a);
    int n = 0, high = N;
#pragma unroll 1
    while (high - n > 1) {
      const int middle = (n + high) / 2;
      (offsets[middle] <= i ? n : high) = middle;
    }
    return n;
  }

  /// Segment `i` of those that there are: its tokens, chunks of the batch before it, and whether it
  /// is the first one of its sequence.
  struct Made {
    TokenRange tokens;
    int64_t chunk;
    bool first;
  };
  __device__ Made segment(int64_t i) const {
    const int64_t* const offsets = segment_offsets_of(a);
    const int n = sequence_of(i), all = chunks(n);
    const auto number = static_cast<int>(i - offsets[n]);
    const int of = static_cast<int>(offsets[n + 1] - offsets[n]);
    const int64_t begin = a.map.cu_seqlens[n], end = a.map.cu_seqlens[n + 1];
    const int before = plan::chunks_before(number, of, all, 0);
    return {
        {n, begin + before * kTokens,
         number + 1 == of ? end : begin + plan::chunks_before(number + 1, of, all, 0) * kTokens},
        a.map.chunk_offsets[n] + before,
        number == 0};
  }
};

}  // namespace kda::cuda::sequence_cut
