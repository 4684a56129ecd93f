// SPDX-License-Identifier: Apache-2.0
// Which streams (a value head of a unit: a sequence, or a segment of one) a cluster goes through.
//
// All streams stand in a line, heads of a unit after each other, each as long as its chunks and
// what it costs besides. Clusters get equal shares of it, none shorter than the longest stream: the
// wrap-around rule of McNaughton (1959). Where a share ends inside a stream, the next share begins
// with the first tokens of that stream, and this one ends with its last ones: what takes a state
// over comes to it after the other cluster has handed it on. Shares go to clusters in reverse, so
// that a cluster waits only for one launched before it. Results do not depend on shares: a state is
// handed on in fp32, between runs.
//
// Transitions that may stop early are not in that line: nobody knows how long they are. A cluster
// runs one of them after its share, in pieces. After each piece the consumers of both blocks say
// how large M is. Where it was small there is no piece after the next one: that one is on its way,
// and so no warp waits.
#pragma once

#include <type_traits>

#include "cuda/fused/fused_prefill.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/chunk_map.cuh"

namespace kda::cuda::sm90::fused {

/// What a cluster does of a stream.
struct Part {
  Span span;
  int64_t segment, head;
  FusedState state;
  bool taken_over, handed_on;  // the state comes from another cluster, goes to one
  int piece;                   // number, of a transition that may stop early; else kNoPiece
  static constexpr int kNoPiece = -1;
};

/// How large M is after pieces: of each warp of the consumers of a cluster of so many blocks, the
/// sum of its squares.
template <int kBlocks>
struct Looks {
  static constexpr int kWarps = 4 * kBlocks;
  float squares[2][kWarps];  // of every second piece
  ptx::Mbarrier there[2];    // all are

  /// By a whole warp of a consumer, `warp` of all blocks' ones.
  __device__ void put(int piece, int warp, float sum) {
    const int slot = piece % 2, rank = static_cast<int>(threadIdx.x % 32);
    if (rank >= kBlocks) return;
    ptx::st_cluster(&squares[slot][warp], sum, rank);
    ptx::mbarrier_arrive_cluster(there[slot], rank);
  }
  /// |M|_F <= 2^-20 (stage/segment_scan.hpp says where that is enough).
  __device__ bool small_after(int piece) {
    const int slot = piece % 2;
    ptx::mbarrier_wait_cluster(there[slot], piece / 2 % 2);
    float sum = 0;
    for (const float x : squares[slot]) sum += x;
    return sum <= 0x1p-40f;
  }
};

/// Of a cluster: where it begins, and how much of the line is left of it.
struct Share {
  int64_t unit, head;
  int64_t before;  // what lies of that stream in the share before
  int64_t left;
};

/// Of a kernel with units: where they are few, they come with it.
struct UnitArgs : FusedPrefillArgs {
  static constexpr int64_t kMostWords = 256;  // 41 units of one sequence
  int64_t num_words = 0;                      // 0: units are in device memory
  int64_t words[kMostWords];

  /// Where the words will lie.
  __host__ __device__ int64_t* target() const {
    return reinterpret_cast<int64_t*>(const_cast<WorkUnit*>(units + num_units + 1)) - num_words;
  }
  __device__ const WorkUnit& unit(int64_t n) const {
    const auto* carried = reinterpret_cast<const WorkUnit*>(words + num_words);
    return num_words > 0 ? carried[n - num_units - 1] : units[n];
  }
  /// By the first block, for kernels after this one.
  __device__ void write_words() const {
    if (blockIdx.x == 0)
      for (int64_t i = threadIdx.x; i < num_words; i += blockDim.x) target()[i] = words[i];
  }
};
static_assert(sizeof(UnitArgs) <= 4096);
template <bool kSegments>
using ArgsOf = std::conditional_t<kSegments, UnitArgs, FusedPrefillArgs>;
__device__ inline const WorkUnit& unit_of(const FusedPrefillArgs& a, int64_t n) {
  return static_cast<const UnitArgs&>(a).unit(n);
}

/// Units in the line. kSegments: whether they are of the caller; else one a sequence.
template <bool kSegments>
__device__ inline int64_t units_in_line(const FusedPrefillArgs& a) {
  return kSegments ? a.num_scheduled : a.map.num_sequences;
}
/// Chunks and costs of the units before `n`, one head.
template <bool kSegments>
__device__ inline int64_t line_before(const FusedPrefillArgs& a, int64_t n) {
  if constexpr (kSegments) return unit_of(a, n).before;
  const int64_t chunks =
      a.map.cu_seqlens ? a.map.chunk_offsets[n] : n * chunks_of(a.map.num_tokens);
  return chunks + n * kWorkUnitCost;
}
template <bool kSegments>
__device__ inline int64_t stream_length(const FusedPrefillArgs& a, int64_t n) {
  return line_before<kSegments>(a, n + 1) - line_before<kSegments>(a, n);
}
/// All of a unit, one head.
template <bool kSegments>
__device__ inline Part whole_of(const FusedPrefillArgs& a, int64_t n, int64_t head) {
  if constexpr (!kSegments)
    return {sequence_span(a.map, n), n, head, FusedState::kGiven, false, false, Part::kNoPiece};
  const WorkUnit& unit = unit_of(a, n);
  return {unit.span, unit.segment, head, unit.state, false, false, Part::kNoPiece};
}
/// Number of this cluster's share.
template <int kBlocks>
__device__ inline int64_t share_number() {
  return (gridDim.x - 1 - blockIdx.x) / static_cast<unsigned>(kBlocks);
}

/// By all threads of a block; `share` is in shared memory.
template <int kBlocks, bool kSegments>
__device__ inline void find_share(const FusedPrefillArgs& a, Share& share, int& longest) {
  const int64_t N = units_in_line<kSegments>(a), HV = a.shape.HV, number = share_number<kBlocks>(),
                shares = gridDim.x / static_cast<unsigned>(kBlocks);
  if (threadIdx.x == 0) share = {N, 0, 0, 0}, longest = 0;
  __syncthreads();
  if (N * HV <= shares) {  // a stream each
    if (threadIdx.x == 0)
      share = {number / HV, number % HV, 0, stream_length<kSegments>(a, number / HV)};
    __syncthreads();
    return;
  }
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x)
    atomicMax(&longest, static_cast<int>(stream_length<kSegments>(a, n)));
  __syncthreads();
  const int64_t line = line_before<kSegments>(a, N) * HV;
  const int64_t size = max((line + shares - 1) / shares, static_cast<int64_t>(longest));
  const int64_t begin = number * size;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const int64_t in = begin - line_before<kSegments>(a, n) * HV,
                  length = stream_length<kSegments>(a, n);
    if (in >= 0 && in < length * HV) share = {n, in / length, in % length, size};
  }
  __syncthreads();
}

/// Runs of a part: as many for each block of the cluster.
template <int kBlocks>
__device__ __forceinline__ int runs_of(const Part& part) {
  constexpr int kTokens = kBlocks * kSubchunk;
  return static_cast<int>((part.span.end - part.span.begin + kTokens - 1) / kTokens * kBlocks);
}

/// Where a warp is in its share. In shared memory: while it works on a part, none of this is in
/// registers.
struct Course {
  Share share;
  Part part;
};

/// By all lanes of a warp: the first piece of a transition that may stop early, or the next one.
/// False: there is none, and the course stays as it is.
template <int kBlocks>
__device__ inline bool next_piece(const FusedPrefillArgs& a, Course& course,
                                  Looks<kBlocks>& looks) {
  Part part = course.part;
  const int64_t number = share_number<kBlocks>(), unit = a.num_scheduled + number / a.shape.HV;
  __syncwarp();
  if (unit >= a.num_units) return false;
  const int64_t end = unit_of(a, unit).span.end;
  if (part.piece == Part::kNoPiece) {
    part = whole_of<true>(a, unit, number % a.shape.HV);
    part.piece = 0;
  } else {
    if (part.span.end == end || (part.piece > 0 && looks.small_after(part.piece - 1))) return false;
    part.span.begin = part.span.end;
    ++part.piece;
  }
  part.span.end = min(end, part.span.begin + kNormCheckTokens);
  if (threadIdx.x % 32 == 0) course.part = part;
  __syncwarp();
  return true;
}

/// By all lanes of a warp: the next part of the share, or what comes after it. False: there is
/// none.
template <bool kSegments, int kBlocks>
__device__ inline bool next_part(const FusedPrefillArgs& a, Course& course, Looks<kBlocks>& looks) {
  Share share = course.share;
  __syncwarp();
  while (share.left > 0 && share.unit < units_in_line<kSegments>(a)) {
    const int64_t length = stream_length<kSegments>(a, share.unit), chunks = length - kWorkUnitCost;
    const int64_t rest = length - share.before;
    const bool cut = rest > share.left;
    const int64_t first =
        cut ? chunks - max(share.before + share.left - kWorkUnitCost, int64_t{0}) : 0;
    const int64_t last = chunks - max(share.before - kWorkUnitCost, int64_t{0});
    Part part = whole_of<kSegments>(a, share.unit, share.head);
    part.taken_over = first > 0;
    part.handed_on = last < chunks;
    part.span.end = min(part.span.end, part.span.begin + last * kChunk);
    part.span.begin += first * kChunk;
    share.left -= rest;
    share.before = 0;
    if (++share.head == a.shape.HV) share.head = 0, ++share.unit;
    if (cut && first == last) continue;
    if (threadIdx.x % 32 == 0) course = {share, part};
    __syncwarp();
    return true;
  }
  if constexpr (kSegments)
    if (a.num_scheduled < a.num_units) return next_piece(a, course, looks);
  return false;
}

}  // namespace kda::cuda::sm90::fused
