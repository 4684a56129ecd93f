// SPDX-License-Identifier: Apache-2.0
// Scores between tokens by dyadic levels, on the tensor cores.
#pragma once

#include "cuda/sm80/intra/inputs.cuh"

namespace kda::cuda::intra {

/// Level h pairs runs of h tokens: rows from the second, columns from the first, both decayed to
/// the midpoint between them (docs/operation.md).
template <class T, int kK>
struct Levels : Inputs<T, kK> {
  using Base = Inputs<T, kK>;
  using Base::Base;
  using Base::channel;
  using Base::decay;
  using Base::k;
  using Base::kSteps;
  using Base::kStride;
  using Base::kWarps;
  using Base::lane;
  using Base::multiply;
  using Base::q;
  using Base::run;
  using Base::s;
  using Base::warp;

  // ---- operands ---------------------------------------------------------------------------------

  /// The factor is rounded before the product is: one more rounding, of scores only.
  __device__ void put(T (*target)[kStride], int row, uint32_t pair, float2 factor) const {
    *reinterpret_cast<uint32_t*>(&target[row][channel()]) =
        ptx::multiply_pairs<T>(pair, ptx::pack<T>(factor.x, factor.y));
  }

  /// Decay over runs first .. end - 1, at most kMost.
  template <int kMost>
  __device__ float2 total(int first, int end) const {
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (first + i < end)
        multiply(product, *reinterpret_cast<const float2*>(&s.totals[first + i][channel()]));
    return product;
  }

  /// All 16 tokens as rows (q, and k 32 below), decayed since `factor` before the run.
  __device__ void put_rows(T (*rows)[kStride], float2 factor) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      put(rows, i, q[i], factor);
      put(rows, 32 + i, k[i], factor);
    }
  }
  /// All 16 tokens as columns, decayed until the end of the run, and by `factor` after it.
  __device__ void put_columns(T (*columns)[kStride], float2 factor) const {
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      put(columns, i, k[i], factor);
      multiply(factor, decay[i]);
    }
  }
  /// Level of h >= 16: pairs of runs of h tokens, rows from the second, columns from the first,
  /// decayed from and to the midpoint between them.
  template <int h>
  __device__ void coarse_operands() const {
    constexpr int kHalf = h / kRun;  // runs
    const int pair = run() / (2 * kHalf), within = run() % (2 * kHalf);
    const int middle = run() - within + kHalf;
    const int row0 = pair * h + within % kHalf * kRun;
    if (within >= kHalf)
      put_rows(s.level.rows + row0, total<kHalf - 1>(middle, run()));
    else
      put_columns(s.level.columns + row0, total<kHalf - 1>(run() + 1, middle));
  }

  /// Levels of h <= 8, inside the run. For h = 1 the columns are k itself.
  template <int h>
  __device__ void fine_operands() const {
    const int row0 = run() * 16, column0 = run() * 8;
#pragma unroll
    for (int begin = 0; begin < kRun; begin += 2 * h) {
      float2 factor{1, 1};
#pragma unroll
      for (int i = 0; i < h; ++i) {
        const int token = begin + h + i, row = row0 + begin / 2 + i;
        multiply(factor, decay[token]);
        put(s.level.rows, row, q[token], factor);
        put(s.level.rows, 8 + row, k[token], factor);
      }
      if (h == 1) continue;
      factor = {1, 1};
#pragma unroll
      for (int i = h - 1; i >= 0; --i) {
        put(s.level.columns, column0 + begin / 2 + i, k[begin + i], factor);
        multiply(factor, decay[begin + i]);
      }
    }
  }

  // ---- products ---------------------------------------------------------------------------------

  /// Accumulators of this warp's tiles of the levels: of the 16 of level 32, the 8 of level 16, and
  /// the 4 of each fine level. Those of a run are made and met by the same warps: of two, one takes
  /// levels 8 and 2, the other 4 and 1.
  static constexpr int kTiles32 = 16 / kWarps, kTiles16 = 8 / kWarps, kFine = 16 / kWarps;
  static constexpr int kPasses = 32 / kWarps;  // token form: of two tokens a warp
  struct Accumulators {
    float level32[kTiles32][4] = {};
    float level16[kTiles16][4] = {};
    float fine[kFine][1][4] = {};
    float token_q[kPasses] = {}, token_k[kPasses] = {};
  };
  static constexpr int kRunWarps = kWarps / kRuns;
  __device__ bool takes_level(int which) const { return warp() % kRunWarps == which % kRunWarps; }
  __device__ void sync_run() const {
    if constexpr (kRunWarps == 1)
      __syncwarp();
    else
      ptx::named_sync<kRunWarps * 32>(2 + run());
  }
  __device__ static constexpr int slot_of(int which) { return kWarps == 4 ? which : which / 2; }

  /// acc += rows x columns^T: 16 rows, kTiles n8 tiles of columns.
  template <int kTiles>
  __device__ void multiply_rows(const T (*rows)[kStride], const T (*columns)[kStride],
                                float (&acc)[kTiles][4]) const {
    const uint32_t left = ptx::shared_address(&rows[lane() % 16][lane() / 16 * 8]);
    const uint32_t right = ptx::shared_address(&columns[lane() % 8][lane() / 8 * 8]);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t x[4], y[4];
      ptx::ldmatrix_x4(x, left + step * 32);
      ptx::ldmatrix_x4(y, left + step * 32 + 32);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        uint32_t b[4];  // 8 columns x 32 channels
        ptx::ldmatrix_x4(b, right + (n * 8 * kStride + step * 16) * sizeof(T));
        ptx::mma_16816<T>(acc[n], x, b[0], b[1]);
        ptx::mma_16816<T>(acc[n], y, b[2], b[3]);
      }
    }
  }

  /// Rows: q of 32 tokens, then k. Level 16 meets the columns of its own half.
  __device__ void products32(Accumulators& scores) const {
    constexpr int kSplit = kWarps / 4;  // warps that share 16 rows
    multiply_rows(s.level.rows + warp() / kSplit * 16,
                  s.level.columns + warp() % kSplit * (32 / kSplit), scores.level32);
  }
  __device__ void products16(Accumulators& scores) const {
    constexpr int kSplit = kWarps / 4;
    const int m = warp() / kSplit;
    multiply_rows(s.level.rows + m * 16,
                  s.level.columns + m % 2 * 16 + warp() % kSplit * (16 / kSplit), scores.level16);
  }

  /// Level `which` of the fine ones (8, 4, 2, 1): 16 rows of a block, q and k, and its 8 columns.
  template <int which>
  __device__ void fine_products(Accumulators& scores) const {
    if (!takes_level(which)) return;
    const int at = run();
    float(&acc)[1][4] = scores.fine[slot_of(which)];
    if (which == 3)  // h = 1: every second row of k
      multiply_alternate(s.level.rows + at * 16, s.k + at * kBlock, acc);
    else
      multiply_rows(s.level.rows + at * 16, s.level.columns + at * 8, acc);
  }
  __device__ void multiply_alternate(const T (*rows)[kStride], const T (*k)[kStride],
                                     float (&acc)[1][4]) const {
    const uint32_t left = ptx::shared_address(&rows[lane() % 16][lane() / 16 * 8]);
    const uint32_t right = ptx::shared_address(&k[lane() % 8 * 2][lane() / 8 * 8]);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t x[4], y[4], b[4];
      ptx::ldmatrix_x4(x, left + step * 32);
      ptx::ldmatrix_x4(y, left + step * 32 + 32);
      ptx::ldmatrix_x4(b, right + step * 32);
      ptx::mma_16816<T>(acc[0], x, b[0], b[1]);
      ptx::mma_16816<T>(acc[0], y, b[2], b[3]);
    }
  }
};

}  // namespace kda::cuda::intra
