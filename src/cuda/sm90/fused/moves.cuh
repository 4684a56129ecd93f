// SPDX-License-Identifier: Apache-2.0
// What a pair of producer warps copies: raw rows of the runs that it makes, v and o of this block's
// columns.
#pragma once

#include "cuda/sm90/fused/shared.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::sm90::fused {

/// E: elements of g. A pair has two runs of every kMakers: it makes the factors of one for both
/// blocks of the cluster (the other block makes those of the other one), and moves v and o of both.
template <class E>
struct Moves {
  /// Where this thread's piece of the next run lies: row thread / 8, 16 bytes. Pointers walk from
  /// run to run: offsets from indices cost more than the copies.
  struct Walk {
    char* at;
    int64_t step;  // 8 rows, bytes
  };

  const FusedPrefillArgs& a;
  Ring& ring;
  Workshop& own;
  const Span span;
  const int head, rank, pair;  // rank of the block in the cluster
  const int num_runs, last;    // tokens of the last run
  int thread;                  // of 64
  Walk q, k, g, v, o, beta;

  __device__ Moves(const FusedPrefillArgs& args, Ring& shared, Span tokens, int value_head,
                   int block, int which, int index)
      : a(args),
        ring(shared),
        own(shared.workshops[which]),
        span(tokens),
        head(value_head),
        rank(block),
        pair(which),
        num_runs(static_cast<int>((tokens.end - tokens.begin + kRun - 1) / kRun)),
        last(static_cast<int>(tokens.end - tokens.begin - int64_t{num_runs - 1} * kRun)),
        thread(index) {
    const auto q_head = static_cast<int>(a.shape.group.quotient(static_cast<unsigned>(head)));
    const int beta_size = a.beta.type == Element::kFloat32 ? 4 : 2;
    q = walk(a.q, q_head, mine(), thread / 8, thread % 8 * 16, sizeof(T));
    k = walk(a.k, q_head, mine(), thread / 8, thread % 8 * 16, sizeof(T));
    g = walk(a.g, head, mine(), thread / 8, thread % 8 * 16, sizeof(E));
    v = walk(a.v, head, first(), thread / 8, rank * 128 + thread % 8 * 16, sizeof(T));
    o = walk(a.o, head, first(), thread / 8, rank * 128 + thread % 8 * 16, sizeof(T));
    beta = walk(a.beta, head, mine(), norm_row(), 0, beta_size);
  }
  __device__ Walk walk(const RowView& view, int view_head, int run, int row, int bytes,
                       int size) const {
    const int64_t element =
        row_offset(view, a.map, span.sequence, span.begin + run * kRun + row, view_head);
    return {static_cast<char*>(view.base) + element * size + bytes, view.stride_t * size * 8};
  }

  __device__ int first() const { return pair * kHalves; }
  __device__ int mine() const { return first() + rank; }
  __device__ int lane() const { return thread % 32; }
  __device__ int half() const { return thread / 32; }
  /// Of the token whose norms this lane computes, if it does.
  __device__ int norm_row() const { return half() * 8 + lane() / 4; }
  __device__ int count(int run) const {
    return run + 1 < num_runs ? kRun : run + 1 == num_runs ? last : 0;
  }
  /// Barrier of both warps: an even number a run, of parity 0, 1, 0, ... (Racecheck follows
  /// mbarriers; of named ones of 64 threads it reported accesses on both sides as races.)
  template <int kParity>
  __device__ void sync() const {
    ptx::mbarrier_arrive(own.meet);
    ptx::mbarrier_wait(own.meet, kParity);
  }
  /// What was computed from the thread's index is computed again, not kept in registers or spilled.
  __device__ void forget_index() { asm volatile("" : "+r"(thread)); }

  /// Rows of kBytes bytes to rows kPitch bytes apart, zeros past the sequence.
  template <int kBytes, int kPitch>
  __device__ void copy_rows(void* target, Walk& from, int rows) const {
    const uint32_t address = ptx::shared_address(target) + thread / 8 * kPitch + thread % 8 * 16;
#pragma unroll
    for (int row = 0; row < kRun; row += 8)
#pragma unroll
      for (int byte = 0; byte < kBytes; byte += 128)
        ptx::cp_async<16>(address + row * kPitch + byte, from.at + (row ? from.step : 0) + byte,
                          row + thread / 8 < rows);
    from.at += from.step * (kMakers * kRun / 8);
  }
  __device__ void load_raw(int run) {
    const int rows = count(run);
    if (rows > 0) {
      copy_rows<kK * sizeof(T), kStride * sizeof(T)>(own.q, q, rows);
      copy_rows<kK * sizeof(T), kStride * sizeof(T)>(own.k, k, rows);
      copy_rows<kK * sizeof(E), kK * sizeof(E)>(own.g, g, rows);
    }
    ptx::cp_async_commit();
  }
  __device__ uint32_t load_beta(int rows) {
    const char* at = beta.at;
    beta.at += beta.step * (kMakers * kRun / 8);
    if (norm_row() >= rows) return 0;
    return a.beta.type == Element::kFloat32 ? *reinterpret_cast<const uint32_t*>(at)
                                            : *reinterpret_cast<const uint16_t*>(at);
  }

  /// This thread's pieces of v or o of two runs: visit(in shared memory, in device memory).
  template <class Visit>
  __device__ void for_each_piece(int run, Walk& walk, Visit&& visit) const {
    T* tiles = ring.v[run % kStages] + swizzled_in<kRun>(thread / 8, thread % 8);
    char* at = walk.at;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i, at += walk.step)
      visit(tiles + i / 2 * kRun * kVTile + i % 2 * 8 * 64, at,
            i % 2 * 8 + thread / 8 < count(run + i / 2));
    walk.at += walk.step * (kMakers * kRun / 8);
  }
  __device__ void load_v(int run) {
    for_each_piece(run, v, [](T* tile, const char* at, bool valid) {
      ptx::cp_async<16>(ptx::shared_address(tile), at, valid);
    });
    ptx::cp_async_commit();
  }
  __device__ void store_outputs(int run) {
    for_each_piece(run, o, [](const T* tile, char* at, bool valid) {
      if (valid) *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(tile);
    });
  }
};

}  // namespace kda::cuda::sm90::fused
