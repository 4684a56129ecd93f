// SPDX-License-Identifier: Apache-2.0
// Copies of a producer group: raw rows of the sub-chunks that it makes, v and o of this block's
// columns.
#pragma once

#include "cuda/fused/producer_context.cuh"

namespace kda::cuda::sm90::fused {

/// Address of a row: `row` tokens into sub-chunk `subchunk` of the item, and `bytes` into the row.
template <class P>
__device__ char* place_of(const P& p, const WorkItem& item, const RowView& view, int view_head,
                          int subchunk, int row, int bytes, int size) {
  const int64_t element = row_offset(view, p.a.map, item.tokens.sequence,
                                     item.tokens.begin + subchunk * kSubchunk + row, view_head);
  return static_cast<char*>(view.base) + element * size + bytes;
}
/// Bytes between a row and the one `rows` further.
__device__ inline int64_t row_step(const RowView& view, int size, int rows) {
  return view.stride_t * (size * rows);
}

/// Points the context at an item, from this group's first sub-chunk of it on.
template <class P>
__device__ void begin_pointers(P& p, const WorkItem& item, int subchunk) {
  p.left = static_cast<int>(item.tokens.end - item.tokens.begin) - subchunk * kSubchunk;
  const auto head = static_cast<int>(head_of<P::kColumnTiles>(item));
  auto q_head = static_cast<int>(p.a.shape.group.quotient(static_cast<unsigned>(head)));
  if constexpr (P::kOneAHead)
    if (p.a.tiled) q_head = head % static_cast<int>(p.a.shape.H);
  const int beta_size = p.a.beta.type == Element::kFloat32 ? 4 : 2;
  const int row = p.warp() * P::kWarpRows + p.lane() / 8, warp_row = p.lane() / 8,
            piece = p.column() * 16;
  const int mine = subchunk + p.rank;
  p.q = place_of(p, item, p.a.q, q_head, mine, row, piece, sizeof(Bits));
  p.k = place_of(p, item, p.a.k, q_head, mine, row, piece, sizeof(Bits));
  if constexpr (P::kOneAHead)
    p.g = place_of(p, item, p.a.g, head, mine, static_cast<int>(p.thread % kSubchunk), 0,
                   sizeof(typename P::Gate));
  else if constexpr (P::kAnyGate)
    p.g = place_of(p, item, p.a.g, head, mine, row, piece,
                   p.a.g.type == Element::kFloat32 ? sizeof(float) : sizeof(Bits));
  else
    p.g = place_of(p, item, p.a.g, head, mine, row, piece, sizeof(typename P::E));
  p.v = place_of(p, item, p.a.v, head, subchunk, warp_row, p.rank * 128 + piece, sizeof(Bits));
  RowView outputs = p.a.o;
  if (P::kSegments && item.state == FusedState::kTransition) outputs.base = p.a.Qt;
  p.next_o =
      place_of(p, item, outputs, head, subchunk, warp_row, p.rank * 128 + piece, sizeof(Bits));
  if constexpr (P::kColumnTiles > 1) {
    const int columns = column_tile<P::kColumnTiles>(item) * 128;
    p.v += columns, p.next_o += columns;
  }
  p.beta = place_of(p, item, p.a.beta, head, mine, p.norm_row(0), 0, beta_size);
}

/// Copies the K elements of 16 rows to shared memory; rows from `rows` on are zeros.
template <class Item, bool kSwizzled, class P>
__device__ void copy_rows(const P& p, void* target, const RowView& view, char*& from, int rows) {
  constexpr int kBytes = P::kK * sizeof(Item);
  const int first_row = static_cast<int>(p.thread / 8);
  const int piece = kSwizzled ? p.column() ^ first_row : p.column();
  const uint32_t address = ptx::shared_address(target) + first_row * kBytes + piece * 16;
#pragma unroll
  for (int row = 0; row < kSubchunk; row += P::kGroupRows)
#pragma unroll
    for (int byte = 0; byte < kBytes; byte += 128)
      ptx::cp_async<16>((address ^ (kSwizzled ? row % 8 * 16 : 0)) + row * kBytes + byte,
                        from + row_step(view, sizeof(Item), row) + byte, row < rows - first_row);
  from += row_step(view, sizeof(Item), p.storage.turn_tokens);
}
/// Copies gates of one a head: a thread has a token.
template <class P>
__device__ void copy_head_gates(P& p, int rows) {
  constexpr int kBytes = sizeof(typename P::Gate);
  if (p.thread < kSubchunk)
    ptx::cp_async<kBytes>(ptx::shared_address(p.own.raw.g) + p.thread * kBytes, p.g,
                          static_cast<int>(p.thread) < rows);
  p.g += row_step(p.a.g, kBytes, p.storage.turn_tokens);
}
/// Starts copies of the raw rows of this group's next sub-chunk. `tokens`: what the item has from
/// the group's sub-chunks on; none are copied past its end.
template <class P>
__device__ void load_raw(P& p, int tokens) {
  const int rows = tokens - p.rank * kSubchunk;
  if (tokens > 0) {
    copy_rows<Bits, true>(p, p.own.raw.q, p.a.q, p.q, rows);
    copy_rows<Bits, true>(p, p.own.raw.k, p.a.k, p.k, rows);
    if constexpr (P::kOneAHead)
      copy_head_gates(p, rows);
    else if constexpr (P::kAnyGate)
      p.a.g.type == Element::kFloat32 ? copy_rows<float, false>(p, p.own.raw.g, p.a.g, p.g, rows)
                                      : copy_rows<Bits, false>(p, p.own.raw.g, p.a.g, p.g, rows);
    else
      copy_rows<typename P::E, false>(p, p.own.raw.g, p.a.g, p.g, rows);
  }
  ptx::cp_async_commit();
}
__device__ __forceinline__ uint32_t load_beta_bits(const char* at, bool wide, bool there) {
  if (!there) return 0;
  return wide ? *reinterpret_cast<const uint32_t*>(at) : *reinterpret_cast<const uint16_t*>(at);
}
/// beta of this lane's tokens, as it lies in memory.
template <class P>
__device__ void load_beta(P& p, uint32_t (&raw)[P::kEights], int rows) {
  const bool wide = p.a.beta.type == Element::kFloat32;
  const char* from = p.beta;
  p.beta += row_step(p.a.beta, wide ? 4 : 2, p.storage.turn_tokens);
#pragma unroll
  for (int i = 0; i < P::kEights; ++i)
    raw[i] =
        load_beta_bits(from + row_step(p.a.beta, wide ? 4 : 2, i * 8), wide, p.norm_row(i) < rows);
}

// ---- v and o, by the first warp of a group

/// Visits this lane's pieces of v or o of the group's sub-chunks, which follow each other in
/// storage.v:
/// visit(address in shared memory, in device memory, whether the token exists).
template <class P, class Visit>
__device__ void for_each_piece(const P& p, int tokens, const RowView& view, char*& walk,
                               Visit&& visit) {
  const int first_row = p.lane() / 8, rows = tokens - first_row;
  const uint32_t place = ptx::shared_address(p.storage.values(p.first())) + first_row * 128;
  char* at = walk;
#pragma unroll
  for (int row = 0; row < P::kBlocks * kSubchunk;
       row += P::kWarpRows, at += row_step(view, sizeof(Bits), P::kWarpRows))
    visit(place + row * 128 + (p.column() ^ first_row ^ row % 8) * 16, at, row < rows);
  walk += row_step(view, sizeof(Bits), p.storage.turn_tokens);
}
/// Starts copies of v; zeros for a transition (this warp's own SchedulerState tells).
template <class P>
__device__ void load_v(P& p, int tokens) {
  if (P::kSegments &&
      p.storage.schedulers[4 + P::kWarps * p.group].item.state == FusedState::kTransition)
    tokens = 0;
  for_each_piece(p, tokens, p.a.v, p.v, [](uint32_t place, const char* at, bool valid) {
    ptx::cp_async<16>(place, at, valid);
  });
  ptx::cp_async_commit();
}
template <class P>
__device__ void store_outputs(P& p) {
  if (P::kSegments && !p.a.o.base) return;
  for_each_piece(p, p.pending, p.a.o, p.o, [](uint32_t place, char* at, bool valid) {
    if (valid) *reinterpret_cast<float4*>(at) = ptx::ld_shared_v4(place);
  });
}

}  // namespace kda::cuda::sm90::fused
