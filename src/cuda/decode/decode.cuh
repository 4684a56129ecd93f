// SPDX-License-Identifier: Apache-2.0
// The kernel of decode.cu and, with other arguments, of head_gates.cu and drafts.cu.
//
// A step in order, and why there:
//   1. wait for the previous launch; let the next one start (the launch takes much of a
//      short step)
//   2. find slots; start the copies of the token's rows (cp.async to shared memory) (they
//      must arrive before the state)
//   3. start the loads of the whole state into registers (no value is converted earlier,
//      because a conversion waits for its load)
//   4. prefetch into the L2 a part of the state of a later block, as many blocks ahead as
//      the card has SMs (when that block starts, memory is busy with stores)
//   5. wait for the token's rows; compute norms and decays (cp.async is waited for
//      separately, while loads to registers continue)
//   6. __syncthreads (the token's rows are complete for both warps)
//   7. convert v and beta; sweep, outputs, update (the state has arrived by now)
//   8. store the state; at the end write zeros to skipped rows of o (earlier these zeros
//      would wait for the lengths)
#pragma once

#include "cuda/decode/decode.hpp"
#include "cuda/decode/packed_tile.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/cache.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/metadata.cuh"

namespace kda::cuda::decode {

constexpr int kMostWarps = 2;  // of a block: neighbouring tiles of one head of one sequence

/// Tokens of a sequence that are computed: all, but each needs its slot where each is stored.
__device__ __forceinline__ int64_t most_tokens(const DecodeArgs& a) {
  return a.index_columns > 1 ? a.index_columns : INT64_MAX;
}

__device__ __forceinline__ int64_t raw_length(const DecodeArgs& a, int64_t i) {
  return a.wide_lengths ? static_cast<const int64_t*>(a.lengths)[i]
                        : static_cast<const int32_t*>(a.lengths)[i];
}
__device__ __forceinline__ int64_t length_of(const DecodeArgs& a, int64_t i) {
  return max(int64_t{0}, min(raw_length(a, i), a.map.num_tokens));
}
__device__ __forceinline__ TokenRange tokens_of(const DecodeArgs& a, int64_t n) {
  if (!a.lengths) return sequence_range(a.map, n);
  const int64_t begin = length_of(a, n);
  return {n, begin, max(begin, length_of(a, n + 1))};
}

/// Flags of device metadata, by a block that has nothing else to do.
__device__ inline void write_flags(const DecodeArgs& a) {
  const int64_t most = a.lengths ? INT64_MAX : most_tokens(a);
  write_metadata_flags({a.flags, false, a.map, a.index_columns, 0, a.num_accepted, most}, a.initial,
                       a.in_place ? StateView{} : a.target, {});
  if (!a.lengths) return;
  const int64_t N = a.map.num_sequences, T = a.map.num_tokens;
  bool bad = raw_length(a, 0) != 0 || raw_length(a, N) != T, many = false;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    const int64_t begin = raw_length(a, n), end = raw_length(a, n + 1);
    bad |= begin < 0 || end < begin || end > T;
    const TokenRange tokens = tokens_of(a, n);
    many |= tokens.end - tokens.begin > most_tokens(a);
  }
  const int any_bad = __syncthreads_or(bad), any_many = __syncthreads_or(many);
  if (threadIdx.x == 0)
    *a.flags |= (any_bad ? kBadSequences : 0) | (any_many ? kTooManyDecodeTokens : 0);
}

/// Where a sequence's state comes from and goes to.
struct Slots {
  int64_t source = -1;  ///< -1: it starts from zero
  int64_t target = -1;  ///< of the state after the last token; -1: none
  bool skip = false;    ///< the sequence has no slot in the pool
};

__device__ __forceinline__ Slots slots_of(const DecodeArgs& a, int64_t n) {
  if (!a.in_place) return {state_slot(a.initial, n), state_slot(a.target, n), false};
  const int64_t accepted = a.num_accepted ? a.num_accepted[n] : 1;
  if (accepted < 1 || accepted > a.index_columns) return {-1, -1, true};
  const int64_t slot =
      a.initial.indices ? a.initial.indices[n * a.index_columns + accepted - 1] : n;
  if (lacks_slot(a.initial, slot)) return {-1, -1, true};
  return {a.initial.mask && a.initial.mask[n] == 0 ? -1 : slot, slot, false};
}

/// Slot that the state after token `i` of the sequence goes to; -1: none.
__device__ __forceinline__ int64_t target_slot(const DecodeArgs& a, int64_t n, int64_t i, bool last,
                                               const Slots& slots) {
  if (a.index_columns == 1) return last ? slots.target : -1;
  const int64_t slot = a.target.indices[n * a.index_columns + i];
  return lacks_slot(a.target, slot) ? -1 : slot;
}

/// Blocks of a head, of tiles of kColumns.
template <int kK, bool kDense, int kColumns>
__device__ __forceinline__ unsigned groups_of(const DecodeArgs& a) {
  constexpr unsigned kTiles = kK / kColumns, kWarps = kTiles < kMostWarps ? kTiles : kMostWarps;
  if constexpr (kDense) return kTiles / kWarps;
  const unsigned tiles = (a.shape.V + kColumns - 1) / kColumns, warps = blockDim.x / 32;
  return (tiles + warps - 1) / warps;
}

/// Work of a block.
struct Unit {
  int64_t n;    // sequence
  int64_t row;  // of the batch: packed sequences have one
  int64_t head, q_head;
  unsigned group;  // of the head's
};
template <int kK, bool kDense, int kColumns, class Args>
__device__ __forceinline__ Unit unit_of(const Args& a, unsigned block) {
  const unsigned groups = groups_of<kK, kDense, kColumns>(a), of_all = block / groups;
  const unsigned head = a.shape.heads.remainder(of_all);
  const int64_t n = a.shape.heads.quotient(of_all);
  return {
      n, a.lengths ? 0 : n, head,
      has_tiled_heads(a) ? head % static_cast<unsigned>(a.shape.H) : a.shape.group.quotient(head),
      block % groups};
}

// ---- drafts that are a tree (drafts.hpp) -------------------------------------------------------

/// How many of `tokens` of a sequence are computed.
__device__ __forceinline__ int64_t most_in_tree(const DecodeArgs&, int64_t, int64_t tokens) {
  return tokens;
}
/// The tile is the state after the token before the sequence's token `i`; then after its parent.
template <class Tile>
__device__ __forceinline__ void restore_parent(const DecodeArgs&, const Unit&, int64_t, Tile*) {}

// ---- the kernel --------------------------------------------------------------------------------

template <class Tile>
__device__ __forceinline__ void store_values(const DecodeArgs& a, const Unit& unit, int64_t token,
                                             const Tile& tile, const float (&o)[Tile::kOwned]) {
  const int64_t at = row_offset(a.o, a.map, unit.row, token, unit.head);
#pragma unroll
  for (int i = 0; i < Tile::kOwned; ++i)
    if (tile.writes_output() && tile.value(i) < a.shape.V)
      store_element(a.o.base, a.o.type, at + tile.value(i), o[i]);
}

/// Rows of o that no token is computed for: of this sequence, [end, span.end); of none, every N-th
/// of those before the first sequence and behind the last one.
template <int kColumns>
__device__ void zero_rows(const DecodeArgs& a, const Unit& unit, const TokenRange& tokens,
                          int64_t end, int column0) {
  const auto zero = [&](int64_t first, int64_t last, int64_t step) {
    for (int64_t t = first; t < last; t += step) {
      const int64_t at = row_offset(a.o, a.map, unit.row, t, unit.head);
      for (int c = column0 + static_cast<int>(threadIdx.x) % 32;
           c < min(column0 + kColumns, a.shape.V); c += 32)
        store_element(a.o.base, a.o.type, at + c, 0.0f);
    }
  };
  zero(end, tokens.end, 1);
  if (!a.lengths) return;
  const int64_t N = a.map.num_sequences;
  zero(unit.n, length_of(a, 0), N);
  zero(length_of(a, N) + unit.n, a.map.num_tokens, N);
}

/// A share of the state that a later block will load, for the L2: a block that begins finds the
/// memory busy with stores of others, and has nothing to do until its state is there.
template <int kK, bool kDense, int kColumns>
struct Ahead {
  uintptr_t from = 0;  // 0: nothing
  uint32_t bytes = 0;

  __device__ __forceinline__ Ahead(const DecodeArgs& a, unsigned blocks) {
    const unsigned block = blockIdx.x + a.ahead;
    if (!kDense || a.ahead == 0 || block >= blocks) return;
    const Unit unit = unit_of<kK, kDense, kColumns>(a, block);
    const int64_t slot = slots_of(a, unit.n).source;
    if (slot < 0) return;
    const int size = a.initial.bf16 ? 2 : 4;
    bytes = kK * kK * size / groups_of<kK, kDense, kColumns>(a);
    from = reinterpret_cast<uintptr_t>(a.initial.base) + unit.group * bytes +
           static_cast<uintptr_t>(state_offset(a.initial, slot, unit.head, 0, 0) * size);
  }
  __device__ __forceinline__ void prefetch() const {
    if (from && threadIdx.x == 0) ptx::cp_async_bulk_prefetch_l2(from, bytes);
  }
};

/// Rows of a token on their way.
template <int kK, template <int> class Row>
struct RawToken {
  RawQK<kK, Row> qk;
  RawGates<kK, Row> gates;
};

template <int kK, bool kDense>
struct Shared {
  using Raw = RawToken<kK, SharedRow>;
  Token<kK> tokens[2];  // by parity
  std::conditional_t<kDense, Raw, int> raw;
};

/// Where rows are on their way to.
template <int kK, bool kDense>
__device__ auto& rows_of(Shared<kK, kDense>& shared, RawToken<kK, LaneRow>& in_registers) {
  if constexpr (kDense)
    return shared.raw;
  else
    return in_registers;
}

template <int kK, Access kAccess, bool kDense, bool kPacked>
struct DecodeTile : TileOf<kK, kAccess, kDense> {};
template <int kK>
struct DecodeTile<kK, Access::kVectorsKV, true, true> {
  using Type = PackedTileKV<kK>;
};

/// kPacked: states are bf16 and dense, and each sequence has one token.
template <int kK, Access kAccess, bool kDense, bool kPacked, class Args>
__global__ void __launch_bounds__(32 * kMostWarps, 4)
    decode_kernel(const __grid_constant__ Args a) {
  using Tile = typename DecodeTile<kK, kAccess, kDense, kPacked>::Type;
  constexpr int kColumns = Tile::kColumns;
  auto& shared = *reinterpret_cast<Shared<kK, kDense>*>(ptx::dynamic_shared());
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const unsigned blocks = gridDim.x - (a.flags ? 1 : 0);
  if (blockIdx.x == blocks) return write_flags(a);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Unit unit = unit_of<kK, kDense, kColumns>(a, blockIdx.x);
  const TokenRange tokens = tokens_of(a, unit.n);
  const int64_t begin = tokens.begin,
                end = begin + most_in_tree(a, unit.n, min(tokens.end - begin, most_tokens(a)));
  const Slots slots = slots_of(a, unit.n);
  // In place an empty sequence has its state where it is, unless that is made zero.
  const bool stays = a.in_place && (slots.source >= 0 || a.index_columns > 1);
  const int column0 = (static_cast<int>(unit.group) * warps + warp) * kColumns;
  if (slots.skip || (stays && begin >= end)) {
    if (a.zero_skipped) zero_rows<kColumns>(a, unit, tokens, begin, column0);
    return;
  }
  const bool mine = kDense || column0 < a.shape.V;  // else the warp only helps with the tokens
  // The token before the state: it is ready when the state arrives.
  RawToken<kK, LaneRow> in_registers;
  auto& raw = rows_of(shared, in_registers);
  constexpr int kShare = (kColumns + 31) / 32;  // of a lane
  RawValues<kShare> values;
  const bool has_qk = warp == 0, has_gates = warp + 1 == warps;
  const auto load_token = [&](int64_t token) {
    if (has_qk) raw.qk.load(a, unit.row, token, unit.q_head);
    if (has_gates) raw.gates.load(a, unit.row, token, unit.head);
    if constexpr (kDense) ptx::cp_async_commit();
    values.load(a, unit.row, token, unit.head, column0,
                kDense ? kColumns : min(kColumns, a.shape.V - column0));
  };
  const auto prepare = [&](Token<kK>& token) {
    if constexpr (kDense) ptx::cp_async_wait<0>(), __syncwarp();
    if (has_qk) raw.qk.prepare(a, token);
    if (has_gates) raw.gates.prepare(a, token);
  };
  if (begin < end) load_token(begin);
  const Ahead<kK, kDense, kColumns> ahead(a, blocks);
  Tile tile(column0);
  if (!kDense || slots.source < 0) tile.clear();
  if (mine && slots.source >= 0) {
    if (a.initial.bf16)
      tile.template load<true>(a.initial, a.shape, slots.source, unit.head);
    else
      tile.template load<false>(a.initial, a.shape, slots.source, unit.head);
  }
  ahead.prefetch();
  const auto store = [&](int64_t slot) {
    if (slot < 0) return;
    if (a.target.bf16)
      tile.template store<true>(a.target, a.shape, slot, unit.head);
    else
      tile.template store<false>(a.target, a.shape, slot, unit.head);
  };
  if (begin >= end && mine) store(slots.target);  // the final state of an empty sequence
  for (int64_t t = begin; t < end; ++t) {
    if (mine) restore_parent(a, unit, t - begin, &tile);
    Token<kK>& token = shared.tokens[(t - begin) % 2];
    prepare(token);
    __syncthreads();
    // Not before: these wait for the state too.
    float row[kShare], v[Tile::kOwned], o[Tile::kOwned];
    values.v.convert(a.v.type, row);
#pragma unroll
    for (int i = 0; i < Tile::kOwned; ++i) {
      const int column = tile.value(i) - tile.column0;
      v[i] = __shfl_sync(~0u, row[0], column % 32);
#pragma unroll
      for (int part = 1; part < kShare; ++part) {
        const float of_part = __shfl_sync(~0u, row[part], column % 32);
        if (column / 32 == part) v[i] = of_part;
      }
    }
    const float beta = __shfl_sync(~0u, values.beta_of(a), 0);
    if (!kPacked && t + 1 < end) load_token(t + 1);
    if (!mine) continue;
    tile.step(token, beta, a.gate.scale, v, o);
    store_values(a, unit, t, tile, o);
    store(target_slot(a, unit.n, t - begin, t + 1 == end, slots));
    if constexpr (kPacked) break;
  }
  if (a.zero_skipped) zero_rows<kColumns>(a, unit, tokens, end, column0);
}

// ---- its launch --------------------------------------------------------------------------------

/// Whether both buffers have rows of kK elements without gaps, and q, k and gates are of whole
/// words. One gate a head lies in some word.
template <int kK, class Args>
bool is_dense(const Args& args) {
  const StateView& from = args.initial.base ? args.initial : args.target;
  const bool words =
      gate_step(args) == 0 ? reinterpret_cast<uintptr_t>(args.g.base) % 4 == 0 : args.g.whole_words;
  return args.shape.K == kK && args.shape.V == kK && from.stride_row == kK &&
         args.target.stride_row == kK && args.q.whole_words && args.k.whole_words && words;
}

/// Whether states are read and written four elements at a time.
inline bool has_vectors(const DecodeArgs& args) {
  const StateView& from = args.initial.base ? args.initial : args.target;
  return from.vectors && args.target.vectors;
}

/// Launches the kernel of these parameters.
template <int kK, Access kAccess, bool kDense, bool kPacked = false, class Args>
Status launch(const Args& args, const Launch& where) {
  constexpr int kColumns = DecodeTile<kK, kAccess, kDense, kPacked>::Type::kColumns;
  const int64_t tiles = (args.shape.V + kColumns - 1) / kColumns;
  const int64_t warps = min(tiles, int64_t{kMostWarps});
  const int64_t blocks = args.map.num_sequences * args.shape.HV * ((tiles + warps - 1) / warps);
  const int64_t of_flags = args.flags ? 1 : 0;
  return launch_kernel("decode", decode_kernel<kK, kAccess, kDense, kPacked, Args>,
                       blocks + of_flags, static_cast<int>(32 * warps),
                       static_cast<int>(sizeof(Shared<kK, kDense>)), where, args);
}

/// States from which on a warp needs many bytes on their way. Fewer do not fill a card, and the
/// smaller tiles answer sooner.
inline constexpr int64_t kPackedStates = 256;

/// Whether 16 bytes of every row of a bf16 buffer may be read at a time.
inline bool has_whole_vectors(const StateView& view) {
  return reinterpret_cast<uintptr_t>(view.base) % 16 == 0 && view.stride_slot % 8 == 0 &&
         view.stride_head % 8 == 0;
}

/// Whether there are many states in bf16, and each sequence has one token, behind which its state
/// is rounded.
template <class Args>
bool is_packed(const Args& args) {
  if (args.map.num_sequences * args.shape.HV < kPackedStates) return false;
  if (!has_whole_vectors(args.target) || !has_whole_vectors(args.initial)) return false;
  const bool one_token = !args.lengths && !args.map.cu_seqlens && args.map.num_tokens == 1;
  return one_token && args.target.bf16 && (!args.initial.base || args.initial.bf16);
}

/// Launches a kernel for dense buffers of K = V = kK.
template <int kK, Access kAccess, class Args>
Status launch_dense(const Args& args, const Launch& where) {
  if constexpr (kK == 128 && kAccess == Access::kVectorsKV)
    if (is_packed(args)) return launch<kK, kAccess, true, true>(args, where);
  return launch<kK, kAccess, true>(args, where);
}

}  // namespace kda::cuda::decode
