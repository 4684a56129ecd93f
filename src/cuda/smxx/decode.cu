// SPDX-License-Identifier: Apache-2.0
#include "cuda/smxx/decode.hpp"

#include <algorithm>

#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/metadata.cuh"
#include "cuda/tile/state_io.cuh"

namespace kda::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 32;  // values of a tile

/// Tiles of state in shared memory, one in use and the others on their way; within 99 KB.
template <int kK>
constexpr int kStages = kK <= 128 ? 5 : 2;
template <int kK>
constexpr int kBlocksPerSm = kK <= 128 ? 2 : 1;
constexpr int64_t kMaxTokens = 8;

/// A tile of one sequence and head.
struct Work {
  int32_t sequence, head;
  int32_t column;  // first value
  int32_t tokens;
  int64_t begin;
  int64_t source;  // slot; -1: nothing to do
};

/// A token of a tile, ready for the recurrence: normalised q and k, decays, values.
template <int kK>
struct alignas(16) Token {
  float decay[kK], k[kK], q[kK], v[kColumns];
  float beta, qk;
};

template <int kK>
struct alignas(16) Shared {
  float tiles[kStages<kK>][kK * kColumns];  // as the pool has them: fp32 or bf16, rows of K or of V
  Token<kK> tokens[3];           // by parity of the work; the last: tokens after the first
  float read[kWarps][kColumns];  // partial S^T k
  float out[kWarps][kColumns];   // partial S^T q
  Work works[kStages<kK> + 1];
};

/// What a warp holds of a token on its way: quads of channels, and one value a lane.
template <int kK>
struct RawToken {
  static constexpr int kLanes = kK / 4 < 32 ? kK / 4 : 32;  // K = 64: both half warps alike
  static constexpr int kQuads = kK / 4 / kLanes;
  static constexpr int kCount = 4 * kQuads;
  float q[kCount], k[kCount], g[kCount];
  float v, beta;
  static __device__ int channel(int lane, int quad) { return (lane % kLanes + quad * kLanes) * 4; }
};

__device__ __forceinline__ float sum_over(float x, int first_offset, int end_offset) {
#pragma unroll
  for (int offset = first_offset; offset < end_offset; offset *= 2)
    x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// Four channels from `at`; 0 past `count`.
template <class E>
__device__ __forceinline__ void load_quad(const void* base, int64_t at, int count, float* x) {
  const E* source = static_cast<const E*>(base) + at;
  if (count >= 4 && reinterpret_cast<uintptr_t>(source) % (4 * sizeof(E)) == 0) {
    alignas(16) E raw[4];
    if constexpr (sizeof(E) == 4)
      *reinterpret_cast<float4*>(raw) = *reinterpret_cast<const float4*>(source);
    else
      *reinterpret_cast<uint2*>(raw) = *reinterpret_cast<const uint2*>(source);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(raw[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = i < count ? static_cast<float>(source[i]) : 0.0f;
}

template <int kK>
__device__ __forceinline__ void load_row(const RowView& view, int64_t at, int K, int lane,
                                         float (&x)[RawToken<kK>::kCount]) {
  const auto load = [&]<class E>(E) {
#pragma unroll
    for (int i = 0; i < RawToken<kK>::kQuads; ++i) {
      const int c = RawToken<kK>::channel(lane, i);
      load_quad<E>(view.base, at + c, K - c, x + 4 * i);
    }
  };
  if (view.type == Element::kFloat32) load(float{});
  if (view.type == Element::kBFloat16) load(__nv_bfloat16{});
  if (view.type == Element::kFloat16) load(__half{});
}

__device__ __forceinline__ int64_t most_tokens(const DecodeArgs& a) {
  return a.index_columns > 1 ? min(a.index_columns, kMaxTokens) : kMaxTokens;
}

/// Slot that the sequence starts from; -1: it is skipped.
__device__ __forceinline__ int64_t source_slot(const DecodeArgs& a, int64_t n) {
  const int64_t accepted = a.num_accepted ? a.num_accepted[n] : 1;
  if (accepted < 1 || accepted > a.index_columns) return -1;
  const int64_t slot = a.pool.indices ? a.pool.indices[n * a.index_columns + accepted - 1] : n;
  return slot >= 0 && slot < a.pool.num_slots ? slot : -1;
}

/// Slot that the state after token `i` of the sequence goes to; -1: none.
__device__ __forceinline__ int64_t target_slot(const DecodeArgs& a, const Work& work, int64_t i) {
  if (a.index_columns == 1) return i + 1 == work.tokens ? work.source : -1;
  const int64_t slot = a.pool.indices[work.sequence * a.index_columns + i];
  return slot < a.pool.num_slots ? slot : -1;
}

template <int kK, Access kAccess>
struct Kernel {
  using Raw = RawToken<kK>;
  // A lane's part of a tile. Rows of K: 4 values of kRows channels. Rows of V: its channels (as
  // Raw has them) of kRows values.
  static constexpr bool kVK = kAccess == Access::kVectorsVK;
  static constexpr int kRowLanes = kVK ? Raw::kLanes : kColumns / 4;
  static constexpr int kRowStep = kThreads / kRowLanes;
  static constexpr int kRows = kVK ? kColumns / kRowStep : kK / kRowStep;
  static constexpr int kWidth = kVK ? Raw::kCount : 4;
  static constexpr int kPieces = kK * kColumns / 4;  // 4 elements each
  static constexpr int kPiecesOfRow = (kVK ? kK : kColumns) / 4;

  static constexpr int kTiles = kStages<kK>;
  static constexpr int kAhead = kTiles - 1;

  const DecodeArgs& a;
  Shared<kK>& s;
  const int tid, warp, lane;
  const unsigned v_tiles, num_works;

  float S[kRows][kWidth];

  // ---- what there is to do ---------------------------------------------------------------------

  __device__ unsigned index_of(int i) const {
    return blockIdx.x + static_cast<unsigned>(i) * gridDim.x;
  }

  __device__ Work work_of(int i) const {
    const unsigned index = index_of(i);
    if (index >= num_works) return {0, 0, 0, 0, 0, -1};
    const auto HV = static_cast<unsigned>(a.shape.HV);
    Work work;
    work.sequence = static_cast<int32_t>(index / v_tiles / HV);
    work.head = static_cast<int32_t>(index / v_tiles % HV);
    work.column = static_cast<int>(index % v_tiles) * kColumns;
    const Span span = sequence_span(a.map, work.sequence);
    work.begin = span.begin;
    work.tokens = static_cast<int32_t>(min(span.end - span.begin, most_tokens(a)));
    work.source = work.tokens > 0 ? source_slot(a, work.sequence) : -1;
    return work;
  }

  // ---- tokens ----------------------------------------------------------------------------------

  __device__ void load_token(const Work& work, int64_t token, Raw& x) const {
    if (work.source < 0) return;
    const int64_t n = work.sequence, head = work.head;
    const int64_t q_head = static_cast<unsigned>(head) /
                           (static_cast<unsigned>(a.shape.HV) / static_cast<unsigned>(a.shape.H));
    load_row<kK>(a.q, row_offset(a.q, a.map, n, token, q_head), a.shape.K, lane, x.q);
    load_row<kK>(a.k, row_offset(a.k, a.map, n, token, q_head), a.shape.K, lane, x.k);
    load_row<kK>(a.g, row_offset(a.g, a.map, n, token, head), a.shape.K, lane, x.g);
    x.beta = load_element(a.beta.base, a.beta.type, row_offset(a.beta, a.map, n, token, head));
    x.v = 0;
    if (work.column + lane < a.shape.V)
      x.v = load_element(a.v.base, a.v.type,
                         row_offset(a.v, a.map, n, token, head) + work.column + lane);
  }

  /// Norms, decays, beta and q.k (docs/operation.md) of a token that load_token() brought.
  __device__ void prepare_token(const Work& work, Raw& x, Token<kK>& token) const {
    if (work.source < 0) return;
    float qq = 0, kk = 0, qk = 0;
#pragma unroll
    for (int i = 0; i < Raw::kCount; ++i)
      qq += x.q[i] * x.q[i], kk += x.k[i] * x.k[i], qk += x.q[i] * x.k[i];
    qk = sum_over(qk, 1, Raw::kLanes);
    float q_scale = 1, k_scale = 1;
    if (a.gate.l2norm) {
      q_scale = 1.0f / sqrtf(sum_over(qq, 1, Raw::kLanes) + 1e-6f);
      k_scale = 1.0f / sqrtf(sum_over(kk, 1, Raw::kLanes) + 1e-6f);
    }
    const float rate = gate_rate(a.gate, work.head);
#pragma unroll
    for (int i = 0; i < Raw::kCount; ++i) {
      const int c = Raw::channel(lane, i / 4) + i % 4;
      const bool inside = c < a.shape.K;
      const float bias =
          a.gate.dt_bias && inside ? a.gate.dt_bias[work.head * a.gate.stride_dt + c] : 0.0f;
      token.decay[c] = inside ? exp2f(log2_decay_exact(a.gate, x.g[i], bias, rate)) : 0.0f;
      token.k[c] = x.k[i] * k_scale;
      token.q[c] = x.q[i] * q_scale;
    }
    token.v[lane] = x.v;
    if (lane == 0) {
      token.beta = beta_value(a.gate, x.beta);
      token.qk = qk * q_scale * k_scale;
    }
  }

  // ---- tiles of state --------------------------------------------------------------------------

  __device__ int row_of(int r) const {
    return kVK ? r * kRowStep + tid / kRowLanes : tid / kRowLanes * kRows + r;
  }
  __device__ int first_of(int quad) const {
    return kVK ? Raw::channel(lane, quad) : tid % kRowLanes * 4;
  }

  /// Pool to shared memory: in the background, except for strides that no vector fits.
  template <bool kBf16>
  __device__ void fetch(const Work& work, float* tile) const {
    constexpr int kBytes = kBf16 ? 8 : 16;
    const uint32_t target = ptx::shared_address(tile);
#pragma unroll
    for (int i = 0; i < kPieces / kThreads; ++i) {
      const int piece = tid + i * kThreads;
      const int row = piece / kPiecesOfRow, c = piece % kPiecesOfRow * 4;
      const int k = kVK ? c : row, v = work.column + (kVK ? row : c);
      const bool inside = k < a.shape.K && v < a.shape.V;
      const int64_t at = state_offset(a.pool, work.source, work.head, k, v);
      const char* source = static_cast<const char*>(a.pool.base) + at * (kBytes / 4);
      ptx::cp_async<kBytes>(target + piece * kBytes, inside ? source : a.pool.base, inside);
    }
  }
  __device__ void fetch_scalar(const Work& work, float* tile) const {
    for (int i = tid; i < kK * kColumns; i += kThreads) {
      const int k = i / kColumns, v = work.column + i % kColumns;
      const bool inside = k < a.shape.K && v < a.shape.V;
      tile[i] =
          inside ? load_state(a.pool, state_offset(a.pool, work.source, work.head, k, v)) : 0.0f;
    }
  }
  __device__ void start_fetch(int i) const {
    const Work& work = s.works[i % (kTiles + 1)];
    float* tile = s.tiles[i % kTiles];
    if (work.source >= 0) {
      if constexpr (kAccess == Access::kScalar)
        fetch_scalar(work, tile);
      else
        a.pool.bf16 ? fetch<true>(work, tile) : fetch<false>(work, tile);
    }
    ptx::cp_async_commit();  // empty or not: waits count groups
  }

  template <bool kBf16>
  __device__ void read_tile(const float* tile) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kWidth; c += 4) {
        const float4 x = load4<kBf16>(tile, row_of(r) * (kPiecesOfRow * 4) + first_of(c / 4));
        S[r][c] = x.x, S[r][c + 1] = x.y, S[r][c + 2] = x.z, S[r][c + 3] = x.w;
      }
  }

  template <bool kBf16>
  __device__ void write_tile(const Work& work, int64_t slot) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kWidth; c += 4) {
        const int k = kVK ? first_of(c / 4) : row_of(r);
        const int v = work.column + (kVK ? row_of(r) : first_of(0));
        if (k >= a.shape.K || v >= a.shape.V) continue;
        store4<kBf16>(a.pool.base, state_offset(a.pool, slot, work.head, k, v),
                      make_float4(S[r][c], S[r][c + 1], S[r][c + 2], S[r][c + 3]));
      }
  }
  __device__ void write_scalar(const Work& work, int64_t slot) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        const int k = row_of(r), v = work.column + first_of(0) + c;
        if (k < a.shape.K && v < a.shape.V)
          store_state(a.pool, state_offset(a.pool, slot, work.head, k, v), S[r][c]);
      }
  }
  __device__ void write_state(const Work& work, int64_t slot) const {
    if constexpr (kAccess == Access::kScalar)
      write_scalar(work, slot);
    else
      a.pool.bf16 ? write_tile<true>(work, slot) : write_tile<false>(work, slot);
  }

  // ---- the recurrence --------------------------------------------------------------------------
  // S' = decay S;  r = S'^T k;  vn = beta (v - r);  o = scale (S'^T q + (q.k) vn);  S = S' + k vn^T

  __device__ void store_output(const Work& work, int64_t token, int column, float o) const {
    if (work.column + column < a.shape.V)
      store_element(a.o.base, a.o.type,
                    row_offset(a.o, a.map, work.sequence, token, work.head) + work.column + column,
                    a.gate.scale * o);
  }

  __device__ static float4 quad(const float* x, int first) {
    return *reinterpret_cast<const float4*>(x + first);
  }

  /// Rows of K: sums over the rows of a warp, then over warps.
  __device__ void step_kv(const Work& work, int64_t token_index, const Token<kK>& x) {
    const int row0 = row_of(0), column = first_of(0);
    float read[4] = {}, out[4] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float decay = x.decay[row0 + r], k = x.k[row0 + r], q = x.q[row0 + r];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        S[r][c] *= decay;
        read[c] = fmaf(S[r][c], k, read[c]);
        out[c] = fmaf(S[r][c], q, out[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      read[c] = sum_over(read[c], kRowLanes, 32);
      out[c] = sum_over(out[c], kRowLanes, 32);
    }
    if (lane < kRowLanes) {
      *reinterpret_cast<float4*>(&s.read[warp][column]) =
          make_float4(read[0], read[1], read[2], read[3]);
      *reinterpret_cast<float4*>(&s.out[warp][column]) =
          make_float4(out[0], out[1], out[2], out[3]);
    }
    __syncthreads();
    float sum[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 y = quad(s.read[w], column);
      sum[0] += y.x, sum[1] += y.y, sum[2] += y.z, sum[3] += y.w;
    }
    const float4 v = quad(x.v, column);
    const float v_new[4] = {x.beta * (v.x - sum[0]), x.beta * (v.y - sum[1]),
                            x.beta * (v.z - sum[2]), x.beta * (v.w - sum[3])};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float k = x.k[row0 + r];
#pragma unroll
      for (int c = 0; c < 4; ++c) S[r][c] = fmaf(k, v_new[c], S[r][c]);
    }
    if (tid >= kRowLanes) return;
    float o[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 y = quad(s.out[w], column);
      o[0] += y.x, o[1] += y.y, o[2] += y.z, o[3] += y.w;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      store_output(work, token_index, column + c, fmaf(x.qk, v_new[c], o[c]));
  }

  /// Sums of kCount values over the lanes of a row; a lane ends with those of its own rows.
  template <int kCount, int kOffset>
  __device__ void reduce_scatter(float* x) const {
    if constexpr (kOffset > 0 && kCount > 1) {
      const bool upper = lane & kOffset;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float low = x[i], high = x[i + kCount / 2];
        x[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kOffset);
      }
      reduce_scatter<kCount / 2, kOffset / 2>(x);
    } else if constexpr (kOffset > 0) {
      x[0] += __shfl_xor_sync(~0u, x[0], kOffset);
      reduce_scatter<1, kOffset / 2>(x);
    }
  }

  /// Rows of V: sums within a warp; kShare lanes end with the same row.
  __device__ void step_vk(const Work& work, int64_t token_index, const Token<kK>& x) {
    constexpr int kShare = kRowLanes / kRows;
    static_assert(kRows <= kRowLanes);
    float decay[kWidth], k[kWidth], q[kWidth];
#pragma unroll
    for (int c = 0; c < kWidth; c += 4) {
      const auto put = [&](float* y, float4 from) {
        y[c] = from.x, y[c + 1] = from.y, y[c + 2] = from.z, y[c + 3] = from.w;
      };
      put(decay, quad(x.decay, first_of(c / 4)));
      put(k, quad(x.k, first_of(c / 4)));
      put(q, quad(x.q, first_of(c / 4)));
    }
    float read[kRows] = {}, out[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        S[r][c] *= decay[c];
        read[r] = fmaf(S[r][c], k[c], read[r]);
        out[r] = fmaf(S[r][c], q[c], out[r]);
      }
    reduce_scatter<kRows, kRowLanes / 2>(read);
    reduce_scatter<kRows, kRowLanes / 2>(out);
    const int mine = row_of(lane % kRowLanes / kShare);
    const float v_new = x.beta * (x.v[mine] - read[0]);
    if (lane % kShare == 0) store_output(work, token_index, mine, fmaf(x.qk, v_new, out[0]));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = __shfl_sync(~0u, v_new, lane / kRowLanes * kRowLanes + r * kShare);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) S[r][c] = fmaf(k[c], v, S[r][c]);
    }
  }

  __device__ void step(const Work& work, int64_t token, const Token<kK>& x) {
    if constexpr (kVK)
      step_vk(work, token, x);
    else
      step_kv(work, token, x);
    const int64_t slot = target_slot(a, work, token - work.begin);
    if (slot >= 0) write_state(work, slot);
  }

  /// All tokens of a tile whose state and first token are in shared memory.
  __device__ void update(int i) {
    const Work work = s.works[i % (kTiles + 1)];
    if (work.source < 0) return;
    const float* tile = s.tiles[i % kTiles];
    if (kAccess != Access::kScalar && a.pool.bf16)
      read_tile<true>(tile);
    else
      read_tile<false>(tile);
    step(work, work.begin, s.tokens[i % 2]);
    for (int64_t t = work.begin + 1; t < work.begin + work.tokens; ++t) {
      __syncthreads();  // the token before is done with
      if (warp == 0) {
        Raw raw;
        load_token(work, t, raw);
        prepare_token(work, raw, s.tokens[2]);
      }
      __syncthreads();
      step(work, t, s.tokens[2]);
    }
  }

  /// Tile i is fetched kAhead rounds before its turn; its work is looked up two rounds before that,
  /// its token loaded one round before and prepared in the last, all by warp i % kWarps.
  __device__ void run() {
    Work next{};
    Raw raw;
    if (warp <= kAhead) {
      next = work_of(warp);
      s.works[warp] = next;
    }
    __syncthreads();
    if (warp < kAhead) load_token(next, next.begin, raw);
    for (int i = 0; i < kAhead; ++i) start_fetch(i);
    if (warp == 0) prepare_token(next, raw, s.tokens[0]);
    for (int i = 0; index_of(i) < num_works; ++i) {
      ptx::cp_async_wait<kAhead - 1>();
      __syncthreads();  // tile i and its token are here; tile i - 1 is done with
      start_fetch(i + kAhead);
      if (warp == (i + kAhead + 1) % kWarps) next = work_of(i + kAhead + 1);
      if (warp == (i + kAhead) % kWarps) load_token(next, next.begin, raw);
      if (warp == (i + 1) % kWarps) prepare_token(next, raw, s.tokens[(i + 1) % 2]);
      update(i);
      if (warp == (i + kAhead + 1) % kWarps) s.works[(i + kAhead + 1) % (kTiles + 1)] = next;
    }
  }
};

template <int kK, Access kAccess>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kK>)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(16) unsigned char memory[];
  if (blockIdx.x == 0 && a.flags) {
    write_metadata_flags(
        {a.flags, a.accumulate_flags, a.map, a.index_columns, 0, a.num_accepted, most_tokens(a)},
        a.pool, {}, {});
    __syncthreads();
  }
  const unsigned v_tiles = (a.shape.V + kColumns - 1) / kColumns;
  Kernel<kK, kAccess> kernel{a,
                             *reinterpret_cast<Shared<kK>*>(memory),
                             static_cast<int>(threadIdx.x),
                             static_cast<int>(threadIdx.x) / 32,
                             static_cast<int>(threadIdx.x) % 32,
                             v_tiles,
                             static_cast<unsigned>(a.map.num_sequences * a.shape.HV) * v_tiles,
                             {}};
  kernel.run();
}

template <int kK>
Status launch(const DecodeArgs& args, const Launch& where) {
  const int64_t tiles = (args.shape.V + kColumns - 1) / kColumns;
  const int64_t works = args.map.num_sequences * args.shape.HV * tiles;
  static_assert(sizeof(Shared<kK>) <= kMostShared);
  // Tiles are counted in 32 bits: past them, launch_kernel() refuses as for any other grid.
  const int64_t blocks =
      works > INT32_MAX ? works : std::min(works, int64_t{kBlocksPerSm<kK>} * args.num_sms);
  const auto run = [&](auto kernel) {
    return launch_kernel("decode", kernel, blocks, kThreads, sizeof(Shared<kK>), where, args);
  };
  if (!args.pool.vectors) return run(decode_kernel<kK, Access::kScalar>);
  return args.pool.vk ? run(decode_kernel<kK, Access::kVectorsVK>)
                      : run(decode_kernel<kK, Access::kVectorsKV>);
}

}  // namespace

Status launch_decode(const DecodeArgs& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64>(args, where);
  if (args.shape.K <= 128) return launch<128>(args, where);
  return launch<256>(args, where);
}

}  // namespace kda::cuda
