// SPDX-License-Identifier: Apache-2.0
// One block cuts a table of lengths:
//   map         clamped offsets and chunks of sequences (launch/sequence_map.hpp), and their sums
//   candidates  a thread a candidate: the time of a cut
//   walk        one thread goes through the numbers of segments, as best_partition() does
//   offsets     segments before each sequence
//   units       a thread a work unit, with the end of its transition
//
// Compiled without contraction of products and sums, as the planner is: times are compared, and the
// cut has to be the planner's. Nothing hides the latency of one block: so it counts in 32 bits, and
// loops stay loops, since less code was faster (docs/log/2026-11.md, "Lengths on the GPU").
#include "cuda/fused/device_cut.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/segments/block_scan.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::sm90 {
namespace {

using fused::CutModel;
using Lengths = plan::CutLengths<int>;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTokens = static_cast<int>(plan::kAutoChunk);  // of a chunk
constexpr int kMost = static_cast<int>(plan::kAutoMaxSegments);
constexpr int kCounts = kMost - 1;  // 2 segments to kMost
constexpr int kFirsts = fused::kNumFirstSegments;
static_assert(kCounts * (kFirsts + 1) <= kThreads, "a thread a candidate");
static_assert(kTokens == kChunk);

struct Shared {
  uint64_t sums[kWarps];
  int first_token, last_token, longest;  // of all sequences
  int num_lengths, lengths[kThreads];    // of a tile, those that some candidate cuts
  int short_ones;                        // sequences with tokens that none cuts
  double us[kCounts][kFirsts + 2];       // of early exit the last two
  double best_us[kCounts];               // without early exit
  Lengths best[kCounts];
  int most_behind, longest_behind;  // segments, tokens
  bool is_cut, early_exit;
  Lengths chosen;
  CutHeader cut;
};

/// Called by all threads of the block.
struct Cutter {
  const DeviceCutArgs& a;
  Shared& s;
  const int t, N;
  // Each thread owns a run of entries of cu_seqlens; entry i ends sequence i - 1.
  int begin, end;
  plan::LengthSums<int> sums;
  int num_chunks;  // of the longest sequence

  __device__ Cutter(const DeviceCutArgs& args, Shared& shared)
      : a(args),
        s(shared),
        t(static_cast<int>(threadIdx.x)),
        N(static_cast<int>(args.map.num_sequences)) {
    const int run = (N + kThreads) / kThreads;
    begin = plan::smaller(t * run, N + 1), end = plan::smaller(begin + run, N + 1);
    if (t == 0) s.longest = s.short_ones = s.most_behind = s.longest_behind = 0;
  }

  // ---- map

  __device__ int64_t raw(int i) const {
    return a.map.wide ? static_cast<const int64_t*>(a.map.raw)[i]
                      : static_cast<int64_t>(static_cast<const int32_t*>(a.map.raw)[i]);
  }
  __device__ int64_t clamped(int i) const {
    return plan::larger(int64_t{0}, plan::smaller(raw(i), a.map.num_tokens));
  }
  __device__ int offset(int n) const { return static_cast<int>(a.map.cu_seqlens[n]); }
  __device__ int chunks(int n) const {
    return static_cast<int>(a.map.chunk_offsets[n + 1] - a.map.chunk_offsets[n]);
  }

  /// Offsets never go back and stay within the tokens; where the caller's do not, that is flagged.
  __device__ void make_map() {
    bool bad = t == 0 && (raw(0) != 0 || raw(N) != a.map.num_tokens);
    int64_t top = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      bad |= raw(i) != clamped(i) || (i > 0 && raw(i) < raw(i - 1));
      top = plan::larger(top, clamped(i));
    }
    const bool any_bad = __syncthreads_or(bad);
    if (t == 0 && a.map.flags) *a.map.flags = any_bad ? kBadSequences : 0;
    int64_t floor = begin > 0 && begin < end ? raw(begin - 1) : 0;
    if (any_bad)
      floor =
          static_cast<int64_t>(block_scan<kWarps>(static_cast<uint64_t>(top), true, s.sums).before);
    int64_t previous = floor;
    int longest = 0;
    uint64_t counts = 0;  // chunks, and in the upper half sequences with tokens
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int64_t value = plan::larger(previous, clamped(i));
      a.map.cu_seqlens[i] = value;
      if (i == 0) s.first_token = static_cast<int>(value);
      if (i == N) s.last_token = static_cast<int>(value);
      const int length = i > 0 ? static_cast<int>(value - previous) : 0;
      longest = plan::larger(longest, length);
      counts += static_cast<uint64_t>(plan::ceil_div(length, kTokens));
      if (length > 0) counts += uint64_t{1} << 32;
      previous = value;
    }
    atomicMax(&s.longest, longest);
    const Scan scanned = block_scan<kWarps>(counts, false, s.sums);
    auto offset = static_cast<uint32_t>(scanned.before);
    previous = floor;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int64_t value = a.map.cu_seqlens[i];
      if (i > 0)
        offset +=
            static_cast<uint32_t>(plan::ceil_div(static_cast<int>(value - previous), kTokens));
      a.map.chunk_offsets[i] = offset;
      previous = value;
    }
    sums = {N, static_cast<int>(scanned.all >> 32), s.last_token - s.first_token, s.longest};
    num_chunks = plan::ceil_div(sums.longest, kTokens);
    __syncthreads();
  }

  // ---- candidates

  /// Gathers lengths tile by tile, those alone that some candidate cuts: a first segment is at
  /// least as long as the others, and none is longer than twice another one.
  __device__ plan::Cut<int> cut_of(const Lengths& lengths, bool exists) const {
    plan::Cut<int> cut;
    const int shortest = num_chunks / (kMost + 1) * kTokens;
#pragma unroll 1
    for (int first = 0; first < N; first += kThreads) {
      if (t == 0) s.num_lengths = 0;
      __syncthreads();
      const int n = first + t, own = n < N ? offset(n + 1) - offset(n) : 0;
      if (own > shortest)
        s.lengths[atomicAdd(&s.num_lengths, 1)] = own;
      else if (own > 0)
        atomicAdd(&s.short_ones, 1);
      __syncthreads();
#pragma unroll 1
      for (int i = 0; exists && i < s.num_lengths; ++i)
        cut.add(s.lengths[i], lengths.first * kTokens, lengths.others * kTokens);
      __syncthreads();
    }
    cut.segments += s.short_ones;
    return cut;
  }
  /// Threads by number of segments, of each first those whose transitions are in the schedule, by
  /// first segment, then one of early exit.
  __device__ void time_candidates() {
    const int index = t / (kFirsts + 1), kind = t % (kFirsts + 1), segments = index + 2;
    const bool early = kind == kFirsts;
    bool exists = segments <= plan::smaller(kMost, num_chunks);
    Lengths lengths{1, 1};
    if (exists)
      lengths = plan::cut_lengths(num_chunks, segments, early ? 1 : fused::first_segment(kind));
    if (early) {
      lengths.first = lengths.others;
      exists =
          exists && a.model.check_tokens > 0 && lengths.others * kTokens > a.model.memory_tokens;
    }
    const plan::Cut<int> cut = cut_of(lengths, exists);
    if (!exists) return;
    double* us = s.us[index];
    if (!early) {
      us[kind] = fused::candidate_us(a.model, sums, cut, lengths.first * kTokens);
      return;
    }
    const int tokens = lengths.others * kTokens;
#pragma unroll 1
    for (int i = 0; i < 2; ++i)  // as they exit as a rule, and if none does
      us[kFirsts + i] =
          fused::early_exit_us(a.model, sums, cut, tokens, i == 0 ? a.model.memory_tokens : tokens);
  }
  /// The best candidate of each number of segments.
  __device__ void find_best() const {
    if (t >= kCounts || t + 2 > plan::smaller(kMost, num_chunks)) return;
    int best = 0;
#pragma unroll 1
    for (int first = 1; first < kFirsts; ++first)
      if (s.us[t][first] < s.us[t][best]) best = first;
    s.best_us[t] = s.us[t][best];
    s.best[t] = plan::cut_lengths(num_chunks, t + 2, fused::first_segment(best));
  }

  // ---- walk

  __device__ void walk(double whole) const {
    const int most = plan::smaller(kMost, num_chunks);
    plan::CutWalk walk{whole, a.model.minimum_step, fused::kCutPatience};
#pragma unroll 1
    for (int segments = 2; segments <= most && !walk.is_over(segments); ++segments)
      if (walk.take(segments, s.best_us[segments - 2])) s.chosen = s.best[segments - 2];
    double best = walk.best;
    if (walk.segments > 0 && a.model.check_tokens > 0) {
      fused::EarlyExitWalk early(a.model, best);
#pragma unroll 1
      for (int segments = 2; segments <= kMost; ++segments) {
        const int length = plan::ceil_div(num_chunks, segments);
        if (length * kTokens <= a.model.memory_tokens) break;
        const double* us = s.us[segments - 2] + kFirsts;
        if (early.take(us[0], us[1])) s.chosen = {0, length};
      }
      best = early.best;
      s.early_exit = early.took;
    }
    s.is_cut = walk.segments > 0 && !(whole < plan::kMinimumGain * best);
  }
  __device__ void choose() {
    const double whole = fused::forward_us(a.model, sums);
    const bool search =
        sums.tokens > 0 && !(whole < plan::kMinimumGain * fused::least_us(a.model, sums));
    if (t == 0) s.is_cut = s.early_exit = false;
    if (!search) return __syncthreads();
    time_candidates();
    __syncthreads();
    find_best();
    __syncthreads();
    if (t == 0) walk(whole);
    __syncthreads();
  }

  // ---- offsets

  /// Segments of sequence n, and chunks before the second one.
  struct Segments {
    int count, first;
  };
  __device__ Segments segments_of(int n) const {
    if (!s.is_cut) return {1, 0};
    const int all = chunks(n), count = plan::num_segments_of(s.chosen, all);
    return {count, count > 1 ? plan::chunks_before(1, count, all, s.chosen.first) : all};
  }
  /// [N + 1] chunks of segments behind first ones before a sequence.
  __device__ int64_t* chunks_behind() const { return cut_sequences(a.cut) + a.model.most_behind; }

  __device__ void make_offsets() {
    uint64_t own = 0;  // chunks behind first segments; from bit 32 segments, from 48 sequences
#pragma unroll 1
    for (int i = plan::larger(begin, 1); s.is_cut && i < end; ++i) {
      const Segments of = segments_of(i - 1);
      if (of.count == 1) continue;
      const int behind = of.count - 1, after = chunks(i - 1) - of.first;
      own += uint64_t{1} << 48 | static_cast<uint64_t>(behind) << 32 | static_cast<uint32_t>(after);
      atomicMax(&s.most_behind, behind);
      atomicMax(&s.longest_behind, plan::ceil_div(after, behind) * kTokens);
    }
    const Scan scanned = block_scan<kWarps>(own, false, s.sums);
    uint64_t before = scanned.before;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const Segments of = i > 0 ? segments_of(i - 1) : Segments{1, 0};
      if (of.count > 1) {
        cut_sequences(a.cut)[before >> 48] = i - 1;
        before += uint64_t{1} << 48 | static_cast<uint64_t>(of.count - 1) << 32 |
                  static_cast<uint32_t>(chunks(i - 1) - of.first);
      }
      a.offsets_behind[i] = static_cast<int64_t>(before >> 32 & 0xffff);
      chunks_behind()[i] = static_cast<uint32_t>(before);
    }
    if (t == 0) {
      const auto behind = static_cast<int64_t>(scanned.all >> 32 & 0xffff);
      const bool early =
          s.early_exit && fused::transitions_fit(behind * a.model.value_heads, a.model.num_sms);
      *a.cut = s.cut = {N + behind,
                        behind,
                        s.most_behind,
                        s.longest_behind,
                        static_cast<int64_t>(scanned.all >> 48),
                        early && s.is_cut ? 1 : 0};
    }
    __syncthreads();
  }

  // ---- units

  /// Unit i: segments of all sequences, then transitions; behind them where the schedule ends.
  __device__ WorkUnit unit(int i, int segments) const {
    const bool transition = i >= segments;
    const int place = transition ? i - segments : i;
    int n = 0, high = N;  // the last sequence before which there are no more
#pragma unroll 1
    while (high - n > 1) {
      const int middle = (n + high) / 2;
      const int before = static_cast<int>(a.offsets_behind[middle]) + (transition ? 0 : middle);
      (before <= place ? n : high) = middle;
    }
    const int before = static_cast<int>(a.offsets_behind[n]), all = chunks(n),
              first = s.chosen.first;
    const int count = static_cast<int>(a.offsets_behind[n + 1]) - before + 1;
    const int number = transition ? place - before + 1 : place - n - before;
    const auto chunks_to = [&](int of) { return plan::chunks_before(of, count, all, first); };
    const int begins = chunks_to(number);
    int64_t cost = a.map.chunk_offsets[transition ? N : n] + begins + i * kWorkUnitCost;
    if (transition) cost += chunks_behind()[n] - chunks_to(1);
    const int token = offset(n);
    const FusedState state = transition    ? FusedState::kTransition
                             : count == 1  ? FusedState::kWhole
                             : number == 0 ? FusedState::kFirst
                                           : FusedState::kZero;
    return {{n, token + begins * kTokens,
             number + 1 == count ? offset(n + 1) : token + chunks_to(number + 1) * kTokens},
            transition ? place : place - n - 1,
            state,
            cost};
  }
  __device__ void make_units() const {
    const int segments = static_cast<int>(s.cut.num_segments),
              behind = static_cast<int>(s.cut.num_behind);
#pragma unroll 1
    for (int i = t; i < segments + behind; i += kThreads) {
      const WorkUnit made = unit(i, segments);
      a.units[i] = made;
      if (i < segments || s.cut.early_exit) continue;
#pragma unroll 1
      for (int head = 0; head < a.model.value_heads; ++head)
        a.exit_tokens[(i - segments) * a.model.value_heads + head] = made.tokens.end;
    }
    if (t == 0)
      a.units[segments + behind] = {
          {},
          0,
          FusedState::kGiven,
          a.map.chunk_offsets[N] + chunks_behind()[N] + (segments + behind) * kWorkUnitCost};
  }
};

__global__ void __launch_bounds__(kThreads)
    device_cut_kernel(const __grid_constant__ DeviceCutArgs a) {
  __shared__ Shared shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Cutter cutter(a, shared);
  __syncthreads();
  cutter.make_map();
  cutter.choose();
  cutter.make_offsets();
  cutter.make_units();
}

}  // namespace

Status launch_device_cut(const DeviceCutArgs& args, const Launch& launch) {
  return launch_kernel("device_cut", device_cut_kernel, 1, kThreads, 0, launch, args);
}

}  // namespace kda::cuda::sm90
