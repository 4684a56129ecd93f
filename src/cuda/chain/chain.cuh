// SPDX-License-Identifier: Apache-2.0
// Parts that the kernels of the chain of chunks share: which columns of which state a warp holds,
// where they begin and end, and the arithmetic of a chunk, with its products by mma.sync.
#pragma once

#include <type_traits>

#include "cuda/chain/chain.hpp"
#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/metadata.cuh"
#include "cuda/tile/swizzle.hpp"

namespace kda::cuda::chain {

/// Two accumulator tiles as an A operand of 16 channels.
template <class T>
__device__ __forceinline__ void round_pairs(const float (&x)[4], const float (&y)[4],
                                            uint32_t (&out)[4]) {
  out[0] = ptx::pack<T>(x[0], x[1]);
  out[1] = ptx::pack<T>(x[2], x[3]);
  out[2] = ptx::pack<T>(y[0], y[1]);
  out[3] = ptx::pack<T>(y[2], y[3]);
}

/// Copies the part of kBytes that thread `tid` of kThreads has to shared memory, in order: tiles
/// lie in the workspace as they are used here.
template <int kBytes, int kThreads>
__device__ void copy_tile(void* target, const void* source, int64_t index, int tid) {
  const char* from = static_cast<const char*>(source) + index * kBytes + tid * 16;
  const uint32_t to = ptx::shared_address(target) + tid * 16;
  constexpr int kRound = kThreads * 16;
#pragma unroll
  for (int at = 0; at + kRound <= kBytes; at += kRound) ptx::cp_async<16>(to + at, from + at);
  constexpr int kDone = kBytes / kRound * kRound;
  if (kDone < kBytes && tid * 16 < kBytes - kDone) ptx::cp_async<16>(to + kDone, from + kDone);
}

/// Blocks of kColumns columns of V cover a multiple of so many: chunk_grad sums over V, so what it
/// reads is written up to the end of a tile.
template <ChainUse kUse, int kColumns>
inline constexpr int kCovered =
    (kUse == ChainUse::kErrors || kUse == ChainUse::kReverse) && kColumns < kVTile ? kVTile
                                                                                   : kColumns;

/// A warp holds S^T of 16 columns of V: rows v of the accumulators, all of K in their columns. An
/// accumulator pair of columns, rounded, is an A operand as it stands: nothing is exchanged.
template <class T, int kK, ChainUse kUse>
struct Chain {
  static constexpr int kTiles = kK / 8;   // n8 tiles of S^T
  static constexpr int kSteps = kK / 16;  // k16 steps over channels
  static constexpr int kTokenTiles = kChunk / 8;
  /// With bf16 vn goes into the state in two parts: errors of the state stay in it.
  static constexpr bool kTwoParts = std::is_same_v<T, __nv_bfloat16>;
  /// Offsets by swizzled_from(), which take fewer registers and instructions.
  /// The forward's uses keep the code that they were measured with.
  static constexpr bool kFromConstants = kUse == ChainUse::kErrors || kUse == ChainUse::kReverse;

  const ChainArgs& a;
  int lane;

  int64_t head, unit;
  TokenRange tokens;
  bool transition;  // columns of M instead of B
  int column;       // first state column of this warp: of V, or of K for M
  int u_tile;       // first tile of u that holds columns of this block
  int tile_column;  // of this warp, in the tile of u that holds it
  int64_t chunk0;
  int num_chunks;
  int64_t checkpoint;  // next one

  float state[kTiles][4];

  __device__ explicit Chain(const ChainArgs& args)
      : a(args), lane(static_cast<int>(threadIdx.x % 32)) {}

  /// Offsets that were computed from the lane are computed again, not kept in registers or spilled.
  __device__ void forget_lane() { ptx::make_opaque(lane); }

  // ---- places ----------------------------------------------------------------------------------

  /// Blocks of kColumns columns, those of a span and head after each other. False: nothing to do.
  template <int kColumns>
  __device__ bool find_place(int warp, unsigned of_launch = blockIdx.x) {
    constexpr int kCover = kCovered<kUse, kColumns>;
    const int v_blocks = (a.shape.V + kCover - 1) / kCover * (kCover / kColumns);
    const int k_blocks = kUse == ChainUse::kScan ? (a.shape.K + kColumns - 1) / kColumns : 0;
    const auto blocks = static_cast<unsigned>(v_blocks + k_blocks);
    const unsigned place = of_launch / blocks;
    int block = static_cast<int>(of_launch % blocks);
    head = a.shape.heads.remainder(place);
    unit = a.shape.heads.quotient(place);
    if constexpr (kUse == ChainUse::kOutputs) {
      const ChunkTokens chunk = chunk_tokens(a.map, static_cast<unsigned>(unit));
      if (chunk.count == 0) return false;
      tokens = {chunk.sequence, chunk.begin, chunk.begin + chunk.count};
    } else {
      tokens = range_of(a.map, unit);
    }
    if (kUse == ChainUse::kScan && a.skip_last &&
        tokens.end == sequence_range(a.map, tokens.sequence).end)
      return false;
    if (kUse == ChainUse::kScan && a.skip_empty && tokens.begin == tokens.end) return false;
    transition = kUse == ChainUse::kScan && block >= v_blocks;
    if (transition) block -= v_blocks;
    column = block * kColumns + warp * 16;
    u_tile = block * kColumns / kVTile;
    tile_column = column % kVTile;
    chunk0 = kUse == ChainUse::kOutputs ? unit : first_chunk(a.map, tokens);
    num_chunks = static_cast<int>(chunks_of(tokens.end - tokens.begin));
    if constexpr (kUse == ChainUse::kForward || kUse == ChainUse::kStates)
      if (a.checkpoints.base)
        checkpoint =
            checkpoints_before(a.map, a.checkpoint_every, tokens.sequence) +
            (tokens.begin - sequence_range(a.map, tokens.sequence).begin) / a.checkpoint_every;
    return true;
  }

  __device__ int64_t tile(int chunk) const { return (chunk0 + chunk) * a.shape.HV + head; }
  __device__ int64_t v_tiles() const { return (a.shape.V + kVTile - 1) / kVTile; }

  // ---- states ----------------------------------------------------------------------------------

  __device__ int columns() const { return transition ? a.shape.K : a.shape.V; }

  /// visit(accumulator, element) for the elements of this lane that exist, of [K, columns] at
  /// `base` with these steps. Pointers go from element to element and types are not asked about in
  /// the loop: with offsets from k and v, loading and storing the state took 10 us of a chain.
  template <class Element, class Visit>
  __device__ __forceinline__ void for_each_state(Element* base, int64_t k_step, int64_t v_step,
                                                 Visit&& visit) {
    const int k0 = lane % 4 * 2, v0 = column + lane / 4;
    const int rows = v0 < columns() ? a.shape.K : 0, rows8 = v0 + 8 < columns() ? a.shape.K : 0;
    Element *at = base + k0 * k_step + v0 * v_step, *at8 = at + 8 * v_step;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = n * 8 + k0 + i;
        if (k < rows) visit(state[n][i], *at);
        if (k < rows8) visit(state[n][i + 2], *at8);
        const int64_t step = i == 0 ? k_step : 7 * k_step;
        at += step, at8 += step;
      }
  }
  template <class Element, class Visit>
  __device__ __forceinline__ void for_each_state(const StateView& view, int64_t slot,
                                                 Visit&& visit) {
    // Opaque, so that no addresses of a rare path are kept in registers over the loop.
    const int64_t first = ptx::opaque(slot * view.stride_slot + head * view.stride_head);
    for_each_state(static_cast<Element*>(view.base) + first, view.vk ? 1 : view.stride_row,
                   view.vk ? view.stride_row : 1, visit);
  }

  __device__ void load_start() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = n * 8 + lane % 4 * 2 + i % 2, v = column + lane / 4 + i / 2 * 8;
        state[n][i] = transition && k == v && k < a.shape.K ? 1.0f : 0.0f;
      }
    if constexpr (kUse == ChainUse::kScan) return;
    const auto load = [](float& x, const float& from) { x = from; };
    if (a.states_in) {
      const int64_t matrix = unit * a.shape.HV + head;
      for_each_state(a.states_in + matrix * a.shape.K * a.shape.V, a.shape.V, 1, load);
      return;
    }
    const int64_t slot = state_slot(a.initial, tokens.sequence);
    if (slot < 0) return;
    if (!a.initial.bf16) return for_each_state<const float>(a.initial, slot, load);
    // Converting an element waits for it: not before all are asked for.
    for_each_state<const uint16_t>(
        a.initial, slot, [](float& x, const uint16_t& from) { x = __uint_as_float(from); });
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[n][i] = widen_state(state[n][i]);
  }

  __device__ void store_to(const StateView& view, int64_t slot) {
    if (slot < 0) return;
    if (view.bf16)
      for_each_state<__nv_bfloat16>(
          view, slot, [](float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); });
    else
      for_each_state<float>(view, slot, [](float x, float& to) { to = x; });
  }

  __device__ void store_end() {
    if constexpr (kUse == ChainUse::kScan) {
      const int64_t matrix = unit * a.shape.HV + head;
      for_each_state((transition ? a.M : a.B) + matrix * a.shape.K * columns(), columns(), 1,
                     [](float x, float& to) { to = x; });
    } else if (kUse != ChainUse::kErrors && a.final_state.base &&
               tokens.end == sequence_range(a.map, tokens.sequence).end) {
      store_to(a.final_state, state_slot(a.final_state, tokens.sequence));
    }
  }

  /// After chunk `chunk`: its state, where a checkpoint is due.
  __device__ __forceinline__ void store_checkpoint(int chunk) {
    if (kUse == ChainUse::kScan || kUse == ChainUse::kErrors || !a.checkpoints.base) return;
    const int64_t done = min(tokens.end, tokens.begin + (chunk + 1) * kChunk) -
                         sequence_range(a.map, tokens.sequence).begin;
    if (done % a.checkpoint_every == 0)
      store_to(a.checkpoints, state_slot(a.checkpoints, checkpoint++));
  }

  // ---- one chunk -------------------------------------------------------------------------------

  /// Where this lane's row of 16 tokens of this warp's columns of u lies: what ldmatrix and
  /// stmatrix take, transposed, to get or put tokens x columns in the registers of P.
  template <class Tile>
  __device__ Tile* u_piece(Tile* u_tile, int step) const {
    const int row = step * 16 + lane % 8 + lane / 16 * 8;
    return u_tile + swizzled(row, tile_column / 8 + lane / 8 % 2);
  }

  /// vn^T = beta (u^T - P), in place of P = (w S)^T; E^T = u^T - P with kErrors.
  __device__ __forceinline__ void prediction_error(const T* u_tile, const float* betas,
                                                   float (&p)[kTokenTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; n += 2) {
      uint32_t u[4] = {};  // tokens n*8..+7 and +8..15, columns 0..7 and 8..15 of this warp
      if (!transition) ptx::ldmatrix_x4_trans(u, ptx::shared_address(u_piece(u_tile, n / 2)));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 beta{1, 1};
        if constexpr (kUse != ChainUse::kErrors)
          beta = *reinterpret_cast<const float2*>(&betas[(n + half) * 8 + lane % 4 * 2]);
        const float2 low = ptx::unpack<T>(u[2 * half]), high = ptx::unpack<T>(u[2 * half + 1]);
        float(&x)[4] = p[n + half];
        x[0] = beta.x * (low.x - x[0]);
        x[1] = beta.y * (low.y - x[1]);
        x[2] = beta.x * (high.x - x[2]);
        x[3] = beta.y * (high.y - x[3]);
      }
    }
  }

  /// x^T times kSign factors of tokens.
  template <int kSign>
  __device__ __forceinline__ void scale_tokens(const float* factors,
                                               float (&x)[kTokenTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(&factors[n * 8 + lane % 4 * 2]);
      x[n][0] *= kSign * factor.x, x[n][1] *= kSign * factor.y;
      x[n][2] *= kSign * factor.x, x[n][3] *= kSign * factor.y;
    }
  }

  /// x^T of 64 tokens as A operands.
  __device__ __forceinline__ static void round_tokens(const float (&x)[kTokenTiles][4],
                                                      uint32_t (&out)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) round_pairs<T>(x[2 * step], x[2 * step + 1], out[step]);
  }

  /// Returns what `kept`, an error rounded to 16 bits, lacks of it, as 16 bits: A operand of 16
  /// tokens.
  __device__ __forceinline__ static void rests(const float (&error)[kTokenTiles][4], int step,
                                               const uint32_t (&kept)[4], uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = error[2 * step + i / 2] + i % 2 * 2;
      const float2 y = ptx::unpack<T>(kept[i]);
      out[i] = ptx::pack<T>(x[0] - y.x, x[1] - y.y);
    }
  }

  __device__ __forceinline__ void load_gammas(const float* from, float2 (&gammas)[kTiles]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      gammas[n] = *reinterpret_cast<const float2*>(&from[n * 8 + lane % 4 * 2]);
  }
  __device__ __forceinline__ void decay_state(const float2 (&gammas)[kTiles]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      state[n][0] *= gammas[n].x, state[n][1] *= gammas[n].y;
      state[n][2] *= gammas[n].x, state[n][3] *= gammas[n].y;
    }
  }

  /// o^T += vn^T times the diagonal of Aqk, in fp32.
  __device__ __forceinline__ void add_diagonal(const float (&error)[kTokenTiles][4],
                                               const float* diagonal,
                                               float (&o)[kTokenTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 diag = *reinterpret_cast<const float2*>(&diagonal[n * 8 + lane % 4 * 2]);
      o[n][0] += diag.x * error[n][0], o[n][1] += diag.y * error[n][1];
      o[n][2] += diag.x * error[n][2], o[n][3] += diag.y * error[n][3];
    }
  }

  // ---- products --------------------------------------------------------------------------------

  /// acc [V, tokens] += x [V, kK] rows^T, rows [64 tokens, kK].
  __device__ __forceinline__ void multiply_rows(const uint32_t (&x)[kSteps][4], const T* rows,
                                                float (&acc)[kTokenTiles][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int n = 0; n < kTokenTiles; n += 2) {
        uint32_t b[4];  // 16 tokens x 16 channels
        const int row = n * 8 + lane % 8 + lane / 16 * 8;
        int at = swizzled(row, step * 2 + lane / 8 % 2);
        if constexpr (kFromConstants)
          at = swizzled_from(n * 8, step * 2, lane % 8 + lane / 16 * 8, lane / 8 % 2);
        ptx::ldmatrix_x4(b, ptx::shared_address(rows + at));
        ptx::mma_16816<T>(acc[n], x[step], b[0], b[1]);
        ptx::mma_16816<T>(acc[n + 1], x[step], b[2], b[3]);
      }
  }

  /// 16 tokens of step `step` x 16 columns of `rows` from column n * 8 on, for products over
  /// tokens.
  __device__ __forceinline__ void load_columns(const T* rows, int step, int n,
                                               uint32_t (&b)[4]) const {
    const int piece = n + lane / 16;
    int at = swizzled(step * 16 + lane % 16, piece);
    if constexpr (kFromConstants) at = swizzled_from(step * 16, n, lane % 16, lane / 16);
    ptx::ldmatrix_x4_trans(b, ptx::shared_address(rows + at));
  }

  /// S^T += x^T rows, rows [64 tokens, kK]; `rounded` is x^T as A operands. With x itself what
  /// rounding left of it goes into the state too.
  template <class... Unrounded>
  __device__ __forceinline__ void add_products(const uint32_t (&rounded)[4][4], const T* rows,
                                               const Unrounded&... x) {
    constexpr bool kBoth = sizeof...(x) > 0;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t low[4];
      if constexpr (kBoth) rests(x..., step, rounded[step], low);
#pragma unroll
      for (int n0 = 0; n0 < kTiles; n0 += 8) {
        uint32_t b[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) load_columns(rows, step, n0 + 2 * i, b[i]);
        multiply_pairs(state + n0, rounded[step], b);
        if constexpr (kBoth) multiply_pairs(state + n0, low, b);
      }
    }
  }

  /// acc += x y for 8 tiles, whose products do not wait for each other.
  __device__ __forceinline__ static void multiply_pairs(float (*acc)[4], const uint32_t (&x)[4],
                                                        const uint32_t (&y)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::mma_16816<T>(acc[2 * i], x, y[i][0], y[i][1]);
      ptx::mma_16816<T>(acc[2 * i + 1], x, y[i][2], y[i][3]);
    }
  }

  // ---- tiles of the workspace ------------------------------------------------------------------

  /// visit(pair of elements in a register, where it is stored) for the A operands of S^T.
  template <class Visit>
  __device__ void for_each_stored_state(int chunk, uint32_t (&rounded)[kSteps][4],
                                        Visit&& visit) const {
    T* h = static_cast<T*>(a.h) + (tile(chunk) * v_tiles() + u_tile) * kVTile * kK;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = tile_column + lane / 4 + i % 2 * 8;
        int at = swizzled(v, step * 2 + i / 2);
        if constexpr (kFromConstants)
          at = swizzled_from(tile_column + i % 2 * 8, step * 2 + i / 2, lane / 4, 0);
        visit(rounded[step][i], reinterpret_cast<uint32_t*>(h + at + lane % 4 * 2));
      }
  }
  /// Visits stored vn^T likewise; in memory vn has tokens as rows.
  template <class Visit>
  __device__ void for_each_stored_error(int chunk, uint32_t (&vn)[4][4], Visit&& visit) const {
    T* to = static_cast<T*>(a.vn) + (tile(chunk) * v_tiles() + u_tile) * kChunk * kVTile;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = step * 16 + i / 2 * 8 + lane / 4;
        const int piece = tile_column / 8 + i % 2;
        int at = swizzled(token, piece);
        if constexpr (kFromConstants) at = swizzled_from(step * 16 + i / 2 * 8, piece, lane / 4, 0);
        visit(vn[step][i], reinterpret_cast<uint32_t*>(to + at + lane % 4 * 2));
      }
  }
  __device__ void store_state(int chunk, uint32_t (&rounded)[kSteps][4]) const {
    for_each_stored_state(chunk, rounded, [](uint32_t& pair, uint32_t* at) { *at = pair; });
  }
  __device__ void store_errors(int chunk, uint32_t (&vn)[4][4]) const {
    for_each_stored_error(chunk, vn,
                          [](uint32_t& pair, uint32_t* at) { *at = ptx::movmatrix_trans(pair); });
  }

  // ---- rows of the caller ----------------------------------------------------------------------

  __device__ void store_outputs(int chunk, const float (&o)[kTokenTiles][4]) const {
    const int64_t token0 = tokens.begin + chunk * kChunk;
    const int64_t base = row_offset(a.o, a.map, tokens.sequence, token0, head);
    const int count = static_cast<int>(min(static_cast<int64_t>(kChunk), tokens.end - token0));
    constexpr bool kAnyRows = kUse == ChainUse::kReverse;  // else of whole words
    if (a.o.type == Element::kFloat32 || (kAnyRows && !a.o.whole_words)) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = n * 8 + lane % 4 * 2 + i % 2;
          const int v = column + lane / 4 + i / 2 * 8;
          if (token >= count || v >= a.shape.V) continue;
          const int64_t at = base + token * a.o.stride_t + v;
          if constexpr (kAnyRows)
            store_element(a.o.base, a.o.type, at, o[n][i]);
          else
            static_cast<float*>(a.o.base)[at] = o[n][i];
        }
      return;
    }
    const bool bf16 = a.o.type == Element::kBFloat16;
    uint16_t* row = static_cast<uint16_t*>(a.o.base) + base + lane / 4 * a.o.stride_t;
    const int64_t step = 8 * a.o.stride_t;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n, row += step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = o[n][2 * half], y = o[n][2 * half + 1];
        const uint32_t pair =
            ptx::movmatrix_trans(bf16 ? ptx::pack<__nv_bfloat16>(x, y) : ptx::pack<__half>(x, y));
        const int v = column + half * 8 + lane % 4 * 2;
        if (n * 8 + lane / 4 < count && v < a.shape.V) *reinterpret_cast<uint32_t*>(row + v) = pair;
      }
    }
  }
};

/// The first block of a launch reports metadata that it cannot use.
template <ChainUse kUse>
__device__ inline void write_flags(const ChainArgs& a) {
  if (kUse == ChainUse::kScan || kUse == ChainUse::kOutputs || blockIdx.x != 0 || !a.flags) return;
  const int64_t checkpoints =
      a.checkpoints.base ? checkpoints_before(a.map, a.checkpoint_every, a.map.num_sequences) : 0;
  write_metadata_flags({a.flags, a.accumulate_flags, a.map, 1, checkpoints}, a.initial,
                       a.final_state, a.checkpoints);
  __syncthreads();
}

/// Blocks of kColumns columns that cover what a launch has to do.
template <ChainUse kUse, int kColumns>
int64_t blocks_of(const ChainArgs& args) {
  const auto of = [](int64_t columns) {
    constexpr int kCover = kCovered<kUse, kColumns>;
    return (columns + kCover - 1) / kCover * (kCover / kColumns);
  };
  const int64_t spans = kUse == ChainUse::kOutputs ? args.num_chunks
                        : args.map.segments        ? args.map.num_segments
                                                   : args.map.num_sequences;
  return spans * args.shape.HV *
         (of(args.shape.V) + (kUse == ChainUse::kScan ? of(args.shape.K) : 0));
}

}  // namespace kda::cuda::chain
