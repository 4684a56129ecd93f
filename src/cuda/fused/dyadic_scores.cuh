// SPDX-License-Identifier: Apache-2.0
// Scores of a run by dyadic levels, whose factors are at most 1 (docs/operation.md): of rows that
// the anchored form has not right, or of a whole run.
#pragma once

#include "cuda/fused/decay.cuh"

namespace kda::cuda::sm90::fused {

/// Rows of a level, 8 of q and 8 of k: padded, where raw rows were.
template <int kK>
struct PaddedRows {
  Tile<kK>& tile;
  __device__ uint32_t place(unsigned channel) const {
    return ptx::shared_address(&tile[0][channel]);
  }
  __device__ static void put(uint32_t place, int row, uint32_t pair) {
    ptx::st_shared(place + row * kStride<kK> * 2, pair);
  }
  /// Of 8 channels for ldmatrix, of which a step has two.
  __device__ uint32_t piece(int row, int step, int which) const {
    return ptx::shared_address(&tile[row][which * 8]) + step * 32;
  }
};
/// Swizzled, where rows of scores would be.
template <int kK>
struct SwizzledRows {
  SwizzledTile<kK>& tile;
  __device__ uint32_t place(unsigned channel) const {
    return ptx::shared_address(tile + channel / 64 * kRun * 64 + channel % 64);
  }
  __device__ static void put(uint32_t place, int row, uint32_t pair) {
    ptx::st_shared((place ^ row % 8 * 16) + row * 128, pair);
  }
  __device__ uint32_t piece(int row, int step, int which) const {
    return ptx::shared_address(tile) + row * 128 + step / 4 * (kRun * 128) +
           (step % 4 * 2 + which ^ row & 7) * 16;
  }
};

template <int kK, class Operand, class E, int kGateMode, bool kSegments>
struct Levels : Rows<kK, Operand, E, kGateMode, kSegments> {
  using Base = Rows<kK, Operand, E, kGateMode, kSegments>;
  using Base::Base;
  using Base::channel;
  using Base::forget_index;
  using Base::is_first;
  using Base::is_last;
  using Base::kAnchor;
  using Base::kWarps;
  using Base::lane;
  using Base::make_decays;
  using Base::multiply;
  using Base::operand;
  using Base::own;
  using Base::put_kg;
  using typename Base::Pairs;
  using typename Base::Stage;
  using typename Base::T;
  using Padded = PaddedRows<kK>;
  using Swizzled = SwizzledRows<kK>;

  /// Neighbours j, j + 1 of row i: of Aqk, and of L.
  __device__ static void put_A(const Stage& s, int i, int j, float x, float y) {
    *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(i, j)]) =
        ptx::pack<Operand>(j < i ? x * kAnchor : 0.0f, j + 1 < i ? y * kAnchor : 0.0f);
  }
  __device__ void put_L(const Stage& s, int i, int j, float x, float y) const {
    put_L(i, j, x, y, s.factors.k_norm[token_place(i)],
          *reinterpret_cast<const float2*>(&s.factors.k_beta[token_place(j)]));
  }
  __device__ void put_L(int i, int j, float x, float y, float k_norm, float2 k_beta) const {
    const float of_row = k_norm * kAnchor;
    *reinterpret_cast<float2*>(&own.scratch.L[i][j]) = {x * (of_row * k_beta.x),
                                                        y * (of_row * k_beta.y)};
  }

  // Factors are products of up to 8 decays: in fp32, or of pairs of operands, for fewer
  // instructions.

  __device__ static float2 product_of(float2 x, float2 y) { return Base::product(x, y); }
  __device__ static uint32_t product_of(uint32_t x, uint32_t y) {
    return ptx::mul_x2<Operand>(x, y);
  }
  /// A product of 16-bit pairs: one more rounding.
  __device__ static uint32_t decayed(uint32_t pair, uint32_t factor) {
    return product_of(pair, factor);
  }
  __device__ static uint32_t decayed(uint32_t pair, float2 factor) {
    return product_of(pair, operand(factor));
  }

  /// Operands of dyadic level h: rows, 8 columns. Not of blocks that end before row `from`: nothing
  /// of their products is stored.
  template <int h, class Factor, class LevelRows>
  __device__ void put_level(const Factor (&decay)[kRun], const Pairs& q, const Pairs& k,
                            LevelRows rows, Bits* columns, int from) const {
    const uint32_t of_rows = rows.place(channel());
    const uint32_t of_columns = ptx::shared_address(columns + channel());
#pragma unroll
    for (int begin = 0; begin < kRun; begin += 2 * h) {
      if (begin + 2 * h <= from) continue;
      Factor factor;
#pragma unroll
      for (int i = 0; i < h; ++i) {
        const int token = begin + h + i, row = begin / 2 + i;
        factor = i == 0 ? decay[token] : product_of(factor, decay[token]);
        rows.put(of_rows, row, decayed(q[token], factor));
        rows.put(of_rows, 8 + row, decayed(k[token], factor));
      }
#pragma unroll
      for (int i = h - 1; i >= 0; --i) {
        const uint32_t pair = k[begin + i];
        if (i < h - 1)
          factor = i == h - 2 ? decay[begin + i + 1] : product_of(factor, decay[begin + i + 1]);
        ptx::st_shared(of_columns + (begin / 2 + i) * kStride<kK> * 2,
                       i < h - 1 ? decayed(pair, factor) : pair);
      }
    }
  }
  template <class LevelRows>
  __device__ void multiply_level(LevelRows rows, const Bits* columns, float (&acc)[4]) const {
    const uint32_t right =
        ptx::shared_address(columns + lane() % 8 * kStride<kK> + lane() / 8 * 8);  // 32 channels
#pragma unroll
    for (int step = 0; step < kK / 16; step += 2) {
      uint32_t y[4];
      ptx::ldmatrix_x4(y, right + step * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t x[4];
        ptx::ldmatrix_x4(x, rows.piece(lane() % 16, step + i, lane() / 16));
        ptx::mma_16816<Operand>(acc, x, y[2 * i], y[2 * i + 1]);
      }
    }
  }
  template <int h>
  __device__ void store_level(const Stage& s, const float (&acc)[4], int first) const {
    const int r = lane() / 4, n = lane() % 4 * 2;
    const int i = r / h * 2 * h + h + r % h, j = n / h * 2 * h + n % h;
    if (i < first) return;
    if constexpr (h > 1) {
      if (n / h != r / h) return;  // columns of other pairs of the level
      put_A(s, i, j, acc[0], acc[1]);
      put_L(s, i, j, acc[2], acc[3]);
    } else {  // the column before the diagonal
      if (n != r && n + 1 != r) return;
      const float q = n == r ? acc[0] : acc[1], k = n == r ? acc[2] : acc[3];
      s.factors.Aqk[square_place(i, i - 1)] =
          static_cast<uint16_t>(ptx::pack<Operand>(q * kAnchor, 0));
      own.scratch.L[i][i - 1] =
          k * (s.factors.k_norm[token_place(i)] * kAnchor * s.factors.k_beta[token_place(i - 1)]);
    }
  }
  /// Products of two levels, h and h / 2: a warp has one of them, or both.
  using Two = float[2 / kWarps][4];
  static constexpr int kSecond = 2 / kWarps - 1;
  template <int h, int kParity, class Factor, class LevelRows>
  __device__ void multiply_levels(const Factor (&decay)[kRun], const Pairs& q, const Pairs& k,
                                  LevelRows rows, LevelRows more_rows, int first, Two& acc) const {
    Bits *columns = own.columns[0], *more_columns = own.columns[8];
    put_level<h>(decay, q, k, rows, columns, first);
    put_level<h / 2>(decay, q, k, more_rows, more_columns, first);
    this->template sync<kParity>();
    this->share([&] { multiply_level(rows, columns, acc[0]); },
                [&] { multiply_level(more_rows, more_columns, acc[kSecond]); });
  }
  template <int h>
  __device__ void store_levels(const Stage& s, const Two& acc, int first) const {
    this->share([&] { store_level<h>(s, acc[0], first); },
                [&] { store_level<h / 2>(s, acc[kSecond], first); });
  }
  /// All factors of levels are at most 1: in fp16 rows and columns of them are, too.
  __device__ static void to_operands(Pairs& x) {
    if constexpr (!std::is_same_v<T, Operand>)
#pragma unroll
      for (uint32_t& pair : x) pair = operand(ptx::unpack<T>(pair));
  }
  /// In place of what the anchored form has for rows from `first` on. Raw q and k of a thread's
  /// channels are in its registers: their places are free.
  __device__ void fine_levels(const Stage& s, Pairs& q, Pairs& k, int rows, int first) {
    if constexpr (kHalf<Operand>) to_operands(q), to_operands(k);
    float2 decay[kRun];
    this->load_gates(decay);
    make_decays(decay, rows);
    this->template sync<0>();  // columns are in use no more
    Two acc = {}, more = {};
    multiply_levels<8, 1>(decay, q, k, Padded{own.levels[0]}, Padded{own.levels[1]}, first, acc);
    this->template sync<0>();
    store_levels<8>(s, acc, first);
    multiply_levels<2, 1>(decay, q, k, Padded{own.levels[0]}, Padded{own.levels[1]}, first, more);
    this->template sync<0>();
    store_levels<2>(s, more, first);
    put_kg(s, decay, k);
    this->template sync<1>();
  }

  // ---- heads that forget fast ------------------------------------------------------------------
  //
  // Where most runs of a head leave the range, the anchored form is computed in vain. Such heads
  // are known by their parameters alone, so that no bit depends on other tokens.

  /// Rows that the state is multiplied with, and kg. Makes operands of q and k.
  __device__ void put_operands(const Stage& s, const float2 (&decay)[kRun], Pairs& q,
                               Pairs& k) const {
    const uint32_t of_rows = this->template place<2 * kRun>(s.tiles.rows),
                   of_kg = this->template place<kRun>(s.tiles.kg);
    to_operands(q), to_operands(k);
    float2 factor{1, 1};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      Base::put(of_rows, i, decayed(k[i], factor));
      Base::put(of_rows, kRun + i, decayed(q[i], factor));
    }
    factor = {1, 1};
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      Base::put(of_kg, i, i == kRun - 1 ? k[i] : decayed(k[i], factor));
      multiply(factor, decay[i]);
    }
  }
  __device__ void all_levels(const Stage& s, const float2 (&decay)[kRun], const Pairs& q,
                             const Pairs& k) {
    uint32_t rounded[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) rounded[i] = operand(decay[i]);
    Two acc = {}, more = {};
    multiply_levels<8, 0>(rounded, q, k, Swizzled{own.scratch.q}, Swizzled{own.scratch.k}, 0, acc);
    this->template sync<1>();
    forget_index();
    multiply_levels<2, 0>(rounded, q, k, Swizzled{own.scratch.k}, Swizzled{own.scratch.q}, 0, more);
    __syncwarp();
    // L comes where the first warp's rows were: it may store when it has multiplied, the second
    // warp, which inverts, when the first has stored.
    if (is_first()) store_both(s, acc, more);
    this->template sync<1>();
    if (kWarps > 1 && is_last()) store_both(s, acc, more);
  }
  __device__ void store_both(const Stage& s, const Two& acc, const Two& more) const {
    store_levels<8>(s, acc, 0);
    store_levels<2>(s, more, 0);
  }
};

}  // namespace kda::cuda::sm90::fused
