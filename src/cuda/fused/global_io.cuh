// SPDX-License-Identifier: Apache-2.0
// What a maker copies: raw rows of the runs that it makes, v and o of this block's columns.
#pragma once

#include "cuda/fused/scheduler.cuh"
#include "cuda/fused/shared_storage.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::sm90::fused {

/// E: elements of g. A maker is a warp where K is 64, two where it is 128. It has as many runs of
/// every kMakers as the cluster has blocks: it makes the factors of one for both blocks (the other
/// block makes those of the other one), and moves v and o of both. Runs of a part come in as many:
/// the last one may be empty.
template <int kK, class Operand, class E, bool kSegments>
struct Moves {
  static constexpr int kBlocks = fused::kBlocks<kK>, kWarps = kMakerWarps<kK>;
  /// Rows that a maker copies at once, 16 bytes a lane; that one warp copies.
  static constexpr int kWarpRows = 4, kMakerRows = kWarps * kWarpRows;
  /// Sets of 8 tokens whose norms a warp computes.
  static constexpr int kEights = kRun / 8 / kWarps;
  using Stage = fused::Stage<kK>;
  const FusedPrefillArgs& a;
  Ring<kK, Operand, E>& ring;
  Workshop<kK, Operand, E>& own;
  const int rank, maker;  // rank of the block in the cluster; number in the block
  int left;               // tokens of the part from the next runs of this maker on
  /// From the first of the runs on whose outputs are still in their stages; 0: none are.
  int pending = 0;
  unsigned thread;  // of the maker; unsigned, so that divisions of it are shifts
  /// Where this lane's pieces of the next run lie. Pointers walk from run to run: offsets from
  /// indices cost more than the copies.
  char *q, *k, *g, *v, *o, *beta;
  char* next_o;  // where the outputs of the part begin, until those of the part before have left

  __device__ Moves(const FusedPrefillArgs& args, Ring<kK, Operand, E>& shared, int block, int which,
                   unsigned index)
      : a(args),
        ring(shared),
        own(shared.workshops[which]),
        rank(block),
        maker(which),
        thread(index) {}
  /// `run`: the first one of this maker.
  __device__ void begin(const Part& part, int run) {
    left = static_cast<int>(part.span.end - part.span.begin) - run * kRun;
    const auto head = static_cast<int>(part.head);
    const auto q_head = static_cast<int>(a.shape.group.quotient(static_cast<unsigned>(head)));
    const int beta_size = a.beta.type == Element::kFloat32 ? 4 : 2;
    const int row = warp() * kWarpRows + lane() / 8, warp_row = lane() / 8, piece = column() * 16;
    q = place_of(part, a.q, q_head, run + rank, row, piece, sizeof(Bits));
    k = place_of(part, a.k, q_head, run + rank, row, piece, sizeof(Bits));
    g = place_of(part, a.g, head, run + rank, row, piece, sizeof(E));
    v = place_of(part, a.v, head, run, warp_row, rank * 128 + piece, sizeof(Bits));
    RowView outputs = a.o;
    if (kSegments && part.state == FusedState::kTransition) outputs.base = a.Qt;
    next_o = place_of(part, outputs, head, run, warp_row, rank * 128 + piece, sizeof(Bits));
    beta = place_of(part, a.beta, head, run + rank, norm_row(0), 0, beta_size);
  }
  __device__ char* place_of(const Part& part, const RowView& view, int view_head, int run, int row,
                            int bytes, int size) const {
    const int64_t element =
        row_offset(view, a.map, part.span.sequence, part.span.begin + run * kRun + row, view_head);
    return static_cast<char*>(view.base) + element * size + bytes;
  }
  /// Bytes of `rows` rows.
  __device__ static int64_t step(const RowView& view, int size, int rows) {
    return view.stride_t * (size * rows);
  }

  /// Of the stages of this maker.
  __device__ int first() const { return maker * kBlocks; }
  __device__ int mine() const { return first() + rank; }
  __device__ int lane() const { return static_cast<int>(thread % 32); }
  /// Of the maker's.
  __device__ int warp() const { return kWarps == 1 ? 0 : static_cast<int>(thread / 32); }
  __device__ bool is_first() const { return kWarps == 1 || warp() == 0; }
  __device__ bool is_last() const { return kWarps == 1 || warp() == 1; }
  /// What the first and the last warp of a maker do at the same time; where it has one, that does
  /// both.
  template <class First, class Last>
  __device__ __forceinline__ void share(First&& first_does, Last&& last_does) const {
    if constexpr (kWarps == 1)
      first_does(), last_does();
    else if (warp() == 0)
      first_does();
    else
      last_does();
  }
  static constexpr unsigned kLastWarp = (kWarps - 1) * 32;  // its first thread
  /// Of the 8 pieces of 16 bytes in 128 bytes of a row.
  __device__ int column() const { return static_cast<int>(thread % 8); }
  /// Of the token whose norms this lane computes, if it does.
  __device__ int norm_row(int eight) const { return (warp() + eight) * 8 + lane() / 4; }
  /// Barrier of a maker's warps: an even number a run, of parity 0, 1, 0, ... (Racecheck follows
  /// mbarriers; of named ones of 64 threads it reported accesses on both sides as races.)
  template <int kParity>
  __device__ void sync() const {
    sync_begin();
    sync_end<kParity>();
  }
  __device__ void sync_begin() const {
    if constexpr (kWarps == 1)
      __syncwarp();
    else
      ptx::mbarrier_arrive(own.meet);
  }
  template <int kParity>
  __device__ void sync_end() const {
    if constexpr (kWarps > 1) ptx::mbarrier_wait(own.meet, kParity);
  }
  /// What was computed from the thread's index is computed again, not kept in registers or spilled.
  __device__ void forget_index() { asm volatile("" : "+r"(thread)); }

  /// Rows of kBytes bytes, zeros past the part.
  template <class Item, bool kSwizzled>
  __device__ void copy_rows(void* target, const RowView& view, char*& from, int rows) const {
    constexpr int kBytes = kK * sizeof(Item);
    const int first_row = static_cast<int>(thread / 8);
    const int piece = kSwizzled ? column() ^ first_row : column();
    const uint32_t address = ptx::shared_address(target) + first_row * kBytes + piece * 16;
#pragma unroll
    for (int row = 0; row < kRun; row += kMakerRows)
#pragma unroll
      for (int byte = 0; byte < kBytes; byte += 128)
        ptx::cp_async<16>((address ^ (kSwizzled ? row % 8 * 16 : 0)) + row * kBytes + byte,
                          from + step(view, sizeof(Item), row) + byte, row < rows - first_row);
    from += step(view, sizeof(Item), kMakers * kRun);
  }
  /// Of this block's of the maker's runs, which have so many tokens; none if they are past the
  /// part.
  __device__ void load_raw(int tokens) {
    const int rows = tokens - rank * kRun;
    if (tokens > 0) {
      copy_rows<Bits, true>(own.raw.q, a.q, q, rows);
      copy_rows<Bits, true>(own.raw.k, a.k, k, rows);
      copy_rows<E, false>(own.raw.g, a.g, g, rows);
    }
    ptx::cp_async_commit();
  }
  using Betas = uint32_t[kEights];  // as they came
  __device__ void load_beta(Betas& raw, int rows) {
    const bool wide = a.beta.type == Element::kFloat32;
    const char* from = beta;
    beta += step(a.beta, wide ? 4 : 2, kMakers * kRun);
#pragma unroll
    for (int i = 0; i < kEights; ++i)
      raw[i] = beta_at(from + step(a.beta, wide ? 4 : 2, i * 8), wide, norm_row(i) < rows);
  }
  __device__ __forceinline__ static uint32_t beta_at(const char* at, bool wide, bool there) {
    if (!there) return 0;
    return wide ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
  }

  // ---- by the first warp -----------------------------------------------------------------------

  /// This lane's pieces of v or o of the maker's runs, whose tiles follow each other: visit(address
  /// in shared memory, in device memory, whether the token exists).
  template <class Visit>
  __device__ void for_each_piece(int tokens, const RowView& view, char*& walk,
                                 Visit&& visit) const {
    const int first_row = lane() / 8, rows = tokens - first_row;
    const uint32_t place = ptx::shared_address(ring.v[first()]) + first_row * 128;
    char* at = walk;
#pragma unroll
    for (int row = 0; row < kBlocks * kRun;
         row += kWarpRows, at += step(view, sizeof(Bits), kWarpRows))
      visit(place + row * 128 + (column() ^ first_row ^ row % 8) * 16, at, row < rows);
    walk += step(view, sizeof(Bits), kMakers * kRun);
  }
  /// Zeros for transitions.
  __device__ void load_v(int tokens) {
    if (kSegments && ring.courses[4 + kWarps * maker].part.state == FusedState::kTransition)
      tokens = 0;
    for_each_piece(tokens, a.v, v, [](uint32_t place, const char* at, bool valid) {
      ptx::cp_async<16>(place, at, valid);
    });
    ptx::cp_async_commit();
  }
  __device__ void store_outputs() {
    if (kSegments && !a.o.base) return;
    for_each_piece(pending, a.o, o, [](uint32_t place, char* at, bool valid) {
      if (valid) *reinterpret_cast<float4*>(at) = ptx::ld_shared_v4(place);
    });
  }
};

}  // namespace kda::cuda::sm90::fused
