// SPDX-License-Identifier: Apache-2.0
// Columns of a boundary state that a warp has, on their way through registers: patches of 4
// channels and 4 columns, a few at a time, so that an SM has room for many warps. How they are read
// and written, what they sum with two vectors, and how rows are folded into them. Vectors and rows
// lie in shared memory.
#pragma once

#include "cuda/decode/tail/layout.hpp"
#include "cuda/ptx/cache.cuh"
#include "cuda/tile/state_io.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::tail {

__device__ __forceinline__ void spread(const float* from, float (&x)[4]) {
  const float4 y = *reinterpret_cast<const float4*>(from);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

/// The factor that normalises a key or a query, from its sum of squares.
__device__ __forceinline__ float norm_factor(const GateView& gate, float square) {
  return gate.l2norm ? rsqrtf(square + 1e-6f) : 1.0f;
}

/// Numbers that v_new and o of a token take beside sums and v, in every column.
struct Factors {
  float of_key;  ///< normalises the key
  float2 of_q;   ///< normalises q; q . k of what was not normalised
  float beta;
};
struct Solved {
  float v_new, o;
};
/// From v, and S^T k and S^T q in front of the token, in a column.
__device__ __forceinline__ Solved solve_token(const GateView& gate, const Factors& factors, float v,
                                              float with_k, float with_q) {
  const float v_new = factors.beta * (v - factors.of_key * with_k);
  return {v_new,
          gate.scale * factors.of_q.x * fmaf(factors.of_q.y, factors.of_key * v_new, with_q)};
}

/// Columns of a warp, one a lane.
constexpr int kWarpColumns = 32;

/// Rows that are folded, and the decays that everything in front of them meets.
struct Folded {
  const float *keys, *v_new, *decays;  ///< rows of keys are decayed and normalised
  int rows, columns;                   ///< columns of a row of v_new
};

/// kScalar: one element at a time, none past K and V, of buffers of either type. Else rows of
/// exactly kK elements, whole vectors. kPacked: bf16. A load reads 128 bytes of a row of fp32.
template <int kK, Access kAccess, bool kPacked>
struct Tile {
  static constexpr bool kDense = kAccess != Access::kScalar;
  static constexpr bool kMayBeSplit = kPacked || !kDense;
  static constexpr bool kRowsAreColumns = kAccess == Access::kVectorsVK;
  static constexpr int kColumns = kRowsAreColumns ? 16 : kWarpColumns;
  static constexpr int kLanes = 128 / kColumns;  // that share columns
  using Patch = float[4][4];                     // [channel][column]
  const StateView& states;
  const Shape& shape;
  const int64_t head;
  const int lane;
  const int column0;
  const int keys;  ///< floats of a row of channels

  __device__ Tile(const StateView& of, const Shape& sizes, int64_t of_head, int first)
      : states(of),
        shape(sizes),
        head(of_head),
        lane(static_cast<int>(threadIdx.x) % 32),
        column0(first),
        keys(kDense ? kK : channels_of(sizes.K)) {}
  __device__ int patches() const { return keys / 4 / kLanes; }  ///< of a lane
  __device__ int channel(int j) const { return (j * kLanes + lane % kLanes) * 4; }
  __device__ int column() const { return column0 + lane / kLanes * 4; }
  /// The lane's first element.
  __device__ int64_t place(int64_t slot) const {
    return state_offset(states, slot, head, channel(0), column());
  }

  __device__ __forceinline__ void load(int64_t at, int j, Patch& x) const {
    if constexpr (kDense) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float4 row = load4<kPacked>(states.base, at + vector(j, r));
        const float elements[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int c = 0; c < 4; ++c)
          x[kRowsAreColumns ? c : r][kRowsAreColumns ? r : c] = elements[c];
      }
    } else {
      visit(at, j, x, [&](float& element, bool is_there, int64_t where) {
        element = !is_there     ? 0.0f
                  : states.bf16 ? load_state<true>(states.base, where)
                                : load_state<false>(states.base, where);
      });
    }
  }
  __device__ __forceinline__ void store(int64_t at, int j, Patch& x) const {
    if constexpr (kDense) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const auto element = [&](int c) { return kRowsAreColumns ? x[c][r] : x[r][c]; };
        store4<kPacked>(states.base, at + vector(j, r),
                        make_float4(element(0), element(1), element(2), element(3)));
      }
    } else {
      visit(at, j, x, [&](const float& element, bool is_there, int64_t where) {
        if (is_there) store_state(states, where, element);
      });
    }
  }

  /// Patches from slot `from`, or zeros where that is -1, to slot `to`: fold(j, patches) before
  /// they are written, behind(j, patches) then. Pairs of patches share what is read of v_new.
  template <class Fold, class Behind>
  __device__ __forceinline__ void rewrite(int64_t from, int64_t to, Fold&& fold_rows,
                                          Behind&& behind) const {
    const int64_t read_at = place(from), write_at = place(to);
#pragma unroll 1
    for (int j = 0; j < patches(); j += 2) {
      Patch x[2] = {};
      if (from >= 0) load(read_at, j, x[0]), load(read_at, j + 1, x[1]);
      fold_rows(j, x);
      store(write_at, j, x[0]), store(write_at, j + 1, x[1]);
      behind(j, x);
    }
  }
  template <class Fold>
  __device__ __forceinline__ void rewrite(int64_t from, int64_t to, Fold&& fold_rows) const {
    rewrite(from, to, fold_rows, [](int, const Patch(&)[2]) {});
  }

  /// x = Diag(decays) x + sum of k v_new^T, of two patches that follow each other.
  __device__ __forceinline__ void fold(const Folded& from, int j, Patch (&x)[2]) const {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float decay[4];
      spread(from.decays + channel(j + p), decay);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) x[p][r][c] *= decay[r];
    }
#pragma unroll 2
    for (int i = 0; i < from.rows; ++i) {
      float v_i[4];
      spread(from.v_new + i * from.columns + column(), v_i);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        float k_i[4];
        spread(from.keys + i * keys + channel(j + p), k_i);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) x[p][r][c] = fmaf(k_i[r], v_i[c], x[p][r][c]);
      }
    }
    if (kDense ? kPacked : states.bf16)
      round(x[0]), round(x[1]);  // a bf16 state goes on from what is written
  }

  /// Adds x^T vector.
  __device__ __forceinline__ void multiply(const float* vector, int j, const Patch& x,
                                           float (&sums)[4]) const {
    float y[4];
    spread(vector + channel(j), y);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[c] = fmaf(x[r][c], y[r], sums[c]);
  }

  /// Sums over the lanes, to a row of numbers of columns.
  __device__ __forceinline__ void store_sums(float (&sums)[4], float* to) const {
    reduce_scatter<4, kLanes / 2>(sums);
    constexpr int kSame = kLanes / 4;  // lanes that end with the same sum
    if (lane % kSame == 0) to[column0 + lane / kSame] = sums[0];
  }

 private:
  /// Where vector r of a patch lies, behind the lane's first element.
  __device__ static constexpr int vector(int j, int r) {
    return kRowsAreColumns ? j * kLanes * 4 + r * kK : (j * kLanes * 4 + r) * kK;
  }
  template <class With>
  __device__ __forceinline__ void visit(int64_t at, int j, Patch& x, With&& with) const {
    const int64_t channel_step = states.vk ? 1 : states.stride_row;
    const int64_t column_step = states.vk ? states.stride_row : 1;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        with(x[r][c], channel(j) + r < shape.K && column() + c < shape.V,
             at + (j * kLanes * 4 + r) * channel_step + c * column_step);
  }
  __device__ static void round(Patch& x) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) x[r][c] = __bfloat162float(__float2bfloat16_rn(x[r][c]));
  }
};

/// Asks the L2 for a dense state.
template <int kK>
__device__ __forceinline__ void prefetch_state(const StateView& states, int64_t slot,
                                               int64_t head) {
  const int size = states.bf16 ? 2 : 4;
  ptx::cp_async_bulk_prefetch_l2(
      reinterpret_cast<uintptr_t>(states.base) +
          static_cast<uintptr_t>(state_offset(states, slot, head, 0, 0) * size),
      kK * kK * size);
}

}  // namespace kda::cuda::tail
