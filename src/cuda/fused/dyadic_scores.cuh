// SPDX-License-Identifier: Apache-2.0
// Scores of a sub-chunk by dyadic levels, whose factors are at most 1 (docs/algorithm.md): for rows
// that the anchored form does not have right, or for all rows of a dyadic-only head.
#pragma once

#include <type_traits>

#include "cuda/fused/decay.cuh"

namespace kda::cuda::sm90::fused {

// ---- where scores go

/// Stores neighbours j, j + 1 of row i of Aqk.
template <class P>
__device__ void put_A(const PipeStage<P::kK>& s, int i, int j, float x, float y) {
  *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(i, j)]) = ptx::pack<typename P::Operand>(
      j < i ? x * P::kAnchor : 0.0f, j + 1 < i ? y * P::kAnchor : 0.0f);
}
/// Stores neighbours j, j + 1 of row i of L = N diag(beta).
template <class P>
__device__ void put_L(const P& p, int i, int j, float x, float y, float k_norm, float2 k_beta) {
  const float row_factor = k_norm * P::kAnchor;
  *reinterpret_cast<float2*>(&p.own.scratch.L[i][j]) = {x * (row_factor * k_beta.x),
                                                        y * (row_factor * k_beta.y)};
}
template <class P>
__device__ void put_L(const P& p, const PipeStage<P::kK>& s, int i, int j, float x, float y) {
  put_L(p, i, j, x, y, s.factors.k_norm[token_place(i)],
        *reinterpret_cast<const float2*>(&s.factors.k_beta[token_place(j)]));
}

// ---- rows of a level, 8 of q and 8 of k

/// Padded rows, where raw rows were.
template <int kK>
struct PaddedRows {
  Tile<kK>& tile;
  __device__ uint32_t place(unsigned channel) const {
    return ptx::shared_address(&tile[0][channel]);
  }
  __device__ static void put(uint32_t place, int row, uint32_t pair) {
    ptx::st_shared(place + row * kStride<kK> * 2, pair);
  }
  /// 8 channels for ldmatrix; a step has two such pieces.
  __device__ uint32_t piece(int row, int step, int which) const {
    return ptx::shared_address(&tile[row][which * 8]) + step * 32;
  }
};
/// Swizzled rows, where rows of scores would be.
template <int kK>
struct SwizzledRows {
  SwizzledTile<kK>& tile;
  __device__ uint32_t place(unsigned channel) const {
    return ptx::shared_address(tile + channel / 64 * kSubchunk * 64 + channel % 64);
  }
  __device__ static void put(uint32_t place, int row, uint32_t pair) {
    put_swizzled(place, row, pair);
  }
  __device__ uint32_t piece(int row, int step, int which) const {
    return ptx::shared_address(tile) + row * 128 + step / 4 * (kSubchunk * 128) +
           (step % 4 * 2 + which ^ row & 7) * 16;
  }
};

// ---- factors of levels: products of up to 8 decays, in fp32, or in pairs of operands (faster)

template <class P>
__device__ float2 product_of(float2 x, float2 y) {
  return product(x, y);
}
template <class P>
__device__ uint32_t product_of(uint32_t x, uint32_t y) {
  return ptx::mul_x2<typename P::Operand>(x, y);
}
/// A product of pairs of 16 bits: one more rounding.
template <class P>
__device__ uint32_t decayed(uint32_t pair, uint32_t factor) {
  return product_of<P>(pair, factor);
}
template <class P>
__device__ uint32_t decayed(uint32_t pair, float2 factor) {
  return product_of<P>(pair, operand<P>(factor));
}
/// Makes operands of q and k. Factors of levels are at most 1: rows and columns of levels fit fp16
/// where q and k do.
template <class P>
__device__ void to_operands(Pairs& x) {
  if constexpr (!std::is_same_v<typename P::T, typename P::Operand>)
#pragma unroll
    for (uint32_t& pair : x) pair = operand<P>(ptx::unpack<typename P::T>(pair));
}

// ---- one level

/// Stores operands of level h (8, 4, 2 or 1): 8 rows of q and of k, and 8 columns. Of every 2 h
/// tokens the later h are rows, decayed since the end of the earlier h. Those are columns: k,
/// decayed to that end. The level has the scores of the later h with the earlier h. Where 2 h
/// tokens end before row `from` they are left out: nothing of their products is stored.
template <int h, class P, class Factor, class LevelRows>
__device__ void put_level(const P& p, const Factor (&decay)[kSubchunk], const Pairs& q,
                          const Pairs& k, LevelRows rows, Bits* columns, int from) {
  const uint32_t to_rows = rows.place(p.channel());
  const uint32_t to_columns = ptx::shared_address(columns + p.channel());
#pragma unroll
  for (int begin = 0; begin < kSubchunk; begin += 2 * h) {
    if (begin + 2 * h <= from) continue;
    Factor factor;
#pragma unroll
    for (int i = 0; i < h; ++i) {
      const int token = begin + h + i, row = begin / 2 + i;
      factor = i == 0 ? decay[token] : product_of<P>(factor, decay[token]);
      rows.put(to_rows, row, decayed<P>(q[token], factor));
      rows.put(to_rows, 8 + row, decayed<P>(k[token], factor));
    }
#pragma unroll
    for (int i = h - 1; i >= 0; --i) {
      const uint32_t pair = k[begin + i];
      if (i < h - 1)
        factor = i == h - 2 ? decay[begin + i + 1] : product_of<P>(factor, decay[begin + i + 1]);
      ptx::st_shared(to_columns + (begin / 2 + i) * kStride<P::kK> * 2,
                     i < h - 1 ? decayed<P>(pair, factor) : pair);
    }
  }
}
template <class P, class LevelRows>
__device__ void multiply_level(const P& p, LevelRows rows, const Bits* columns, float (&acc)[4]) {
  const uint32_t right = ptx::shared_address(columns + p.lane() % 8 * kStride<P::kK> +
                                             p.lane() / 8 * 8);  // 32 channels
#pragma unroll
  for (int step = 0; step < P::kK / 16; step += 2) {
    uint32_t y[4];
    ptx::ldmatrix_x4(y, right + step * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t x[4];
      ptx::ldmatrix_x4(x, rows.piece(p.lane() % 16, step + i, p.lane() / 16));
      ptx::mma_16816<typename P::Operand>(acc, x, y[2 * i], y[2 * i + 1]);
    }
  }
}
/// Stores scores of level h in rows from `first` on.
template <int h, class P>
__device__ void store_level(const P& p, const PipeStage<P::kK>& s, const float (&acc)[4],
                            int first) {
  const int r = p.lane() / 4, n = p.lane() % 4 * 2;
  const int i = r / h * 2 * h + h + r % h, j = n / h * 2 * h + n % h;
  if (i < first) return;
  if constexpr (h > 1) {
    if (n / h != r / h) return;  // columns of other pairs of the level
    put_A<P>(s, i, j, acc[0], acc[1]);
    put_L(p, s, i, j, acc[2], acc[3]);
  } else {  // the column before the diagonal
    if (n != r && n + 1 != r) return;
    const float q = n == r ? acc[0] : acc[1], k = n == r ? acc[2] : acc[3];
    s.factors.Aqk[square_place(i, i - 1)] =
        static_cast<uint16_t>(ptx::pack<typename P::Operand>(q * P::kAnchor, 0));
    p.own.scratch.L[i][i - 1] =
        k * (s.factors.k_norm[token_place(i)] * P::kAnchor * s.factors.k_beta[token_place(i - 1)]);
  }
}

// ---- two levels, h and h / 2: a warp has one of them, or both

template <class P>
using TwoLevels = float[2 / P::kWarps][4];
template <class P>
constexpr int kSecondLevel = 2 / P::kWarps - 1;
template <int h, int kParity, class P, class Factor, class LevelRows>
__device__ void multiply_levels(const P& p, const Factor (&decay)[kSubchunk], const Pairs& q,
                                const Pairs& k, LevelRows rows, LevelRows more_rows, int first,
                                TwoLevels<P>& acc) {
  Bits *columns = p.own.columns[0], *more_columns = p.own.columns[8];
  put_level<h>(p, decay, q, k, rows, columns, first);
  put_level<h / 2>(p, decay, q, k, more_rows, more_columns, first);
  p.template sync<kParity>();
  p.on_each_warp([&] { multiply_level(p, rows, columns, acc[0]); },
                 [&] { multiply_level(p, more_rows, more_columns, acc[kSecondLevel<P>]); });
}
template <int h, class P>
__device__ void store_levels(const P& p, const PipeStage<P::kK>& s, const TwoLevels<P>& acc,
                             int first) {
  p.on_each_warp([&] { store_level<h>(p, s, acc[0], first); },
                 [&] { store_level<h / 2>(p, s, acc[kSecondLevel<P>], first); });
}

// ---- rows that the anchored form does not have right

/// Makes scores of rows from `first` on, and kg. Raw q and k of a thread's channels are in its
/// registers: levels take their places, and the first bytes of raw g once all threads have read it.
template <class P>
__device__ void fine_levels(const P& p, const PipeStage<P::kK>& s, Pairs& q, Pairs& k, int rows,
                            int first) {
  using Padded = PaddedRows<P::kK>;
  if constexpr (kFp16<typename P::Operand>) to_operands<P>(q), to_operands<P>(k);
  float2 decay[kSubchunk];
  load_gates(p, decay);
  make_decays(p, decay, rows);
  p.template sync<0>();  // columns and raw gates are in use no more
  TwoLevels<P> acc = {}, more = {};
  multiply_levels<8, 1>(p, decay, q, k, Padded{p.own.levels[0]}, Padded{p.own.levels[1]}, first,
                        acc);
  p.template sync<0>();
  store_levels<8>(p, s, acc, first);
  multiply_levels<2, 1>(p, decay, q, k, Padded{p.own.levels[0]}, Padded{p.own.levels[1]}, first,
                        more);
  p.template sync<0>();
  store_levels<2>(p, s, more, first);
  put_kg(p, s, decay, k);
  p.template sync<1>();
}

// ---- dyadic-only heads
//
// Where most sub-chunks of a head leave the range, the anchored form is computed in vain. Such
// heads are known by their parameters alone, so that no bit depends on other tokens.

/// Stores rows that the state is multiplied with, and kg. Makes operands of q and k.
template <class P>
__device__ void put_operands(const P& p, const PipeStage<P::kK>& s,
                             const float2 (&decay)[kSubchunk], Pairs& q, Pairs& k) {
  const uint32_t to_rows = swizzled_channels<2 * kSubchunk>(p, s.tiles.rows),
                 to_kg = swizzled_channels<kSubchunk>(p, s.tiles.kg);
  to_operands<P>(q), to_operands<P>(k);
  float2 factor{1, 1};
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    multiply(factor, decay[i]);
    put_swizzled(to_rows, i, decayed<P>(k[i], factor));
    put_swizzled(to_rows, kSubchunk + i, decayed<P>(q[i], factor));
  }
  factor = {1, 1};
#pragma unroll
  for (int i = kSubchunk - 1; i >= 0; --i) {
    put_swizzled(to_kg, i, i == kSubchunk - 1 ? k[i] : decayed<P>(k[i], factor));
    multiply(factor, decay[i]);
  }
}
template <class P>
__device__ void store_all_levels(const P& p, const PipeStage<P::kK>& s, const TwoLevels<P>& acc,
                                 const TwoLevels<P>& more) {
  store_levels<8>(p, s, acc, 0);
  store_levels<2>(p, s, more, 0);
}
template <class P>
__device__ void all_levels(P& p, const PipeStage<P::kK>& s, const float2 (&decay)[kSubchunk],
                           const Pairs& q, const Pairs& k) {
  using Swizzled = SwizzledRows<P::kK>;
  uint32_t rounded[kSubchunk];
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) rounded[i] = operand<P>(decay[i]);
  TwoLevels<P> acc = {}, more = {};
  multiply_levels<8, 0>(p, rounded, q, k, Swizzled{p.own.scratch.q}, Swizzled{p.own.scratch.k}, 0,
                        acc);
  p.template sync<1>();
  p.forget_index();
  multiply_levels<2, 0>(p, rounded, q, k, Swizzled{p.own.scratch.k}, Swizzled{p.own.scratch.q}, 0,
                        more);
  __syncwarp();
  // L takes the place of the first warp's rows: it may store when it has multiplied; the second
  // warp, which inverts, when the first has stored.
  if (p.is_first()) store_all_levels(p, s, acc, more);
  p.template sync<1>();
  if (P::kWarps > 1 && p.is_last()) store_all_levels(p, s, acc, more);
}

}  // namespace kda::cuda::sm90::fused
