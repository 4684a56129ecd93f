// SPDX-License-Identifier: Apache-2.0
// The first block cuts a table of lengths, others write zeros in rows of no sequence:
//   map         clamped offsets and chunks of sequences (launch/sequence_map.hpp), and their sums
//   search      eight threads a number of segments, one of them a candidate; they agree on the
//               best; then every warp walks over the numbers, as best_partition() does
//   offsets     segments before each sequence
//   units       a thread a work unit
// Where there is one sequence, it is guessed that it has all tokens: the plan has that cut. Nothing
// is searched then, and nothing waits for the length; if it was wrong, all is done once more.
//
// Compiled without contraction of products and sums, as the planner is: times are compared, and the
// cut has to be the planner's. Nothing hides the latency of one block: so it counts in 32 bits, has
// its tables in shared memory, and divides seldom. In the layers of a model its code is cold: so
// every piece of it is there once, and loops stay loops (docs/log/2026-11.md, "Lengths on the
// GPU").
#include "cuda/fused/device_cut.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/launch/sequence_map.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/block_scan.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::sm90 {
namespace {

using fused::CutModel;
using Lengths = plan::CutLengths<int>;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffff;                        // lanes of a warp
constexpr int kTokens = static_cast<int>(plan::kAutoChunk);  // of a chunk
constexpr int kMost = static_cast<int>(plan::kAutoMaxSegments);
constexpr int kFirsts = fused::kNumFirstSegments, kKinds = fused::kNumCandidates;
static_assert(kKinds * kMost == kThreads && 32 % kKinds == 0, "a thread a candidate");
static_assert(kMost == 64, "two numbers of segments a lane");
static_assert(kTokens == kChunk);

/// Times of candidates, by number of segments less two; infinite where there is none.
struct Times {
  double best_us[kMost];  // without early exit
  double exit_us[kMost];  // with early exit, as a rule
  double stay_us[kMost];  // the same if none exits
};

/// One of N + 1 entries in dynamic shared memory.
struct alignas(16) Entry {
  int token, chunk;  // before a sequence
  int behind;        // segments behind first ones before it; until then, one of lengths to search
  int after;         // chunks of these; until then, the length of the sequence before it
};
static_assert(sizeof(Entry) == kDeviceCutEntryBytes);

struct Shared {
  uint64_t sums[kWarps];  // of a scan
  int longest[kWarps];    // sequence
  int num_lengths;        // those that some candidate cuts
  int most_behind;        // segments
  Times us;
  Lengths best[kMost];  // without early exit
  int even[kMost];      // chunks of a segment, with early exit
};

/// Called by all threads of the block. A table goes through it in tiles of an entry a thread; entry
/// i ends sequence i - 1.
struct Cutter {
  const DeviceCutArgs& a;
  Shared& s;
  Entry* const table;
  const GivenOffsets offsets;
  const int t, lane, warp, N;
  plan::LengthSums<int> sums;
  bool is_cut = false, exits = false;
  Lengths chosen;
  int num_behind;

  __device__ Cutter(const DeviceCutArgs& args, Shared& shared)
      : a(args),
        s(shared),
        table(reinterpret_cast<Entry*>(ptx::dynamic_shared())),
        offsets{args.map},
        t(static_cast<int>(threadIdx.x)),
        lane(static_cast<int>(threadIdx.x % 32)),
        warp(static_cast<int>(threadIdx.x / 32)),
        N(static_cast<int>(args.map.num_sequences)) {}
  __device__ void run() {
    bool guess = N == 1;
    if (guess && t < 2) ptx::prefetch_l2(offsets.place(t));
#pragma unroll 1
    for (;; guess = false) {
      make_map(guess);
      guess ? take_guess() : search();
      make_offsets();
      make_units();
      if (!guess || offsets.has_all(1)) return;
      __syncthreads();  // units were made
    }
  }

  // ---- map

  /// The sum over threads before this one, and over all.
  __device__ Scan scan(uint64_t value) const {
    const uint64_t sum = scan_warp(value, s.sums);
    __syncthreads();
    return scan_block<kWarps>(sum, s.sums);
  }

  __device__ void make_map(bool guess) {
    Mended mended;
    int longest = 0;
    uint64_t all = 0;  // chunks, and in the upper half sequences with tokens
    if (t == 0) s.num_lengths = s.most_behind = 0;
#pragma unroll 1
    for (int i = t; i - t <= N; i += kThreads) {
      const MapEntry given = guess ? MapEntry{0, t == 0 ? 0 : a.map.num_tokens} : offsets.given(i);
      const MapEntry entry = offsets.entry(i, given, mended);
      const auto length = static_cast<int>(entry.end - entry.begin);
      longest = __reduce_max_sync(kAll, plan::larger(longest, length));
      if (lane == 0) s.longest[warp] = longest;
      const auto own = static_cast<uint32_t>(plan::ceil_div(length, kTokens));
      const Scan scanned = scan(own | uint64_t{length > 0} << 32);
      if (i <= N) {
        const uint32_t chunk = static_cast<uint32_t>(all + scanned.before) + own;
        table[i].token = static_cast<int>(entry.end), table[i].chunk = static_cast<int>(chunk);
        table[i].after = length;  // not `behind`, which is another thread's below
        a.map.cu_seqlens[i] = entry.end;
        a.map.chunk_offsets[i] = chunk;
      }
      all += scanned.all;
    }
    if (t == 0) offsets.flag(!mended.any && (guess || offsets.has_all(N)));
    sums.sequences = N;
    sums.with_tokens = static_cast<int>(all >> 32);
    sums.longest = __reduce_max_sync(kAll, lane < kWarps ? s.longest[lane] : 0);
    // A first segment is at least as long as the others, and none is longer than twice another one:
    // no candidate cuts shorter sequences.
    const int shortest = num_chunks() / (kMost + 1) * kTokens;
#pragma unroll 1
    for (int i = t; !guess && i <= N; i += kThreads)
      if (table[i].after > shortest) table[atomicAdd(&s.num_lengths, 1)].behind = table[i].after;
    __syncthreads();
    sums.tokens = table[N].token - table[0].token;
  }
  __device__ int num_chunks() const { return plan::ceil_div(sums.longest, kTokens); }

  // ---- search

  __device__ plan::Cut<int> cut_of(const Lengths& lengths) const {
    const int num_lengths = s.num_lengths;
    plan::Cut<int> cut{.segments = sums.with_tokens - num_lengths};
#pragma unroll 1
    for (int i = 0; i < num_lengths; ++i)
      cut.add(table[i].behind, lengths.first * kTokens, lengths.others * kTokens);
    return cut;
  }
  /// Threads by number of segments, of each by candidate.
  __device__ void time_candidates() const {
    const int index = static_cast<int>(threadIdx.x / kKinds),
              kind = static_cast<int>(threadIdx.x % kKinds), segments = index + 2;
    const bool early = kind >= kFirsts;
    Lengths lengths = plan::cut_lengths(num_chunks(), segments, a.model.first_segments[kind]);
    if (early) lengths.first = lengths.others;
    const plan::Cut<int> cut = cut_of(lengths);
    const int first_tokens = lengths.first * kTokens, memory = a.model.memory_tokens;
    bool exists = segments <= plan::smaller(kMost, num_chunks());
    auto pass = fused::in_line(sums, cut, first_tokens);
    if (early) {
      exists = exists && a.model.check_tokens > 0 && first_tokens > memory &&
               fused::fits_behind(a.model, cut);
      if (exists)
        pass = fused::early_exit(a.model, sums, cut, first_tokens,
                                 kind == kFirsts ? memory : first_tokens);
    } else {
      exists = exists && fused::fits_in_line(a.model, cut);
    }
    const double us = exists ? fused::one_pass_us(a.model, sums, pass) : HUGE_VAL;
    double least = early ? HUGE_VAL : us;
#pragma unroll
    for (int step = 1; step < kKinds; step *= 2)
      least = fused::least_of(least, __shfl_xor_sync(kAll, least, step));
    const unsigned best = __ballot_sync(kAll, !early && us == least);
    const unsigned of_number = best >> (lane - kind) & ((1U << kKinds) - 1);
    if (early)
      (kind == kFirsts ? s.us.exit_us : s.us.stay_us)[index] = us, s.even[index] = lengths.others;
    else if (kind == __ffs(static_cast<int>(of_number)) - 1)  // the first of equals
      s.us.best_us[index] = us, s.best[index] = lengths;
  }
  /// The first index from `i` on of which `is_one` holds; -1: none.
  template <class IsOne>
  __device__ int next(int i, const IsOne& is_one) const {
    const uint64_t low = __ballot_sync(kAll, is_one(lane)),
                   high = __ballot_sync(kAll, is_one(lane + 32));
    return __ffsll(static_cast<long long>((low | high << 32) & ~uint64_t{0} << i)) - 1;
  }
  /// A step of a walk goes to the next number of segments that is taken.
  __device__ void walk(double whole) {
    plan::CutWalk walk{whole, a.model.minimum_step, fused::kCutPatience};
    const auto gains = [&](int i) { return s.us.best_us[i] < walk.below; };
#pragma unroll 1
    for (int i = 0; (i = next(i, gains)) >= 0 && !walk.is_over(i + 2); ++i) {
      walk.take(i + 2, s.us.best_us[i]);
      chosen = s.best[i];
    }
    fused::EarlyExitWalk early(a.model, walk.best);
    const auto exit_gains = [&](int i) {
      return s.us.exit_us[i] < early.below && s.us.stay_us[i] <= early.most;
    };
#pragma unroll 1
    for (int i = 0; walk.segments > 0 && (i = next(i, exit_gains)) >= 0; ++i) {
      early.take(s.us.exit_us[i], s.us.stay_us[i]);
      chosen = {0, s.even[i]};
    }
    exits = early.took;
    is_cut = walk.segments > 0 && !(whole < plan::kMinimumGain * early.best);
  }
  __device__ void take_guess() {
    chosen = a.guess.lengths;
    is_cut = chosen.others > 0;
    exits = a.guess.early_exit != 0;
  }
  __device__ void search() {
    const double whole = fused::forward_us(a.model, sums);
    is_cut = exits = false;
    if (sums.tokens == 0 || whole < plan::kMinimumGain * fused::least_us(a.model, sums)) return;
    time_candidates();
    __syncthreads();
    walk(whole);
  }

  // ---- offsets

  /// Segments before each sequence. The header of the cut.
  __device__ void make_offsets() {
    uint64_t all = 0;  // chunks behind first segments; from bit 32 segments, from 48 sequences
#pragma unroll 1
    for (int i = t; i - t <= N; i += kThreads) {
      int more = 0, rest = 0;  // segments and chunks behind the first one
      if (is_cut && 0 < i && i <= N) {
        const int chunks = table[i].chunk - table[i - 1].chunk;
        more = plan::num_segments_of(chosen, chunks) - 1;
        if (more > 0) rest = chunks - plan::chunks_before(1, more + 1, chunks, chosen.first);
      }
      const auto own = static_cast<uint64_t>(more) << 32 | static_cast<uint32_t>(rest);
      const int most = __reduce_max_sync(kAll, more);
      if (lane == 0 && most > 0) atomicMax(&s.most_behind, most);
      const Scan scanned = scan(own | uint64_t{more > 0} << 48);
      if (i <= N) {
        const uint64_t before_it = all + scanned.before, upto = before_it + own;
        if (more > 0) cut_sequences(a.cut)[before_it >> 48] = i - 1;
        const auto behind = static_cast<int>(upto >> 32 & 0xffff);
        a.offsets_behind[i] = table[i].behind = behind;
        table[i].after = static_cast<int>(static_cast<uint32_t>(upto));
      }
      all += scanned.all;
      __syncthreads();
    }
    num_behind = static_cast<int>(all >> 32 & 0xffff);
    exits = is_cut && exits &&
            fused::transitions_fit(num_behind * a.model.value_heads, a.model.num_sms);
    if (t == 0)
      *a.cut = {N + num_behind,
                num_behind,
                s.most_behind,
                is_cut ? chosen.others * kTokens : 0,
                static_cast<int64_t>(all >> 48),
                exits ? 1 : 0};
  }

  // ---- units

  /// Unit i: segments of all sequences, then transitions.
  __device__ WorkUnit unit(int i) const {
    const bool transition = i >= N + num_behind;
    const int place = transition ? i - N - num_behind : i;
    int n = 0, high = N;  // the last sequence before which there are no more
#pragma unroll 1
    while (high - n > 1) {
      const int middle = (n + high) / 2;
      (table[middle].behind + (transition ? 0 : middle) <= place ? n : high) = middle;
    }
    const Entry at = table[n], next = table[n + 1];
    const int chunks = next.chunk - at.chunk, count = next.behind - at.behind + 1;
    const int number = transition ? place - at.behind + 1 : place - n - at.behind;
    const int begins = plan::chunks_before(number, count, chunks, chosen.first);
    const int ends = plan::chunks_before(number + 1, count, chunks, chosen.first);
    // Before a transition: all segments, and transitions of its sequence behind the first segment.
    const int before_it = transition ? table[N].chunk + next.after - chunks : at.chunk;
    const FusedState state = transition    ? FusedState::kTransition
                             : count == 1  ? FusedState::kWhole
                             : number == 0 ? FusedState::kFirst
                                           : FusedState::kZero;
    return {{n, at.token + begins * kTokens,
             number + 1 == count ? next.token : at.token + ends * kTokens},
            transition ? place : place - n - 1,
            state,
            before_it + begins + i * static_cast<int>(kWorkUnitCost)};
  }
  /// And where the schedule ends.
  __device__ void make_units() const {
    const int units = N + 2 * num_behind;
#pragma unroll 1
    for (int i = t; i < units; i += kThreads) a.units[i] = unit(i);
    if (t == 0)
      a.units[units].before =
          table[N].chunk + table[N].after + units * static_cast<int>(kWorkUnitCost);
  }
};

__global__ void __launch_bounds__(kThreads)
    device_cut_kernel(const __grid_constant__ DeviceCutArgs a) {
  __shared__ Shared shared;
  Cutter cutter(a, shared);
  if (blockIdx.x > 0) {
    ptx::griddepcontrol_wait();
    return cutter.offsets.zero_rest();  // and only then clusters are placed, on SMs side by side
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  cutter.run();
}

}  // namespace

Status launch_device_cut(const DeviceCutArgs& args, const Launch& launch) {
  return launch_kernel("device_cut", device_cut_kernel, 1 + args.map.rest_blocks, kThreads,
                       static_cast<int>((args.map.num_sequences + 1) * kDeviceCutEntryBytes),
                       launch, args);
}

}  // namespace kda::cuda::sm90
