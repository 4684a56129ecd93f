// SPDX-License-Identifier: Apache-2.0
// One block cuts a table of lengths:
//   map         clamped offsets and chunks of sequences (launch/sequence_map.hpp), and their sums
//   candidates  a thread a candidate: the time of a cut
//   walk        one thread goes through the numbers of segments, as best_partition() does
//   offsets     segments before each sequence
//   units       a thread a work unit, then the ends of transitions
//
// Compiled without contraction of products and sums, as the planner is: times are compared, and the
// cut has to be the planner's.
#include "cuda/fused/device_cut.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::sm90 {
namespace {

using fused::Costs;
using plan::kAutoChunk;
using plan::kAutoMaxSegments;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCounts = kAutoMaxSegments - 1;  // 2 segments to kAutoMaxSegments
constexpr int kFirsts = fused::kNumFirstSegments;
static_assert(kCounts * (kFirsts + 1) <= kThreads, "a thread a candidate");

/// The cut that the walk takes.
struct Chosen {
  bool on, early_exit;
  plan::CutLengths lengths;
};

struct Shared {
  int64_t sums[kWarps];
  int64_t lengths[kThreads];
  int num_lengths;
  double us[kCounts][kFirsts];
  struct {
    double as_a_rule, if_none_exits;
  } early_us[kCounts];
  double best_us[kCounts];
  plan::CutLengths best[kCounts];
  Chosen chosen;
  CutHeader cut;
};

struct Sum {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};
struct Largest {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a < b ? b : a; }
};

/// Called by all threads of the block.
struct Cutter {
  const DeviceCutArgs& a;
  Shared& s;
  const int t;
  const int64_t N;
  // Each thread owns a run of entries of cu_seqlens; entry i ends sequence i - 1.
  int64_t begin, end;
  CostInput in;
  int64_t num_chunks;  // of the longest sequence

  __device__ Cutter(const DeviceCutArgs& args, Shared& shared)
      : a(args),
        s(shared),
        t(static_cast<int>(threadIdx.x)),
        N(args.map.num_sequences),
        in(args.input) {
    const int64_t run = plan::ceil_div(N + 1, kThreads);
    begin = plan::smaller(t * run, N + 1), end = plan::smaller(begin + run, N + 1);
  }

  /// Sums of the values of all threads before this one, and of all; or their largest.
  struct Scan {
    int64_t before, all;
  };
  template <class Op>
  __device__ Scan scan(int64_t value, Op op) const {
    const int lane = t % 32;
    int64_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_sync(0xffffffff, sum, (lane - step) & 31);
      if (lane >= step) sum = op(sum, other);
    }
    int64_t before = __shfl_sync(0xffffffff, sum, (lane - 1) & 31);
    if (lane == 0) before = 0;
    if (lane == 31) s.sums[t / 32] = sum;
    __syncthreads();
    int64_t all = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp == t / 32) before = op(all, before);
      all = op(all, s.sums[warp]);
    }
    __syncthreads();
    return {before, all};
  }
  __device__ int64_t sum_of(int64_t value) const { return scan(value, Sum{}).all; }
  __device__ int64_t largest_of(int64_t value) const { return scan(value, Largest{}).all; }

  // ---- map

  __device__ int64_t raw(int64_t i) const {
    return a.map.wide ? static_cast<const int64_t*>(a.map.raw)[i]
                      : static_cast<int64_t>(static_cast<const int32_t*>(a.map.raw)[i]);
  }
  __device__ int64_t clamped(int64_t i) const {
    return plan::larger(0, plan::smaller(raw(i), a.map.num_tokens));
  }
  __device__ int64_t length(int64_t n) const {
    return a.map.cu_seqlens[n + 1] - a.map.cu_seqlens[n];
  }
  __device__ int64_t chunks(int64_t n) const { return plan::ceil_div(length(n), kChunk); }

  /// Offsets never go back and stay within the tokens; where the caller's do not, that is flagged.
  __device__ void make_map() {
    bool bad = t == 0 && (raw(0) != 0 || raw(N) != a.map.num_tokens);
    int64_t top = 0;
    for (int64_t i = begin; i < end; ++i) {
      bad |= raw(i) != clamped(i) || (i > 0 && raw(i) < raw(i - 1));
      top = plan::larger(top, clamped(i));
    }
    const int64_t floor = scan(top, Largest{}).before;
    LengthSums own;
    int64_t count = 0, previous = floor;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t value = plan::larger(previous, clamped(i));
      a.map.cu_seqlens[i] = value;
      if (i > 0) own.add(value - previous), count += plan::ceil_div(value - previous, kChunk);
      previous = value;
    }
    int64_t offset = scan(count, Sum{}).before;
    previous = floor;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t value = a.map.cu_seqlens[i];
      if (i > 0) offset += plan::ceil_div(value - previous, kChunk);
      a.map.chunk_offsets[i] = offset;
      previous = value;
    }
    in.sums = {N, sum_of(own.with_tokens), sum_of(own.tokens), largest_of(own.longest)};
    num_chunks = plan::ceil_div(in.sums.longest, kAutoChunk);
    const bool any_bad = __syncthreads_or(bad);
    if (t == 0 && a.map.flags) *a.map.flags = any_bad ? kBadSequences : 0;
  }

  // ---- candidates

  /// Threads of a candidate: first those of which transitions are in the schedule, by number of
  /// segments and first segment; then those of early exit, by number of segments.
  struct Candidate {
    int64_t segments;
    int first;  // kFirsts: of early exit
    plan::CutLengths lengths;
    bool exists;
  };
  __device__ Candidate candidate() const {
    const bool early = t >= kCounts * kFirsts;
    const int index = early ? t - kCounts * kFirsts : t;
    Candidate c{
        2 + (early ? index : index / kFirsts), early ? kFirsts : index % kFirsts, {}, false};
    if (c.segments > plan::smaller(kAutoMaxSegments, num_chunks)) return c;
    if (early) {
      const int64_t length = plan::ceil_div(num_chunks, c.segments);
      c.lengths = {length, length};
      c.exists = a.check_tokens > 0 && length * kAutoChunk > a.costs.one_pass.memory_tokens;
    } else {
      c.lengths = plan::cut_lengths(num_chunks, c.segments, fused::first_segment(c.first));
      c.exists = true;
    }
    return c;
  }
  /// Gathers lengths tile by tile, those alone that some candidate may cut.
  __device__ Cut cut_of(const Candidate& c) const {
    Cut cut;
    // A first segment is at least as long as the others, and none is longer than twice another one.
    const int64_t shortest = num_chunks / (kAutoMaxSegments + 1) * kAutoChunk;
    int64_t short_ones = 0;  // with tokens
    for (int64_t first = 0; first < N; first += kThreads) {
      if (t == 0) s.num_lengths = 0;
      __syncthreads();
      const int64_t n = first + t, own = n < N ? length(n) : 0;
      if (own > shortest)
        s.lengths[atomicAdd(&s.num_lengths, 1)] = own;
      else
        short_ones += own > 0 ? 1 : 0;
      __syncthreads();
      if (c.exists)
        for (int i = 0; i < s.num_lengths; ++i)
          cut.add(s.lengths[i], c.lengths.first * kAutoChunk, c.lengths.others * kAutoChunk);
      __syncthreads();
    }
    cut.segments += sum_of(short_ones);
    return cut;
  }
  __device__ void time_candidates() {
    const Candidate c = candidate();
    const Cut cut = cut_of(c);
    if (!c.exists) return;
    const int64_t tokens = c.lengths.others * kAutoChunk;
    if (c.first < kFirsts) {
      s.us[c.segments - 2][c.first] = fused::candidate_us(in, a.costs, cut, c.lengths);
    } else {
      const auto us = [&](int64_t memory) {
        return fused::early_exit_us(in, a.costs, cut, tokens, memory, a.check_tokens);
      };
      s.early_us[c.segments - 2] = {us(a.costs.one_pass.memory_tokens), us(tokens)};
    }
  }
  /// The best candidate of each number of segments.
  __device__ void find_best() const {
    const int64_t segments = t + 2;
    if (segments > plan::smaller(kAutoMaxSegments, num_chunks)) return;
    int best = 0;
    for (int first = 1; first < kFirsts; ++first)
      if (s.us[t][first] < s.us[t][best]) best = first;
    s.best_us[t] = s.us[t][best];
    s.best[t] = plan::cut_lengths(num_chunks, segments, fused::first_segment(best));
  }

  // ---- walk

  __device__ Chosen walk(double whole) const {
    Chosen chosen{};
    const int64_t most = plan::smaller(kAutoMaxSegments, num_chunks);
    plan::CutWalk walk{whole, a.costs.one_pass.minimum_step, fused::kCutPatience};
    for (int64_t segments = 2; segments <= most && !walk.is_over(segments); ++segments)
      if (walk.take(segments, s.best_us[segments - 2])) chosen.lengths = s.best[segments - 2];
    double best = walk.best;
    if (walk.segments > 0 && a.check_tokens > 0) {
      fused::EarlyExitWalk early(a.costs, best);
      for (int64_t segments = 2; segments <= kAutoMaxSegments; ++segments) {
        const int64_t length = plan::ceil_div(num_chunks, segments);
        if (length * kAutoChunk <= a.costs.one_pass.memory_tokens) break;
        const auto& us = s.early_us[segments - 2];
        if (early.take(us.as_a_rule, us.if_none_exits)) chosen.lengths = {0, length};
      }
      best = early.best;
      chosen.early_exit = early.took;
    }
    chosen.on = walk.segments > 0 && !(whole < kMinimumGain * best);
    return chosen;
  }
  __device__ void choose() {
    const double whole = fused::forward_us(in, a.costs);
    const bool search = in.sums.tokens > 0 &&
                        !(whole < kMinimumGain * fused::least_us(in, a.costs));  // of all threads
    if (search) {
      time_candidates();
      __syncthreads();
      if (t < kCounts) find_best();
      __syncthreads();
    }
    if (t == 0) s.chosen = search ? walk(whole) : Chosen{};
    __syncthreads();
  }

  // ---- offsets

  __device__ int64_t segments_of(int64_t n) const {
    return s.chosen.on ? plan::num_segments_of(s.chosen.lengths, chunks(n)) : 1;
  }
  /// Chunks of sequence n before its segment `number` of `count`.
  __device__ int64_t chunks_before(int64_t n, int64_t number, int64_t count) const {
    return plan::chunks_before(number, count, chunks(n), s.chosen.lengths.first);
  }
  /// [N + 1] chunks of segments behind first ones before a sequence.
  __device__ int64_t* chunks_behind() const { return cut_sequences(a.cut) + most_cut(); }
  __device__ int64_t most_cut() const { return fused::most_behind(in, a.costs); }

  __device__ void make_offsets() {
    int64_t behind = 0, chunks_after = 0, cut = 0, most = 0, longest = 0;
    for (int64_t i = plan::larger(begin, 1); i < end; ++i) {
      const int64_t n = i - 1, count = segments_of(n);
      if (count == 1) continue;
      behind += count - 1, ++cut;
      const int64_t after = chunks(n) - chunks_before(n, 1, count);
      chunks_after += after;
      most = plan::larger(most, count - 1);
      longest = plan::larger(longest, plan::ceil_div(after, count - 1) * kAutoChunk);
    }
    const Scan of_behind = scan(behind, Sum{}), of_chunks = scan(chunks_after, Sum{}),
               of_cut = scan(cut, Sum{});
    behind = of_behind.before, chunks_after = of_chunks.before, cut = of_cut.before;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i - 1, count = i > 0 ? segments_of(n) : 1;
      if (count > 1) {
        behind += count - 1;
        chunks_after += chunks(n) - chunks_before(n, 1, count);
        cut_sequences(a.cut)[cut++] = n;
      }
      a.offsets_behind[i] = behind;
      chunks_behind()[i] = chunks_after;
    }
    const int64_t HV = a.input.num_value_heads, exits = of_behind.all * HV;
    const CutHeader made{N + of_behind.all,
                         of_behind.all,
                         largest_of(most),
                         largest_of(longest),
                         of_cut.all,
                         s.chosen.early_exit && fused::transitions_fit(exits, in.num_sms) ? 1 : 0};
    if (t == 0) s.cut = *a.cut = made;
    __syncthreads();
  }

  // ---- units

  __device__ TokenRange tokens_of(int64_t n, int64_t number, int64_t count) const {
    const int64_t first = a.map.cu_seqlens[n];
    const int64_t last = number + 1 == count
                             ? a.map.cu_seqlens[n + 1]
                             : first + chunks_before(n, number + 1, count) * kAutoChunk;
    return {n, first + chunks_before(n, number, count) * kAutoChunk, last};
  }
  /// The sequence of segment or transition `unit`: the last one before which there are no more.
  template <class Before>
  __device__ int64_t sequence_of(int64_t unit, Before&& before) const {
    int64_t low = 0, high = N;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (before(middle) <= unit ? low : high) = middle;
    }
    return low;
  }
  __device__ WorkUnit segment(int64_t unit) const {
    const int64_t n = sequence_of(unit, [&](int64_t i) { return i + a.offsets_behind[i]; });
    const int64_t count = a.offsets_behind[n + 1] - a.offsets_behind[n] + 1;
    const int64_t number = unit - n - a.offsets_behind[n];
    const FusedState state = count == 1    ? FusedState::kWhole
                             : number == 0 ? FusedState::kFirst
                                           : FusedState::kZero;
    return {tokens_of(n, number, count), unit - n - 1, state,
            a.map.chunk_offsets[n] + chunks_before(n, number, count) + unit * kWorkUnitCost};
  }
  __device__ WorkUnit transition(int64_t behind) const {
    const int64_t n = sequence_of(behind, [&](int64_t i) { return a.offsets_behind[i]; });
    const int64_t count = a.offsets_behind[n + 1] - a.offsets_behind[n] + 1;
    const int64_t number = behind - a.offsets_behind[n] + 1;
    const int64_t before = a.map.chunk_offsets[N] + chunks_behind()[n] +
                           chunks_before(n, number, count) - chunks_before(n, 1, count);
    return {tokens_of(n, number, count), behind, FusedState::kTransition,
            before + (s.cut.num_segments + behind) * kWorkUnitCost};
  }
  __device__ void make_units() const {
    const int64_t segments = s.cut.num_segments, behind = s.cut.num_behind;
    for (int64_t i = t; i < segments + behind; i += kThreads)
      a.units[i] = i < segments ? segment(i) : transition(i - segments);
    if (t == 0)
      a.units[segments + behind] = {
          {},
          0,
          FusedState::kGiven,
          a.map.chunk_offsets[N] + chunks_behind()[N] + (segments + behind) * kWorkUnitCost};
    if (s.cut.early_exit) return;
    __syncthreads();
    const int64_t HV = a.input.num_value_heads;
    for (int64_t i = t; i < behind * HV; i += kThreads)
      a.exit_tokens[i] = a.units[segments + i / HV].tokens.end;
  }
};

__global__ void __launch_bounds__(kThreads)
    device_cut_kernel(const __grid_constant__ DeviceCutArgs a) {
  __shared__ Shared shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Cutter cutter(a, shared);
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
