// SPDX-License-Identifier: Apache-2.0
// What a pair of producer warps copies: raw rows of the runs that it makes, v and o of this block's
// columns.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/fused/shared.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::sm90::fused {

/// E: elements of g. A pair has two runs of every kMakers: it makes the factors of one for both
/// blocks of the cluster (the other block makes those of the other one), and moves v and o of both.
template <class E>
struct Moves {
  /// Rows that a pair of warps copies at once, 16 bytes a lane; that one warp copies.
  static constexpr int kPairRows = 8, kWarpRows = 4;
  /// Where this lane's piece of the next run lies. Pointers walk from run to run: offsets from
  /// indices cost more than the copies.
  struct Walk {
    char* at;
    int64_t step;  // bytes of kPairRows or kWarpRows rows
  };

  const FusedPrefillArgs& a;
  Ring& ring;
  Workshop& own;
  const Span span;
  const int head, rank, pair;  // rank of the block in the cluster
  const int num_tokens, num_runs;
  unsigned thread;  // of 64; unsigned, so that divisions of it are shifts
  Walk q, k, g, v, o, beta;

  __device__ Moves(const FusedPrefillArgs& args, Ring& shared, Span tokens, int value_head,
                   int block, int which, unsigned index)
      : a(args),
        ring(shared),
        own(shared.workshops[which]),
        span(tokens),
        head(value_head),
        rank(block),
        pair(which),
        num_tokens(static_cast<int>(tokens.end - tokens.begin)),
        num_runs((num_tokens + kRun - 1) / kRun),
        thread(index) {
    const auto q_head = static_cast<int>(a.shape.group.quotient(static_cast<unsigned>(head)));
    const int beta_size = a.beta.type == Element::kFloat32 ? 4 : 2;
    const int pair_row = half() * 4 + lane() / 8, warp_row = lane() / 8, piece = column() * 16;
    q = walk<kPairRows>(a.q, q_head, mine(), pair_row, piece, sizeof(T));
    k = walk<kPairRows>(a.k, q_head, mine(), pair_row, piece, sizeof(T));
    g = walk<kPairRows>(a.g, head, mine(), pair_row, piece, sizeof(E));
    v = walk<kWarpRows>(a.v, head, first(), warp_row, rank * 128 + piece, sizeof(T));
    o = walk<kWarpRows>(a.o, head, first(), warp_row, rank * 128 + piece, sizeof(T));
    beta = walk<kPairRows>(a.beta, head, mine(), norm_row(), 0, beta_size);
  }
  template <int kRows>
  __device__ Walk walk(const RowView& view, int view_head, int run, int row, int bytes,
                       int size) const {
    const int64_t element =
        row_offset(view, a.map, span.sequence, span.begin + run * kRun + row, view_head);
    return {static_cast<char*>(view.base) + element * size + bytes, view.stride_t * size * kRows};
  }
  template <int kRows>
  __device__ static void to_next_run(Walk& walk) {
    walk.at += walk.step * (kMakers * kRun / kRows);
  }

  __device__ int first() const { return pair * kHalves; }
  __device__ int mine() const { return first() + rank; }
  __device__ int lane() const { return static_cast<int>(thread % 32); }
  __device__ int half() const { return static_cast<int>(thread / 32); }
  /// Of the 8 pieces of 16 bytes in 128 bytes of a row.
  __device__ int column() const { return static_cast<int>(thread % 8); }
  /// Of the token whose norms this lane computes, if it does.
  __device__ int norm_row() const { return half() * 8 + lane() / 4; }
  /// From this run on; 0 or less where it is past the sequence.
  __device__ int tokens_from(int run) const { return num_tokens - run * kRun; }
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
    const int first_row = static_cast<int>(thread / 8);
    const uint32_t address = ptx::shared_address(target) + first_row * kPitch + column() * 16;
#pragma unroll
    for (int row = 0; row < kRun; row += kPairRows)
#pragma unroll
      for (int byte = 0; byte < kBytes; byte += 128)
        ptx::cp_async<16>(address + row * kPitch + byte, from.at + (row ? from.step : 0) + byte,
                          row < rows - first_row);
    to_next_run<kPairRows>(from);
  }
  __device__ void load_raw(int run) {
    const int rows = tokens_from(run);
    if (rows > 0) {
      copy_rows<kK * sizeof(T), kStride * sizeof(T)>(own.q, q, rows);
      copy_rows<kK * sizeof(T), kStride * sizeof(T)>(own.k, k, rows);
      copy_rows<kK * sizeof(E), kK * sizeof(E)>(own.g, g, rows);
    }
    ptx::cp_async_commit();
  }
  __device__ uint32_t load_beta(int rows) {
    const char* at = beta.at;
    to_next_run<kPairRows>(beta);
    if (norm_row() >= rows) return 0;
    return a.beta.type == Element::kFloat32 ? *reinterpret_cast<const uint32_t*>(at)
                                            : *reinterpret_cast<const uint16_t*>(at);
  }

  // ---- by the first warp -----------------------------------------------------------------------

  /// This lane's pieces of v or o of two runs, whose tiles follow each other: visit(address in
  /// shared memory, in device memory, whether the token exists).
  template <class Visit>
  __device__ void for_each_piece(int run, Walk& walk, Visit&& visit) const {
    const int first_row = lane() / 8, rows = tokens_from(run) - first_row;
    const uint32_t place = ptx::shared_address(ring.v[first()]) + first_row * 128;
    char* at = walk.at;
#pragma unroll
    for (int row = 0; row < kHalves * kRun; row += kWarpRows, at += walk.step)
      visit(place + row * 128 + (column() ^ first_row ^ row % 8) * 16, at, row < rows);
    to_next_run<kWarpRows>(walk);
  }
  __device__ void load_v(int run) {
    for_each_piece(run, v, [](uint32_t place, const char* at, bool valid) {
      ptx::cp_async<16>(place, at, valid);
    });
    ptx::cp_async_commit();
  }
  __device__ void store_outputs(int run) {
    for_each_piece(run, o, [](uint32_t place, char* at, bool valid) {
      if (valid) *reinterpret_cast<float4*>(at) = ptx::load_shared_four(place);
    });
  }
};

}  // namespace kda::cuda::sm90::fused
