// SPDX-License-Identifier: Apache-2.0
// A tile of a boundary state in the registers of a warp: how it is read and written, what it sums
// with two vectors, and how rows are folded into it. Vectors and rows lie in shared memory.
#pragma once

#include "cuda/tile/state_io.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::tail {

__device__ __forceinline__ void spread(const float* from, float (&x)[4]) {
  const float4 y = *reinterpret_cast<const float4*>(from);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

/// Columns of a warp's tile, whose sums its lanes end with: a lane has one column, or two lanes do.
template <int kK>
constexpr int kTileColumns = kK == 256 ? 16 : 32;

/// Rows that are folded, and the decays that everything in front of them meets.
struct Folded {
  const float *keys, *v_new, *decays;  ///< rows of keys are decayed, those of v_new normalise them
  int rows, columns;                   ///< columns of a row of v_new
};

/// Tile of a buffer whose rows are channels: a lane has 4 neighbouring columns of kQuads quads of
/// channels. kDense: rows of exactly kK elements, whole vectors. Else kPacked is false.
template <int kK, bool kDense, bool kPacked>
struct TileKV {
  static constexpr int kColumns = kTileColumns<kK>;
  static constexpr int kGroups = 128 / kColumns;  // of lanes that share columns
  static constexpr int kQuads = kK / 4 / kGroups;
  Quads<4 * kQuads, kPacked> S;
  const int lane;
  const int column0;

  __device__ explicit TileKV(int first)
      : lane(static_cast<int>(threadIdx.x) % 32), column0(first) {}
  __device__ void clear() { S.clear(); }
  __device__ int channel(int j) const { return (j * kGroups + lane % kGroups) * 4; }
  __device__ int value() const { return column0 + lane / kGroups * 4; }

  __device__ void load(const StateView& states, const Shape& shape, int64_t slot, int64_t head) {
    visit(states, shape, slot, head, [&](int i, int c, int64_t at) {
      if constexpr (kDense)
        S.load(i, states.base, at);
      else
        S.words[i][c] = __float_as_uint(states.bf16 ? load_state<true>(states.base, at)
                                                    : load_state<false>(states.base, at));
    });
  }
  __device__ void store(const StateView& states, const Shape& shape, int64_t slot, int64_t head) {
    visit(states, shape, slot, head, [&](int i, int c, int64_t at) {
      if constexpr (kDense)
        S.store(i, states.base, at);
      else
        store_state(states, at, __uint_as_float(S.words[i][c]));
    });
  }
  template <class Visit>
  __device__ void visit(const StateView& states, const Shape& shape, int64_t slot, int64_t head,
                        Visit&& with) {
    const int64_t row_step = kDense ? kK : states.vk ? 1 : states.stride_row;
    const int64_t column_step = kDense || !states.vk ? 1 : states.stride_row;
    const int64_t first = state_offset(states, slot, head, channel(0), value());
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; c += kDense ? 4 : 1)
          if (kDense || (channel(j) + r < shape.K && value() + c < shape.V))
            with(4 * j + r, c, first + (j * kGroups * 4 + r) * row_step + c * column_step);
  }

  /// S^T k and S^T q, of this lane's column.
  __device__ void multiply(const float* k, const float* q, float* with_k, float* with_q) const {
    float read[4] = {}, out[4] = {};
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float k_j[4], q_j[4];
      spread(k + channel(j), k_j);
      spread(q + channel(j), q_j);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float s[4];
        S.get(4 * j + r, s);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          read[c] = fmaf(s[c], k_j[r], read[c]);
          out[c] = fmaf(s[c], q_j[r], out[c]);
        }
      }
    }
    reduce_scatter<4, kGroups / 2>(read);
    reduce_scatter<4, kGroups / 2>(out);
    *with_k = read[0], *with_q = out[0];
  }

  /// S = Diag(decays) S + sum of k v_new^T
  __device__ void fold(const Folded& from) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float x[4][4], decay[4];
      spread(from.decays + channel(j), decay);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        S.get(4 * j + r, x[r]);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[r][c] *= decay[r];
      }
#pragma unroll 2
      for (int i = 0; i < from.rows; ++i) {
        float k_i[4], v_i[4];
        spread(from.keys + i * kK + channel(j), k_i);
        spread(from.v_new + i * from.columns + value(), v_i);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[r][c] = fmaf(k_i[r], v_i[c], x[r][c]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) S.set(4 * j + r, x[r]);
    }
  }
  /// Rounds to what a bf16 buffer has.
  __device__ void round() {
    if constexpr (!kPacked)
#pragma unroll
      for (int i = 0; i < 4 * kQuads; ++i)
#pragma unroll
        for (uint32_t& word : S.words[i])
          word = __float_as_uint(__bfloat162float(__float2bfloat16_rn(__uint_as_float(word))));
  }
};

/// Tile of a dense buffer whose rows are columns of keys: a lane has 8 neighbouring columns of
/// every eighth quad of channels.
template <int kK, bool kPacked>
struct TileVK {
  static constexpr int kColumns = kTileColumns<kK>;
  static constexpr int kLanes = 8;                // of a row
  static constexpr int kQuads = kK / 4 / kLanes;  // of a lane
  static constexpr int kRows = 8;
  Quads<kRows * kQuads, kPacked> S;
  const int lane;
  const int column0;

  __device__ explicit TileVK(int first)
      : lane(static_cast<int>(threadIdx.x) % 32), column0(first) {}
  __device__ void clear() { S.clear(); }
  __device__ int channel(int quad) const { return (quad * kLanes + lane % kLanes) * 4; }
  __device__ int value() const { return column0 + lane / kLanes * kRows; }

  template <class Visit>
  __device__ void visit(const StateView& states, int64_t slot, int64_t head, Visit&& with) {
    const int64_t first = state_offset(states, slot, head, channel(0), value());
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < kQuads; ++j) with(r * kQuads + j, first + r * kK + j * kLanes * 4);
  }
  __device__ void load(const StateView& states, const Shape&, int64_t slot, int64_t head) {
    visit(states, slot, head, [&](int i, int64_t at) { S.load(i, states.base, at); });
  }
  __device__ void store(const StateView& states, const Shape&, int64_t slot, int64_t head) {
    visit(states, slot, head, [&](int i, int64_t at) { S.store(i, states.base, at); });
  }

  __device__ void multiply(const float* k, const float* q, float* with_k, float* with_q) const {
    float read[kRows] = {}, out[kRows] = {};
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float k_j[4], q_j[4];
      spread(k + channel(j), k_j);
      spread(q + channel(j), q_j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float s[4];
        S.get(r * kQuads + j, s);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          read[r] = fmaf(s[c], k_j[c], read[r]);
          out[r] = fmaf(s[c], q_j[c], out[r]);
        }
      }
    }
    reduce_scatter<kRows, kLanes / 2>(read);
    reduce_scatter<kRows, kLanes / 2>(out);
    *with_k = read[0], *with_q = out[0];
  }

  __device__ void fold(const Folded& from) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float x[kRows][4], decay[4];
      spread(from.decays + channel(j), decay);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        S.get(r * kQuads + j, x[r]);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[r][c] *= decay[c];
      }
#pragma unroll 2
      for (int i = 0; i < from.rows; ++i) {
        const float* v_new = from.v_new + i * from.columns + value();
        float k_i[4], v_i[2][4];
        spread(from.keys + i * kK + channel(j), k_i);
        spread(v_new, v_i[0]), spread(v_new + 4, v_i[1]);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[r][c] = fmaf(k_i[c], v_i[r / 4][r % 4], x[r][c]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) S.set(r * kQuads + j, x[r]);
    }
  }
};

template <int kK, Access kAccess, bool kPacked>
struct BoundaryTile {
  using Type = TileKV<kK, kAccess != Access::kScalar, kPacked>;
};
template <int kK, bool kPacked>
struct BoundaryTile<kK, Access::kVectorsVK, kPacked> {
  using Type = TileVK<kK, kPacked>;
};

}  // namespace kda::cuda::tail
