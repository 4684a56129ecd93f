// SPDX-License-Identifier: Apache-2.0
// A tile of a head's state in the registers of a warp: how it is read and written, and a token's
// step on it.
#pragma once

#include "cuda/tile/state_io.cuh"
#include "cuda/tile/token.cuh"

namespace kda::cuda {

/// State elements of a lane, and the values of a warp's tile that they make.
template <int kK>
constexpr int kElements = kK == 64 ? 64 : 128;
template <int kK>
constexpr int kColumns = 32 * kElements<kK> / kK;

/// kCount elements of a lane. kDense: both buffers have rows of exactly kK elements and K = V = kK,
/// so that there are neither bounds to look at nor addresses to compute: both cost more
/// instructions than the recurrence. Rows of tokens are of whole words.

/// Tile of a buffer whose rows are columns of values: a lane has 4 neighbouring values of kQuads
/// quads of channels.
template <int kK, bool kDense, bool kVectors, int kCount = kElements<kK>>
struct TileKV {
  static constexpr int kOwned = 4;  // values of v and o, a lane
  static constexpr int kColumns = 32 * kCount / kK;
  static constexpr int kColumnLanes = 32 * kCount / kK / 4;
  static constexpr int kGroups = 32 / kColumnLanes;
  static constexpr int kQuads = kCount / 16;
  float S[kQuads][4][4];
  const int lane;
  const int column0;

  __device__ explicit TileKV(int first)
      : lane(static_cast<int>(threadIdx.x) % 32), column0(first) {}
  __device__ void clear() {
    for (float& x : reinterpret_cast<float(&)[kCount]>(S)) x = 0;
  }

  __device__ int channel(int j) const { return (j * kGroups + lane / kColumnLanes) * 4; }
  __device__ int value(int i) const { return column0 + lane % kColumnLanes * 4 + i; }
  __device__ bool writes_output() const { return lane < kColumnLanes; }

  template <bool kBf16>
  __device__ void load(const StateView& states, const Shape& shape, int64_t slot, int64_t head) {
    visit(states, shape, slot, head, [&](float(&s)[4], int64_t at, int c) {
      if constexpr (kVectors) {
        const float4 x = load4<kBf16>(states.base, at);
        s[0] = x.x, s[1] = x.y, s[2] = x.z, s[3] = x.w;
      } else {
        s[c] = load_state<kBf16>(states.base, at);
      }
    });
  }
  template <bool kBf16>
  __device__ void store(const StateView& states, const Shape& shape, int64_t slot, int64_t head) {
    visit(states, shape, slot, head, [&](float(&s)[4], int64_t at, int c) {
      if constexpr (kVectors)
        store4<kBf16>(states.base, at, make_float4(s[0], s[1], s[2], s[3]));
      else
        store_state<kBf16>(states.base, at, s[c]);
    });
  }

  /// Every vector (or element) inside the state, with its offset in the buffer.
  template <class Visit>
  __device__ void visit(const StateView& states, const Shape& shape, int64_t slot, int64_t head,
                        Visit&& with) {
    const int64_t row_step = kDense ? kK : states.vk ? 1 : states.stride_row;
    const int64_t column_step = kVectors || !states.vk ? 1 : states.stride_row;
    const int64_t first = state_offset(states, slot, head, channel(0), value(0));
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; c += kVectors ? 4 : 1)
          if (kDense || (channel(j) + r < shape.K && value(c) < shape.V))
            with(S[j][r], first + (j * kGroups * 4 + r) * row_step + c * column_step, c);
  }

  __device__ static void spread(const float* from, float (&x)[4]) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }

  /// S' = decay S;  r = S'^T k;  vn = beta (v - r);  o = scale (S'^T q + (q.k) vn);  S = S' + k
  /// vn^T
  __device__ void step(const Token<kK>& token, float beta, float scale, const float (&v)[kOwned],
                       float (&o)[kOwned]) {
    float read[4] = {}, out[4] = {}, v_new[4];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float decay[4], k[4], q[4];
      spread(token.decay + channel(j), decay);
      spread(token.k + channel(j), k);
      spread(token.q + channel(j), q);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          S[j][r][c] *= decay[r];
          read[c] = fmaf(S[j][r][c], k[r], read[c]);
          out[c] = fmaf(S[j][r][c], q[r], out[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      v_new[c] = beta * (v[c] - sum_over(read[c], kColumnLanes, 32));
      o[c] = scale * fmaf(token.qk, v_new[c], sum_over(out[c], kColumnLanes, 32));
    }
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float k[4];
      spread(token.k + channel(j), k);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) S[j][r][c] = fmaf(k[r], v_new[c], S[j][r][c]);
    }
  }
};

/// Tile of a buffer whose rows are columns of keys: a lane has its own channels of kRows values.
template <int kK, bool kDense, int kCount = kElements<kK>>
struct TileVK {
  static constexpr int kLanes = kK / 4 < 32 ? kK / 4 : 32;  // of a row
  static constexpr int kQuads = kK / 4 / kLanes;
  static constexpr int kWidth = 4 * kQuads;  // channels of a lane
  static constexpr int kRows = kCount / kWidth;
  static constexpr int kOwned = kRows > kLanes ? kRows / kLanes : 1;
  static constexpr int kShare = kLanes > kRows ? kLanes / kRows : 1;  // lanes that own a row
  static constexpr int kStep = 32 / kLanes;
  static constexpr int kColumns = kRows * kStep;
  float S[kRows][kWidth];
  const int lane;
  const int column0;

  __device__ explicit TileVK(int first)
      : lane(static_cast<int>(threadIdx.x) % 32), column0(first) {}
  __device__ void clear() {
    for (float& x : reinterpret_cast<float(&)[kCount]>(S)) x = 0;
  }

  __device__ int channel(int quad) const { return (lane % kLanes + quad * kLanes) * 4; }
  __device__ int row_value(int r) const { return column0 + r * kStep + lane / kLanes; }
  __device__ int value(int i) const { return row_value(lane % kLanes / kShare * kOwned + i); }
  __device__ bool writes_output() const { return lane % kShare == 0; }

  template <class Visit>
  __device__ void visit(const StateView& states, const Shape& shape, int64_t slot, int64_t head,
                        Visit&& with) {
    const int64_t row_step = kDense ? kK : states.stride_row;
    const int64_t first = state_offset(states, slot, head, channel(0), row_value(0));
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kQuads; ++i)
        if (kDense || (row_value(r) < shape.V && channel(i) < shape.K))
          with(S[r] + 4 * i, first + r * kStep * row_step + i * kLanes * 4);
  }
  template <bool kBf16>
  __device__ void load(const StateView& states, const Shape& shape, int64_t slot, int64_t head) {
    visit(states, shape, slot, head, [&](float* s, int64_t at) {
      const float4 x = load4<kBf16>(states.base, at);
      s[0] = x.x, s[1] = x.y, s[2] = x.z, s[3] = x.w;
    });
  }
  template <bool kBf16>
  __device__ void store(const StateView& states, const Shape& shape, int64_t slot, int64_t head) {
    visit(states, shape, slot, head, [&](float* s, int64_t at) {
      store4<kBf16>(states.base, at, make_float4(s[0], s[1], s[2], s[3]));
    });
  }

  __device__ void spread(const float* row, float (&x)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 y = *reinterpret_cast<const float4*>(row + channel(i));
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
  }

  __device__ void step(const Token<kK>& token, float beta, float scale, const float (&v)[kOwned],
                       float (&o)[kOwned]) {
    float decay[kWidth], k[kWidth], q[kWidth], sums[kRows], v_new[kOwned];
    spread(token.decay, decay), spread(token.k, k), spread(token.q, q);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        S[r][c] *= decay[c];
        sums[r] = fmaf(S[r][c], k[c], sums[r]);
      }
    }
    reduce_scatter<kRows, kLanes / 2>(sums);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v_new[i] = beta * (v[i] - sums[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sums[r] = fmaf(S[r][c], q[c], sums[r]);
    }
    reduce_scatter<kRows, kLanes / 2>(sums);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) o[i] = scale * fmaf(token.qk, v_new[i], sums[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int owner = lane / kLanes * kLanes + r / kOwned * kShare;
      const float new_value = __shfl_sync(~0u, v_new[r % kOwned], owner);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) S[r][c] = fmaf(k[c], new_value, S[r][c]);
    }
  }
};

template <int kK, Access kAccess, bool kDense, int kCount = kElements<kK>>
struct TileOf {
  using Type = TileKV<kK, kDense, kAccess == Access::kVectorsKV, kCount>;
};
template <int kK, bool kDense, int kCount>
struct TileOf<kK, Access::kVectorsVK, kDense, kCount> {
  using Type = TileVK<kK, kDense, kCount>;
};

}  // namespace kda::cuda
