// SPDX-License-Identifier: Apache-2.0
// The factors that leave the chunk: decayed rows, squares, w and u.
#pragma once

#include "cuda/ptx/cache.cuh"
#include "cuda/staged/intra/inverse.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda::intra {

template <class T, int kK>
struct Solve : Inverse<T, kK> {
  using Base = Inverse<T, kK>;
  using Base::a;
  using Base::Base;
  using Base::channel;
  using Base::decay;
  using Base::head;
  using Base::k;
  using Base::kStride;
  using Base::kThreads;
  using Base::kVectors;
  using Base::kWarps;
  using Base::lane;
  using Base::load_rows;
  using Base::multiply;
  using Base::norms;
  using Base::q;
  using Base::raw_pair;
  using Base::run;
  using Base::s;
  using Base::tid;
  using Base::tile;
  using Base::tile_of;
  using Base::warp;

  /// Four neighbours in shared memory, in one load.
  struct Four {
    float x[4];
    __device__ explicit Four(const float* from) {
      const float4 y = *reinterpret_cast<const float4*>(from);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
  };

  /// Decay over the runs before this thread's, or after it, to the same bits in both forms.
  template <bool kScanned>
  __device__ float2 decay_over(bool before) const {
    if constexpr (kScanned)
      return *reinterpret_cast<const float2*>(before ? &s.decay_before[run()][channel()]
                                                     : &s.decay_after[run()][channel()]);
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {  // in the order of scan_totals()
      const int r = before ? i : kRuns - 1 - i;
      if (before ? r < run() : r > run())
        multiply(product, *reinterpret_cast<const float2*>(&s.totals[r][channel()]));
    }
    return product;
  }

  /// qg, kg to device memory; Kgam in place of k; gamma. kKept: q and k are in registers, and
  /// totals are scanned.
  template <bool kKept>
  __device__ void decayed_rows() const {
    const auto q_pair = [&](int i) { return ptx::unpack<T>(kKept ? q[i] : raw_pair(s.q, i)); };
    const auto k_pair = [&](int i) { return ptx::unpack<T>(kKept ? k[i] : raw_pair(s.k, i)); };
    const unsigned column = channel() % 64;
    const int64_t row0 = swizzled(run() * kRun, channel() / 64 * 8);
    T* qg = a.factors.qg ? tile_of(a.factors.qg, kChunk * kK) + row0 : nullptr;
    T* kg = a.factors.kg ? tile_of(a.factors.kg, kChunk * kK) + row0 : nullptr;
    const auto pair_at = [&](T* rows, unsigned i) {  // as swizzled() has it
      return reinterpret_cast<uint32_t*>(rows + (column ^ i % 8 * 8) + i * 64);
    };
    // The L2 gives up large qg and kg last: recompute_w_u takes up to 1.5% less on an H200. Small
    // ones would cost it 1 to 2% (docs/performance.md).
    constexpr unsigned kLarge = (128 << 20) / (kChunk * kK * 2 * sizeof(T));
    const uint64_t policy = ptx::createpolicy_evict_last(gridDim.x > kLarge);
    const auto store = [&](uint32_t* to, uint32_t pair) {
      if constexpr (kKept)
        *to = pair;
      else
        ptx::st_cache_hint(policy, to, pair);
    };
    const auto scaled = [](float2 x, float2 factor, float norm) {
      return ptx::pack<T>(x.x * (factor.x * norm), x.y * (factor.y * norm));
    };
    if (kg) {
      float2 factor = decay_over<kKept>(false);
#pragma unroll
      for (int i0 = kRun - 4; i0 >= 0; i0 -= 4) {
        const Four norms(&s.k_norm[run() * kRun + i0]);
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          store(pair_at(kg, i0 + i), scaled(k_pair(i0 + i), factor, norms.x[i]));
          multiply(factor, decay[i0 + i]);
        }
      }
    }
    const float2 before = decay_over<kKept>(true);
    if (qg) {
      float2 factor = before;
#pragma unroll
      for (int i0 = 0; i0 < kRun; i0 += 4) {
        const Four norms(&s.q_norm[run() * kRun + i0]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply(factor, decay[i0 + i]);
          store(pair_at(qg, i0 + i), scaled(q_pair(i0 + i), factor, norms.x[i]));
        }
      }
    }
    float2 factor = before;
#pragma unroll
    for (int i0 = 0; i0 < kRun; i0 += 4) {
      const Four norms(&s.k_norm[run() * kRun + i0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = run() * kRun + i0 + i;
        multiply(factor, decay[i0 + i]);
        *reinterpret_cast<uint32_t*>(&s.k[token][channel()]) =
            scaled(k_pair(i0 + i), factor, norms.x[i]);
      }
    }
    if (run() == kRuns - 1 && a.factors.gamma)
      *reinterpret_cast<float2*>(a.factors.gamma + tile() * kK + channel()) = factor;
  }

  /// Aqk (kScores) or T' to device memory, and 0 where nothing was written: on and above the
  /// diagonal, or in the blocks above it.
  template <int kCopiers, bool kScores>
  __device__ void copy_square(void* target, int thread) const {
    T* base = tile_of(target, kChunk * kChunk);
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kCopiers; ++i) {
      const int row = thread / 8 + i * (kCopiers / 8), piece = thread % 8;
      const auto& square = kScores ? s.after.Aqk : s.after.inverse;
      const int count = (kScores ? row : row / kBlock * kBlock + kBlock) - piece * 8;  // kept
      uint4 x = *reinterpret_cast<const uint4*>(&square[row][piece * 8]);
      x = {kept(x.x, count), kept(x.y, count - 2), kept(x.z, count - 4), kept(x.w, count - 6)};
      *reinterpret_cast<uint4*>(base + swizzled(row, piece)) = x;
    }
  }
  __device__ static uint32_t kept(uint32_t pair, int count) {
    return count >= 2 ? pair : count == 1 ? pair & 0xffff : 0;
  }

  /// T' times the 16 columns of this warp in each of the tiles, in place. T' is lower triangular,
  /// and read once for all.
  template <int kCount>
  __device__ void solve_columns(T (*const (&tiles)[kCount])[kStride]) const {
    static_assert(kWarps * 16 == kK);
    const int column = warp() * 16;
    uint32_t right[kCount][4][4];  // 16 tokens x 16 columns
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::ldmatrix_x4_trans(
            right[n][step],
            ptx::shared_address(&tiles[n][step * 16 + lane() % 16][column + lane() / 16 * 8]));
    __syncwarp();  // only this warp reads these columns
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float acc[kCount][2][4] = {};
#pragma unroll
      for (int step = 0; step <= m; ++step) {
        uint32_t left[4];
        ptx::ldmatrix_x4(left,
                         ptx::shared_address(
                             &s.after.inverse[m * 16 + lane() % 16][step * 16 + lane() / 16 * 8]));
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          ptx::mma_16816<T>(acc[n][0], left, right[n][step][0], right[n][step][1]);
          ptx::mma_16816<T>(acc[n][1], left, right[n][step][2], right[n][step][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          *reinterpret_cast<uint32_t*>(
              &tiles[n][m * 16 + i % 2 * 8 + lane() / 4][column + i / 2 * 8 + lane() % 4 * 2]) =
              ptx::pack<T>(acc[n][i / 2][i % 2 * 2], acc[n][i / 2][i % 2 * 2 + 1]);
    }
  }

  /// The first columns of a solved tile to device memory. kLines: in lines of 128 bytes by all
  /// threads, which wait for each other; else a warp's own 16. Lines that come in parts cost memory
  /// more, and recompute_w_u waits for memory; chunk_intra does not, and would wait for the
  /// barrier.
  template <bool kLines>
  __device__ void store_tile(T* target, const T (*rows)[kStride], int columns) const {
    static_assert(kThreads * 4 == kChunk * kVectors);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = tid / 8 + i * (kThreads / 8);
      const int row = kLines ? line % kChunk : lane() % 16 + i * 16;
      const int piece = kLines ? line / kChunk * 8 + tid % 8 : warp() * 2 + lane() / 16;
      if (piece * 8 < columns)
        *reinterpret_cast<uint4*>(target + swizzled(row, piece)) =
            *reinterpret_cast<const uint4*>(&rows[row][piece * 8]);
    }
  }
  template <bool kLines>
  __device__ static void wait_for_tile() {
    if constexpr (kLines)
      __syncthreads();
    else
      __syncwarp();
  }

  /// w from Kgam and u from tiles of v, kK columns at a time, w and the first of u together. The
  /// first tile is there.
  template <bool kLines>
  __device__ void solve(T (*v)[kStride]) const {
    const int padded = (a.shape.V + kVTile - 1) / kVTile * kVTile;
    T* u = tile_of(a.factors.u, static_cast<int64_t>(padded) * kChunk);
    solve_columns<2>({s.k, v});
    wait_for_tile<kLines>();
    store_tile<kLines>(tile_of(a.factors.w, kChunk * kK), s.k, kK);
    store_tile<kLines>(u, v, padded);
    for (int column0 = kK; column0 < a.shape.V; column0 += kK) {
      __syncthreads();
      load_rows(v, a.v, head, column0, a.shape.V);
      ptx::cp_async_wait<0>();
      __syncthreads();
      solve_columns<1>({v});
      wait_for_tile<kLines>();
      store_tile<kLines>(u + column0 * kChunk, v, padded - column0);
    }
  }
};

}  // namespace kda::cuda::intra
