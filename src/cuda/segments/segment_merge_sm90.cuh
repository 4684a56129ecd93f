// SPDX-License-Identifier: Apache-2.0
// Blocks walk the segments of a sequence in order: per step S' = M S + B for 8 columns. Four warps
// copy M two segments ahead into a ring in shared memory. Shared memory bounds a step: of the other
// warps a lane has rows of its own, so that S is read once for a warp and nothing is shuffled.
// Where no sequence has more than one step a ring of one stage does, and more blocks fit.
// kReverse: from the last segment to the first, S' = M^T S + B.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/segments/merge.cuh"
#include "cuda/segments/segment_merge_sm90.hpp"

namespace kda::cuda::sm90 {

using merge::kColumns;

/// `segment` counts turns: with kReverse the segment of a turn is first + last - segment.
template <int kK, int kStages, bool kReverse = false>
struct Merge {
  static constexpr int kRing = kStages;
  /// Segments that are fetched at first.
  static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  static constexpr int kParts = 4;                   // of the channels, summed at the end of a step
  static constexpr int kChannels = kK / kParts;      // of a part
  static constexpr int kWarps = kK / 16;             // that multiply
  static constexpr int kRowWarps = kWarps / kParts;  // with the same channels
  static constexpr int kLaneRows = kK / (32 * kRowWarps);
  static constexpr int kMultipliers = kWarps * 32, kCopiers = kK;  // threads
  static_assert(kMultipliers == kK * kColumns / 4);

  struct Shared {
    float M[kStages][kK][kK + 4];  // padded against bank conflicts of lanes that read a row each
    float parts[kParts][kK][kColumns];
    float state[kK][kColumns];
    ptx::Mbarrier full[kStages];
  };

  const BegunMergeArgs& a;
  Shared& s;
  const merge::Place place;
  const int thread;
  int64_t first, last;
  /// Steps that this block has made at places before: barriers and stages go on from them.
  int64_t steps_before;

  __device__ Merge(const BegunMergeArgs& args, Shared& shared, const merge::Place& at,
                   int64_t steps = 0)
      : a(args), s(shared), place(at), thread(static_cast<int>(threadIdx.x)), steps_before(steps) {
    const int64_t* offsets = a.segment_offsets + place.sequence;
    first = offsets[0], last = offsets[1] - 1;
  }
  __device__ Merge(const BegunMergeArgs& args, Shared& shared, unsigned block)
      : Merge(args, shared, merge::place_of(args, block)) {}

  __device__ int64_t step_of(int64_t segment) const { return steps_before + segment - first; }
  __device__ int stage_of(int64_t segment) const {
    return static_cast<int>(step_of(segment) % kStages);
  }

  /// Each of the copying threads brings a row, and arrives for it.
  __device__ void fetch(int64_t segment) const {
    if (segment >= last) return;
    const int row = thread - kMultipliers, stage = stage_of(segment);
    constexpr int kBytes = kK * sizeof(float);
    ptx::mbarrier_arrive_expect_tx(s.full[stage], kBytes);
    const int64_t source = kReverse ? first + last - segment : segment;
    ptx::cp_async_bulk(s.M[stage][row], a.M + ((source * a.shape.HV + place.head) * kK + row) * kK,
                       kBytes, s.full[stage]);
  }

  /// This warp's rows and channels of M S.
  __device__ void multiply(int64_t segment) const {
    const int warp = thread / 32, part = warp / kRowWarps;
    const int row0 = warp % kRowWarps * (kK / kRowWarps) + thread % 32;
    const auto& M = s.M[stage_of(segment)];
    float sum[kLaneRows][kColumns] = {};
#pragma unroll 4
    for (int c = part * kChannels; c < (part + 1) * kChannels; c += 4) {
      float4 m[kLaneRows];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const int row = row0 + r * 32;
        if constexpr (kReverse)
          m[r] = {M[c][row], M[c + 1][row], M[c + 2][row], M[c + 3][row]};
        else
          m[r] = *reinterpret_cast<const float4*>(&M[row][c]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 low = *reinterpret_cast<const float4*>(&s.state[c + i][0]);
        const float4 high = *reinterpret_cast<const float4*>(&s.state[c + i][4]);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          const float x = i == 0 ? m[r].x : i == 1 ? m[r].y : i == 2 ? m[r].z : m[r].w;
          add(sum[r], x, low);
          add(sum[r] + 4, x, high);
        }
      }
    }
    const bool odd = thread / 4 % 2;  // 8 lanes that store at once: half of them the other half
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float* target = s.parts[part][row0 + r * 32];
      const float4 low{sum[r][0], sum[r][1], sum[r][2], sum[r][3]};
      const float4 high{sum[r][4], sum[r][5], sum[r][6], sum[r][7]};
      *reinterpret_cast<float4*>(target + (odd ? 4 : 0)) = odd ? high : low;
      *reinterpret_cast<float4*>(target + (odd ? 0 : 4)) = odd ? low : high;
    }
  }
  __device__ static void add(float* sum, float m, float4 x) {
    sum[0] = fmaf(m, x.x, sum[0]), sum[1] = fmaf(m, x.y, sum[1]);
    sum[2] = fmaf(m, x.z, sum[2]), sum[3] = fmaf(m, x.w, sum[3]);
  }

  __device__ float4 sum_of_parts(int row, int column, float4 x) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float4 y = *reinterpret_cast<const float4*>(&s.parts[part][row][column]);
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    return x;
  }

  __device__ static void init(Shared& s) {
    if (threadIdx.x == 0) {
      for (ptx::Mbarrier& full : s.full) ptx::mbarrier_init(full, kCopiers);
      ptx::mbarrier_init_fence();
    }
    __syncthreads();
  }
  __device__ void run() const {
    if (last < first) return;
    init(s);
    walk();
  }
  /// Both kinds of threads meet at the same barriers: two loops, one for each, would do, but not
  /// for compute-sanitizer's synccheck. `fetched`: the ring has every M since a walk before.
  __device__ void walk(bool fetched = false) const {
    const bool copies = thread >= kMultipliers;
    const int row = thread / 2 % kK, column = thread % 2 * 4;
    const merge::Row own{a, place.head, row, place.column0 + column};
    float4& state = *reinterpret_cast<float4*>(&s.state[row][column]);
    if (copies) {
      for (int i = 0; !fetched && i < kAhead; ++i) fetch(first + i);
    } else if (a.begun) {
      state = own.start(first);
    } else {
      state = own.initial(place.sequence);
      own.store(kReverse ? last : first, state);
    }
    for (int64_t segment = first; segment < last; ++segment) {
      float4 x{};
      if (!copies) x = own.B(kReverse ? first + last - segment : segment);
      __syncthreads();  // S is complete, and the stage of the segment before free
      if (copies) {
        if (kStages > 1 && !fetched) fetch(segment + kAhead);
      } else {
        ptx::mbarrier_wait(s.full[stage_of(segment)],
                           static_cast<int>(step_of(segment) / kStages % 2));
        multiply(segment);
      }
      __syncthreads();
      if (copies) continue;
      state = sum_of_parts(row, column, x);
      own.store(kReverse ? first + last - (segment + 1) : segment + 1, state);
    }
  }
};

}  // namespace kda::cuda::sm90
