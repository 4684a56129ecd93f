// SPDX-License-Identifier: Apache-2.0
// Scores of a run and the inverse T'. Row i depends on nothing after token i.
#pragma once

#include "cuda/sm90/fused/rows.cuh"

namespace kda::cuda::sm90::fused {

template <class Operand, class E, int kGateMode, bool kSegments>
struct Scores : Rows<Operand, E, kGateMode, kSegments> {
  using Base = Rows<Operand, E, kGateMode, kSegments>;
  using Base::Base;
  using Base::channel;
  using Base::half;
  using Base::kAnchor;
  using Base::lane;
  using Base::make_decays;
  using Base::multiply;
  using Base::operand;
  using Base::own;
  using Base::put_kg;

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
  /// What anchored_scores() has of Aqk: tiles of 8 columns, of rows r and r + 8.
  __device__ static void put_scores(const Stage& s, int r, int c, const float (&acc)[2][4]) {
    put_A(s, r, c, acc[0][0], acc[0][1]);
    *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(r, c + 8)]) = 0;
    *reinterpret_cast<uint32_t*>(&s.factors.Aqk[square_place(r + 8, c)]) =
        ptx::pack<Operand>(acc[0][2] * kAnchor, acc[0][3] * kAnchor);
    put_A(s, r + 8, c + 8, acc[1][2], acc[1][3]);
  }
  /// Of L, but for the tile above the diagonal.
  __device__ void put_products(const Stage& s, int r, int c, const float (&acc)[2][4]) const {
    const float upper = s.factors.k_norm[token_place(r)],
                lower = s.factors.k_norm[token_place(r + 8)];
    const float4 k_beta = *reinterpret_cast<const float4*>(&s.factors.k_beta[token_place(c)]);
    put_L(r, c, acc[0][0], acc[0][1], upper, {k_beta.x, k_beta.y});
    put_L(r + 8, c, acc[0][2], acc[0][3], lower, {k_beta.x, k_beta.y});
    put_L(r + 8, c + 8, acc[1][2], acc[1][3], lower, {k_beta.z, k_beta.w});
  }

  __device__ uint32_t rows_of_scores(const Stage& s) const {
    if constexpr (kHalf<Operand>)
      return ptx::shared_address(half() == 0 ? own.scratch.q : own.scratch.k);
    else
      return ptx::shared_address(s.tiles.rows + (half() == 0 ? kRun * 64 : 0));
  }
  /// The first warp: rows of q; the second: rows of k.
  __device__ void anchored_scores(const Stage& s) const {
    float acc[2][4] = {};
    const int row = lane() % 16;
    const uint32_t left = rows_of_scores(s) + row * 128;
    constexpr int kNextColumns = (kHalf<Operand> ? 1 : 2) * kRun * 128;
    const uint32_t right =
        ptx::shared_address(&own.columns[lane() % 8 + lane() / 16 * 8][lane() / 8 % 2 * 8]);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      uint32_t x[4], y[4];
      const int piece = step % 4 * 2 + lane() / 16;
      ptx::ldmatrix_x4(x, left + step / 4 * kNextColumns + (piece ^ row & 7) * 16);
      ptx::ldmatrix_x4(y, right + step * 32);
      ptx::mma_16816<T>(acc[0], x, y[0], y[1]);
      ptx::mma_16816<T>(acc[1], x, y[2], y[3]);
    }
    if (kHalf<Operand>) __syncwarp();  // L comes where rows are
    if (half() == 0)
      put_scores(s, lane() / 4, lane() % 4 * 2, acc);
    else
      put_products(s, lane() / 4, lane() % 4 * 2, acc);
  }

  // ---- rows out of range -----------------------------------------------------------------------

  using typename Base::Pairs;

  /// A product of 16-bit pairs: one more rounding, of scores only.
  __device__ static void put_decayed(uint32_t place, uint32_t pair, float2 factor) {
    ptx::store_shared(place, ptx::multiply_pairs<Operand>(pair, operand(factor)));
  }

  /// Operands of dyadic level h (docs/operation.md): 8 rows of q, then of k; 8 columns. Not of
  /// blocks that end before row `from`: nothing of their products is stored.
  template <int h>
  __device__ void put_level(const float2 (&decay)[kRun], const Pairs& q, const Pairs& k, Tile& rows,
                            T* columns, int from) const {
    const uint32_t of_rows = ptx::shared_address(&rows[0][channel()]);
    const uint32_t of_columns = ptx::shared_address(columns + channel());
#pragma unroll
    for (int begin = 0; begin < kRun; begin += 2 * h) {
      if (begin + 2 * h <= from) continue;
      float2 factor{1, 1};
#pragma unroll
      for (int i = 0; i < h; ++i) {
        const int token = begin + h + i, row = begin / 2 + i;
        multiply(factor, decay[token]);
        put_decayed(of_rows + row * kStride * 2, q[token], factor);
        put_decayed(of_rows + (8 + row) * kStride * 2, k[token], factor);
      }
      factor = {1, 1};
#pragma unroll
      for (int i = h - 1; i >= 0; --i) {
        put_decayed(of_columns + (begin / 2 + i) * kStride * 2, k[begin + i], factor);
        multiply(factor, decay[begin + i]);
      }
    }
  }
  template <int h>
  __device__ void multiply_level(const Stage& s, const Tile& rows, const T* columns,
                                 int first) const {
    const uint32_t left = ptx::shared_address(&rows[lane() % 16][lane() / 16 * 8]);
    const uint32_t right =
        ptx::shared_address(columns + lane() % 8 * kStride + lane() / 8 * 8);  // 32 channels
    float acc[4] = {};
#pragma unroll
    for (int step = 0; step < kK / 16; step += 2) {
      uint32_t y[4];
      ptx::ldmatrix_x4(y, right + step * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t x[4];
        ptx::ldmatrix_x4(x, left + (step + i) * 32);
        ptx::mma_16816<Operand>(acc, x, y[2 * i], y[2 * i + 1]);
      }
    }
    store_level<h>(s, acc, first);
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
  /// Two levels, one a warp. Raw q and k of a thread's channels are in its registers: their places
  /// are free.
  template <int h>
  __device__ void two_levels(const Stage& s, const float2 (&decay)[kRun], const Pairs& q,
                             const Pairs& k, int first) const {
    T *columns = own.columns[0], *more_columns = own.columns[8];
    put_level<h>(decay, q, k, own.levels[0], columns, first);
    put_level<h / 2>(decay, q, k, own.levels[1], more_columns, first);
    this->template sync<1>();
    if (half() == 0)
      multiply_level<h>(s, own.levels[0], columns, first);
    else
      multiply_level<h / 2>(s, own.levels[1], more_columns, first);
    this->template sync<0>();
  }
  /// All factors of levels are at most 1: in fp16 rows and columns of them are, too.
  __device__ static void to_operands(Pairs& x) {
#pragma unroll
    for (uint32_t& pair : x) pair = operand(ptx::unpack<T>(pair));
  }
  /// In place of what the anchored form has for rows from `first` on.
  __device__ void fine_levels(const Stage& s, Pairs& q, Pairs& k, int rows, int first) const {
    if constexpr (kHalf<Operand>) to_operands(q), to_operands(k);
    float2 decay[kRun];
    this->load_gates(decay);
    make_decays(decay, rows);
    this->template sync<0>();  // columns are in use no more
    two_levels<8>(s, decay, q, k, first);
    two_levels<2>(s, decay, q, k, first);
    put_kg(s, decay, k);
    this->template sync<1>();
  }

  // ---- T' = (I + L)^-1 -------------------------------------------------------------------------

  /// Diagonal blocks of 8 by substitution in fp32, in place; a lane owns a column.
  __device__ void invert_blocks() const {
    const int at = lane() / 8 % 2 * 8, j = lane() % 8;
    float column[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 l = *reinterpret_cast<const float4*>(&own.scratch.L[at + i][at + m]);
        sum -= l.x * column[m];
        if (m + 1 < i) sum -= l.y * column[m + 1];
        if (m + 2 < i) sum -= l.z * column[m + 2];
        if (m + 3 < i) sum -= l.w * column[m + 3];
      }
      column[i] = i < j ? 0.0f : sum;
    }
    __syncwarp();
    if (lane() < 16)
#pragma unroll
      for (int i = 0; i < 8; ++i) own.scratch.L[at + i][at + j] = column[i];
    __syncwarp();
  }
  /// T21 = -T22 L21 T11 in tf32: every factor is bounded by 2. The k order of the second product is
  /// permuted so that the first one's accumulators are its A operand.
  __device__ void merge_blocks(float (&out)[4]) const {
    const int r = lane() / 4, c = lane() % 4;
    const auto tf32 = [&](int i, int j) { return ptx::to_tf32(own.scratch.L[i][j]); };
    float y[4] = {};
    const uint32_t left[4] = {tf32(8 + r, 8 + c), 0, tf32(8 + r, 12 + c), 0};
    ptx::mma_1688_tf32(y, left, tf32(8 + c, r), tf32(12 + c, r));
    const uint32_t next[4] = {ptx::to_tf32(-y[0]), 0, ptx::to_tf32(-y[1]), 0};
    ptx::mma_1688_tf32(out, next, tf32(2 * c, r), tf32(2 * c + 1, r));
  }
  __device__ void invert(const Stage& s) const {
    invert_blocks();
    float lower[4] = {};
    merge_blocks(lower);
    const int r = lane() / 4, c = lane() % 4 * 2;
    const auto put_pair = [&](int i, int j, float x, float y) {
      *reinterpret_cast<uint32_t*>(&s.factors.inverse[square_place(i, j)]) =
          ptx::pack<Operand>(x, y);
    };
#pragma unroll
    for (int at = 0; at < kRun; at += 8) {
      const float2 x = *reinterpret_cast<const float2*>(&own.scratch.L[at + r][at + c]);
      put_pair(at + r, at + c, c < r ? x.x : 0.0f, c + 1 < r ? x.y : 0.0f);
    }
    put_pair(r, 8 + c, 0, 0);
    put_pair(8 + r, c, lower[0], lower[1]);
  }
};

}  // namespace kda::cuda::sm90::fused
