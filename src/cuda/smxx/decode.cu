// SPDX-License-Identifier: Apache-2.0
#include "cuda/smxx/decode.hpp"

#include "cuda/tile/metadata.cuh"
#include "cuda/tile/state_io.cuh"

namespace kda::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kElements = 128;  // of a state, a lane: 16 KB a warp
constexpr int64_t kMaxTokens = 8;

/// A warp's tile: all K rows of kColumns columns.
template <int kK>
constexpr int kColumns = 32 * kElements / kK;

/// How a row of K channels lies in a warp: quads of channels, kQuads a lane; for K = 64 both halves
/// of the warp hold the row.
template <int kK>
struct Row {
  static constexpr int kLanes = kK / 4 < 32 ? kK / 4 : 32;
  static constexpr int kQuads = kK / 4 / kLanes;
  static constexpr int kCount = 4 * kQuads;
  static __device__ int channel(int lane, int quad) { return (lane % kLanes + quad * kLanes) * 4; }
};

struct Unit {
  Span span;
  int64_t head = 0, q_head = 0;
  int column = 0;  // first column of the tile
};

/// A token as it is loaded; then (prepare) normalised, with decays for gates.
template <int kCount>
struct Token {
  float q[kCount], k[kCount], g[kCount];
  float beta, qk;
};

__device__ __forceinline__ float sum_over(float x, int first_offset, int end_offset) {
#pragma unroll
  for (int offset = first_offset; offset < end_offset; offset *= 2)
    x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// Four channels from `at`; 0 past K.
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
                                         float (&x)[Row<kK>::kCount]) {
#pragma unroll
  for (int i = 0; i < Row<kK>::kQuads; ++i) {
    const int c = Row<kK>::channel(lane, i);
    if (view.type == Element::kFloat32) load_quad<float>(view.base, at + c, K - c, x + 4 * i);
    if (view.type == Element::kBFloat16)
      load_quad<__nv_bfloat16>(view.base, at + c, K - c, x + 4 * i);
    if (view.type == Element::kFloat16) load_quad<__half>(view.base, at + c, K - c, x + 4 * i);
  }
}

template <int kK>
__device__ __forceinline__ void load_token(const DecodeArgs& a, const Unit& unit, int64_t token,
                                           int lane, Token<Row<kK>::kCount>& x) {
  const int64_t n = unit.span.sequence;
  load_row<kK>(a.q, row_offset(a.q, a.map, n, token, unit.q_head), a.shape.K, lane, x.q);
  load_row<kK>(a.k, row_offset(a.k, a.map, n, token, unit.q_head), a.shape.K, lane, x.k);
  load_row<kK>(a.g, row_offset(a.g, a.map, n, token, unit.head), a.shape.K, lane, x.g);
  x.beta = load_element(a.beta.base, a.beta.type, row_offset(a.beta, a.map, n, token, unit.head));
}

/// Norms, decays, beta and q.k (docs/operation.md).
template <int kK>
__device__ __forceinline__ void prepare(const DecodeArgs& a, int64_t head, float rate, int lane,
                                        Token<Row<kK>::kCount>& x) {
  float qq = 0, kk = 0, qk = 0;
#pragma unroll
  for (int i = 0; i < Row<kK>::kCount; ++i)
    qq += x.q[i] * x.q[i], kk += x.k[i] * x.k[i], qk += x.q[i] * x.k[i];
  constexpr int kLanes = Row<kK>::kLanes;
  x.qk = sum_over(qk, 1, kLanes);
  if (a.gate.l2norm) {
    const float q_scale = 1.0f / sqrtf(sum_over(qq, 1, kLanes) + 1e-6f);
    const float k_scale = 1.0f / sqrtf(sum_over(kk, 1, kLanes) + 1e-6f);
#pragma unroll
    for (int i = 0; i < Row<kK>::kCount; ++i) x.q[i] *= q_scale, x.k[i] *= k_scale;
    x.qk *= q_scale * k_scale;
  }
#pragma unroll
  for (int i = 0; i < Row<kK>::kCount; ++i) {
    const int c = Row<kK>::channel(lane, i / 4) + i % 4;
    const bool inside = c < a.shape.K;
    const float bias =
        a.gate.dt_bias && inside ? a.gate.dt_bias[head * a.gate.stride_dt + c] : 0.0f;
    x.g[i] = inside ? exp2f(log2_decay_exact(a.gate, x.g[i], bias, rate)) : 0.0f;
  }
  x.beta = beta_value(a.gate, x.beta);
}

/// Tile of a buffer whose rows are columns of values: a lane has 4 columns of 32 rows. Rows of a
/// token go through shared memory, since a lane's channels are not those it loaded.
template <int kK, bool kVectors>
struct TileKV {
  static constexpr int kOwned = 4;  // values of v and o a lane
  static constexpr int kColumnLanes = kColumns<kK> / 4;
  static constexpr int kGroups = 32 / kColumnLanes;
  static constexpr int kQuads = kK / 4 / kGroups;  // of rows, a lane
  static constexpr int kSharedFloats = 3 * kK;
  float S[kQuads][4][4];
  const int lane;
  float* rows;  // [3][kK]: decay, k, q of a token

  __device__ int quad(int j) const { return j * kGroups + lane / kColumnLanes; }
  __device__ int column(int i) const { return lane % kColumnLanes * 4 + i; }
  __device__ bool writes_output() const { return lane < kColumnLanes; }

  template <class Visit>
  __device__ void for_each(const Shape& shape, int column0, Visit&& visit) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; c += kVectors ? 4 : 1)
          if (quad(j) * 4 + r < shape.K && column0 + column(c) < shape.V)
            visit(S[j][r], c, quad(j) * 4 + r, column0 + column(c));
  }
  template <bool kBf16>
  __device__ void load(const StateView& view, const Shape& shape, int64_t slot, int64_t head,
                       int column0) {
    const int64_t at = slot * view.stride_slot + head * view.stride_head;
    for_each(shape, column0, [&](float (&s)[4], int c, int row, int col) {
      if constexpr (kVectors) {
        const float4 x = load4<kBf16>(view.base, at + row * view.stride_row + col);
        s[0] = x.x, s[1] = x.y, s[2] = x.z, s[3] = x.w;
      } else {
        s[c] = load_state(view, state_offset(view, slot, head, row, col));
      }
    });
  }
  template <bool kBf16>
  __device__ void store(const StateView& view, const Shape& shape, int64_t slot, int64_t head,
                        int column0) {
    const int64_t at = slot * view.stride_slot + head * view.stride_head;
    for_each(shape, column0, [&](float (&s)[4], int c, int row, int col) {
      if constexpr (kVectors)
        store4<kBf16>(view.base, at + row * view.stride_row + col,
                      make_float4(s[0], s[1], s[2], s[3]));
      else
        store_state(view, state_offset(view, slot, head, row, col), s[c]);
    });
  }

  __device__ float4 row(int which, int j) const {
    return reinterpret_cast<const float4*>(rows + which * kK)[quad(j)];
  }
  __device__ void share(const Token<Row<kK>::kCount>& x) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Row<kK>::kQuads; ++i) {
      const int c = Row<kK>::channel(lane, i);
      const auto put = [&](int which, const float* y) {
        *reinterpret_cast<float4*>(rows + which * kK + c) =
            make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
      };
      put(0, x.g), put(1, x.k), put(2, x.q);
    }
    __syncwarp();
  }

  /// S' = decay S;  r = S'^T k;  vn = beta (v - r);  o = scale (S'^T q + (q.k) vn);  S = S' + k vn^T
  __device__ void step(const Token<Row<kK>::kCount>& x, const float (&v)[kOwned], float scale,
                       float (&o)[kOwned]) {
    share(x);
    float read[4] = {}, out[4] = {};
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const float4 d4 = row(0, j), k4 = row(1, j), q4 = row(2, j);
      const float d[4] = {d4.x, d4.y, d4.z, d4.w}, k[4] = {k4.x, k4.y, k4.z, k4.w};
      const float q[4] = {q4.x, q4.y, q4.z, q4.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          S[j][r][c] *= d[r];
          read[c] = fmaf(S[j][r][c], k[r], read[c]);
          out[c] = fmaf(S[j][r][c], q[r], out[c]);
        }
    }
    float v_new[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      v_new[c] = x.beta * (v[c] - sum_over(read[c], kColumnLanes, 32));
      o[c] = scale * fmaf(x.qk, v_new[c], sum_over(out[c], kColumnLanes, 32));
    }
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const float4 k4 = row(1, j);
      const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) S[j][r][c] = fmaf(k[r], v_new[c], S[j][r][c]);
    }
  }
};

/// Tile of a buffer whose rows are columns of keys: a lane has its own channels of kRows values.
template <int kK>
struct TileVK {
  using R = Row<kK>;
  static constexpr int kRows = kElements / R::kCount;
  static constexpr int kOwned = kRows > R::kLanes ? kRows / R::kLanes : 1;
  static constexpr int kShare = R::kLanes > kRows ? R::kLanes / kRows : 1;  // lanes that own a row
  static constexpr int kStep = 32 / R::kLanes;
  static constexpr int kSharedFloats = 0;
  float S[kRows][R::kCount];
  const int lane;
  float* rows;  // unused

  __device__ int value(int r) const { return r * kStep + lane / R::kLanes; }
  __device__ int column(int i) const {
    return value(lane % R::kLanes / kShare * kOwned + i);
  }
  __device__ bool writes_output() const { return lane % kShare == 0; }

  template <class Visit>
  __device__ void for_each(const StateView& view, const Shape& shape, int64_t slot, int64_t head,
                           int column0, Visit&& visit) {
    const int64_t at = slot * view.stride_slot + head * view.stride_head;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < R::kQuads; ++i)
        if (column0 + value(r) < shape.V && R::channel(lane, i) < shape.K)
          visit(S[r] + 4 * i, at + (column0 + value(r)) * view.stride_row + R::channel(lane, i));
  }
  template <bool kBf16>
  __device__ void load(const StateView& view, const Shape& shape, int64_t slot, int64_t head,
                       int column0) {
    for_each(view, shape, slot, head, column0, [&](float* s, int64_t at) {
      const float4 x = load4<kBf16>(view.base, at);
      s[0] = x.x, s[1] = x.y, s[2] = x.z, s[3] = x.w;
    });
  }
  template <bool kBf16>
  __device__ void store(const StateView& view, const Shape& shape, int64_t slot, int64_t head,
                        int column0) {
    for_each(view, shape, slot, head, column0, [&](float* s, int64_t at) {
      store4<kBf16>(view.base, at, make_float4(s[0], s[1], s[2], s[3]));
    });
  }

  /// Sums of kCount values over the lanes of a row; a lane ends with those of its own rows.
  template <int kCount = kRows, int kOffset = R::kLanes / 2>
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

  __device__ void step(const Token<R::kCount>& x, const float (&v)[kOwned], float scale,
                       float (&o)[kOwned]) {
    float sums[kRows], v_new[kOwned];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int c = 0; c < R::kCount; ++c) {
        S[r][c] *= x.g[c];
        sums[r] = fmaf(S[r][c], x.k[c], sums[r]);
      }
    }
    reduce_scatter(sums);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v_new[i] = x.beta * (v[i] - sums[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int c = 0; c < R::kCount; ++c) sums[r] = fmaf(S[r][c], x.q[c], sums[r]);
    }
    reduce_scatter(sums);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) o[i] = scale * fmaf(x.qk, v_new[i], sums[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int owner = lane / R::kLanes * R::kLanes + r / kOwned * kShare;
      const float new_value = __shfl_sync(~0u, v_new[r % kOwned], owner);
#pragma unroll
      for (int c = 0; c < R::kCount; ++c) S[r][c] = fmaf(x.k[c], new_value, S[r][c]);
    }
  }
};

template <int kK, Access kAccess>
struct TileOf {
  using Type = TileKV<kK, kAccess == Access::kVectorsKV>;
};
template <int kK>
struct TileOf<kK, Access::kVectorsVK> {
  using Type = TileVK<kK>;
};

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
__device__ __forceinline__ int64_t target_slot(const DecodeArgs& a, int64_t n, int64_t i, bool last,
                                               int64_t source) {
  if (a.index_columns == 1) return last ? source : -1;
  const int64_t slot = a.pool.indices[n * a.index_columns + i];
  return slot < a.pool.num_slots ? slot : -1;
}

template <int kCount>
__device__ __forceinline__ void load_values(const DecodeArgs& a, const Unit& unit, int64_t token,
                                            const auto& tile, float (&v)[kCount]) {
  const int64_t at = row_offset(a.v, a.map, unit.span.sequence, token, unit.head) + unit.column;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    v[i] = unit.column + tile.column(i) < a.shape.V
               ? load_element(a.v.base, a.v.type, at + tile.column(i))
               : 0.0f;
}

template <int kCount>
__device__ __forceinline__ void store_values(const DecodeArgs& a, const Unit& unit, int64_t token,
                                             const auto& tile, const float (&o)[kCount]) {
  const int64_t at = row_offset(a.o, a.map, unit.span.sequence, token, unit.head) + unit.column;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (tile.writes_output() && unit.column + tile.column(i) < a.shape.V)
      store_element(a.o.base, a.o.type, at + tile.column(i), o[i]);
}

template <int kK, Access kAccess>
__global__ void __launch_bounds__(32 * kWarps, 2)
    decode_kernel(const __grid_constant__ DecodeArgs a) {
  using Tile = typename TileOf<kK, kAccess>::Type;
  __shared__ __align__(16) float shared[kWarps][Tile::kSharedFloats + 4];
  if (blockIdx.x == 0 && a.flags)
    write_metadata_flags(
        {a.flags, a.accumulate_flags, a.map, a.index_columns, 0, a.num_accepted, most_tokens(a)},
        a.pool, {}, {});

  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned tiles = (a.shape.V + kColumns<kK> - 1) / kColumns<kK>;
  const auto HV = static_cast<unsigned>(a.shape.HV);
  const unsigned index = blockIdx.x * kWarps + warp;
  const int64_t n = index / tiles / HV;
  if (n >= a.map.num_sequences) return;
  Unit unit;
  unit.span = sequence_span(a.map, n);
  unit.head = index / tiles % HV;
  unit.q_head = static_cast<unsigned>(unit.head) / (HV / static_cast<unsigned>(a.shape.H));
  unit.column = static_cast<int>(index % tiles) * kColumns<kK>;

  const int64_t begin = unit.span.begin;
  const int64_t end = min(unit.span.end, begin + most_tokens(a));
  const int64_t source = source_slot(a, n);
  if (source < 0 || begin == end) return;

  // The token before the state: its norms and decays are ready when the state arrives.
  Tile tile{{}, static_cast<int>(lane), shared[warp]};
  Token<Row<kK>::kCount> token, next;
  float v[Tile::kOwned], next_v[Tile::kOwned];
  load_token<kK>(a, unit, begin, lane, token);
  load_values(a, unit, begin, tile, v);
  const float rate = gate_rate(a.gate, unit.head);
  if (a.pool.bf16)
    tile.template load<true>(a.pool, a.shape, source, unit.head, unit.column);
  else
    tile.template load<false>(a.pool, a.shape, source, unit.head, unit.column);

  for (int64_t t = begin; t < end; ++t) {
    if (t + 1 < end) {
      load_token<kK>(a, unit, t + 1, lane, next);
      load_values(a, unit, t + 1, tile, next_v);
    }
    prepare<kK>(a, unit.head, rate, lane, token);
    float o[Tile::kOwned];
    tile.step(token, v, a.gate.scale, o);
    store_values(a, unit, t, tile, o);
    const int64_t slot = target_slot(a, n, t - begin, t + 1 == end, source);
    if (slot >= 0) {
      if (a.pool.bf16)
        tile.template store<true>(a.pool, a.shape, slot, unit.head, unit.column);
      else
        tile.template store<false>(a.pool, a.shape, slot, unit.head, unit.column);
    }
    token = next;
#pragma unroll
    for (int i = 0; i < Tile::kOwned; ++i) v[i] = next_v[i];
  }
}

template <int kK>
Status launch(const DecodeArgs& args, const Launch& where) {
  const int64_t tiles = (args.shape.V + kColumns<kK> - 1) / kColumns<kK>;
  const int64_t warps = args.map.num_sequences * args.shape.HV * tiles;
  const auto run = [&](auto kernel) {
    return launch_kernel("decode", kernel, (warps + kWarps - 1) / kWarps, 32 * kWarps, 0, where,
                         args);
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
