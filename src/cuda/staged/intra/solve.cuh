// SPDX-License-Identifier: Apache-2.0
// The factors that leave the chunk: decayed rows, squares, w and u.
#pragma once

#include "cuda/ptx/cache.cuh"
#include "cuda/staged/intra/inputs.cuh"
#include "cuda/tile/swizzle.hpp"

namespace kda::cuda::intra {

/// Four neighbours in shared memory, in one load.
struct Four {
  float x[4];
  __device__ explicit Four(const float* from) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
};

// ---- decayed rows

/// Decay over the sub-chunks before this thread's, or after it, to the same bits in both forms.
template <bool kScanned, class C>
__device__ float2 decay_over(const C& c, bool before) {
  auto& s = c.s;
  if constexpr (kScanned)
    return *reinterpret_cast<const float2*>(before ? &s.decay_before[c.subchunk()][c.channel()]
                                                   : &s.decay_after[c.subchunk()][c.channel()]);
  float2 product{1, 1};
#pragma unroll
  for (int i = 0; i < kSubchunks; ++i) {  // in the order of scan_totals()
    const int r = before ? i : kSubchunks - 1 - i;
    if (before ? r < c.subchunk() : r > c.subchunk())
      multiply(product, *reinterpret_cast<const float2*>(&s.totals[r][c.channel()]));
  }
  return product;
}

/// Stores qg, kg and gamma in device memory, and Kgam in place of k. kKept: q and k are in
/// registers, and totals are scanned.
template <bool kKept, class C>
__device__ void decayed_rows(const C& c) {
  using T = typename C::T;
  using F = typename C::F;
  constexpr int kK = C::kK;
  auto& s = c.s;
  const auto& a = c.a;
  const auto q_pair = [&](int i) { return ptx::unpack<T>(kKept ? c.q[i] : raw_pair(c, s.q, i)); };
  const auto k_pair = [&](int i) { return ptx::unpack<T>(kKept ? c.k[i] : raw_pair(c, s.k, i)); };
  const unsigned column = c.channel() % 64;
  const int64_t row0 = swizzled(c.subchunk() * kSubchunk, c.channel() / 64 * 8);
  F* qg = a.factors.qg ? c.tile_of(a.factors.qg, kChunk * kK) + row0 : nullptr;
  F* kg = a.factors.kg ? c.tile_of(a.factors.kg, kChunk * kK) + row0 : nullptr;
  const auto pair_at = [&](F* rows, unsigned i) {  // as swizzled() has it
    return reinterpret_cast<uint32_t*>(rows + (column ^ i % 8 * 8) + i * 64);
  };
  // The L2 gives up large qg and kg last: recompute_w_u takes up to 1.5% less on an H200. Small
  // ones would cost it 1 to 2% (docs/log/2026-11.md).
  constexpr unsigned kLarge = (128 << 20) / (kChunk * kK * 2 * sizeof(F));
  const uint64_t policy = ptx::createpolicy_evict_last(gridDim.x > kLarge);
  const auto store = [&](uint32_t* to, uint32_t pair) {
    if constexpr (kKept)
      *to = pair;
    else
      ptx::st_cache_hint(policy, to, pair);
  };
  const auto scaled = [](float2 x, float2 factor, float norm) {
    return ptx::pack<F>(x.x * (factor.x * norm), x.y * (factor.y * norm));
  };
  if (kg) {
    float2 factor = decay_over<kKept>(c, false);
#pragma unroll
    for (int i0 = kSubchunk - 4; i0 >= 0; i0 -= 4) {
      const Four norms(&s.k_norm[c.subchunk() * kSubchunk + i0]);
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        store(pair_at(kg, i0 + i), scaled(k_pair(i0 + i), factor, norms.x[i]));
        multiply(factor, c.decay[i0 + i]);
      }
    }
  }
  const float2 before = decay_over<kKept>(c, true);
  if (qg) {
    float2 factor = before;
#pragma unroll
    for (int i0 = 0; i0 < kSubchunk; i0 += 4) {
      const Four norms(&s.q_norm[c.subchunk() * kSubchunk + i0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply(factor, c.decay[i0 + i]);
        store(pair_at(qg, i0 + i), scaled(q_pair(i0 + i), factor, norms.x[i]));
      }
    }
  }
  float2 factor = before;
#pragma unroll
  for (int i0 = 0; i0 < kSubchunk; i0 += 4) {
    const Four norms(&s.k_norm[c.subchunk() * kSubchunk + i0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = c.subchunk() * kSubchunk + i0 + i;
      multiply(factor, c.decay[i0 + i]);
      *reinterpret_cast<uint32_t*>(&s.k[token][c.channel()]) =
          scaled(k_pair(i0 + i), factor, norms.x[i]);
    }
  }
  if (c.subchunk() == kSubchunks - 1 && a.factors.gamma)
    *reinterpret_cast<float2*>(a.factors.gamma + c.tile() * kK + c.channel()) = factor;
}

// ---- squares

/// The first `count` elements of a pair; 0 for the others.
__device__ __forceinline__ uint32_t kept(uint32_t pair, int count) {
  return count >= 2 ? pair : count == 1 ? pair & 0xffff : 0;
}
/// Stores Aqk (kScores) or T' in device memory, and 0 where nothing was written: on and above the
/// diagonal, or in the blocks above it.
template <int kCopiers, bool kScores, class C>
__device__ void copy_square(const C& c, void* target, int thread) {
  typename C::F* base = c.tile_of(target, kChunk * kChunk);
#pragma unroll
  for (int i = 0; i < kChunk * 8 / kCopiers; ++i) {
    const int row = thread / 8 + i * (kCopiers / 8), piece = thread % 8;
    const auto& square = kScores ? c.s.after.Aqk : c.s.after.inverse;
    const int count = (kScores ? row : row / kBlock * kBlock + kBlock) - piece * 8;  // kept
    uint4 x = *reinterpret_cast<const uint4*>(&square[row][piece * 8]);
    x = {kept(x.x, count), kept(x.y, count - 2), kept(x.z, count - 4), kept(x.w, count - 6)};
    *reinterpret_cast<uint4*>(base + swizzled(row, piece)) = x;
  }
}
/// Loads blocks of T' on and below the diagonal: all that anything reads.
template <class C>
__device__ void load_inverse(const C& c) {
  const typename C::F* stored = c.tile_of(c.a.factors.T, kChunk * kChunk);
#pragma unroll
  for (int i = 0; i < kChunk * 8 / C::kThreads; ++i) {
    const int row = c.tid / 8 + i * (C::kThreads / 8), piece = c.tid % 8;
    ptx::cp_async<16>(ptx::shared_address(&c.s.after.inverse[row][piece * 8]),
                      stored + swizzled(row, piece), piece * 8 < row / kBlock * kBlock + kBlock);
  }
  ptx::cp_async_commit();
}

// ---- w and u

/// T' times the 16 columns of this warp in each of the tiles, in place. T' is lower triangular, and
/// read once for all.
template <int kCount, class C>
__device__ void solve_columns(const C& c, RowsOf<C>* const (&tiles)[kCount]) {
  using F = typename C::F;
  static_assert(C::kWarps * 16 == C::kK);
  const int column = c.warp() * 16;
  uint32_t right[kCount][4][4];  // 16 tokens x 16 columns
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::ldmatrix_x4_trans(
          right[n][step],
          ptx::shared_address(&tiles[n][step * 16 + c.lane() % 16][column + c.lane() / 16 * 8]));
  __syncwarp();  // only this warp reads these columns
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    float acc[kCount][2][4] = {};
#pragma unroll
    for (int step = 0; step <= m; ++step) {
      uint32_t left[4];
      ptx::ldmatrix_x4(
          left, ptx::shared_address(
                    &c.s.after.inverse[m * 16 + c.lane() % 16][step * 16 + c.lane() / 16 * 8]));
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        ptx::mma_16816<F>(acc[n][0], left, right[n][step][0], right[n][step][1]);
        ptx::mma_16816<F>(acc[n][1], left, right[n][step][2], right[n][step][3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<uint32_t*>(
            &tiles[n][m * 16 + i % 2 * 8 + c.lane() / 4][column + i / 2 * 8 + c.lane() % 4 * 2]) =
            ptx::pack<F>(acc[n][i / 2][i % 2 * 2], acc[n][i / 2][i % 2 * 2 + 1]);
  }
}

/// Stores the first columns of a solved tile in device memory. kLines: in lines of 128 bytes by all
/// threads, which wait for each other; else a warp's own 16. Lines that come in parts cost memory
/// more, and recompute_w_u waits for memory; chunk_intra does not, and would wait for the barrier.
template <bool kLines, class C>
__device__ void store_tile(const C& c, typename C::F* target, const RowsOf<C>* rows, int columns) {
  static_assert(C::kThreads * 4 == kChunk * C::kVectors);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = c.tid / 8 + i * (C::kThreads / 8);
    const int row = kLines ? line % kChunk : c.lane() % 16 + i * 16;
    const int piece = kLines ? line / kChunk * 8 + c.tid % 8 : c.warp() * 2 + c.lane() / 16;
    if (piece * 8 < columns)
      *reinterpret_cast<uint4*>(target + swizzled(row, piece)) =
          *reinterpret_cast<const uint4*>(&rows[row][piece * 8]);
  }
}
template <bool kLines>
__device__ void wait_for_tile() {
  if constexpr (kLines)
    __syncthreads();
  else
    __syncwarp();
}

/// Makes w from Kgam, and u from tiles of v, kK columns at a time; w and the first of u together.
/// The first tile is there.
template <bool kLines, class C>
__device__ void solve(const C& c, RowsOf<C>* v) {
  constexpr int kK = C::kK;
  const auto& a = c.a;
  const int padded = (a.shape.V + kVTile - 1) / kVTile * kVTile;
  typename C::F* u = c.tile_of(a.factors.u, static_cast<int64_t>(padded) * kChunk);
  solve_columns<2>(c, {c.s.k, v});
  wait_for_tile<kLines>();
  store_tile<kLines>(c, c.tile_of(a.factors.w, kChunk * kK), c.s.k, kK);
  store_tile<kLines>(c, u, v, padded);
  for (int column0 = kK; column0 < a.shape.V; column0 += kK) {
    __syncthreads();
    load_rows(c, v, a.v, c.head, column0, a.shape.V);
    ptx::cp_async_wait<0>();
    __syncthreads();
    solve_columns<1>(c, {v});
    wait_for_tile<kLines>();
    store_tile<kLines>(c, u + column0 * kChunk, v, padded - column0);
  }
}

/// Makes w alone. Factors of a chunk in which a decay grows may not fit their type: then gamma is
/// NaN, and so become the states.
template <class C>
__device__ void solve_w(const C& c, bool grows) {
  solve_columns<1>(c, {c.s.k});
  __syncwarp();
  store_tile<false>(c, c.tile_of(c.a.factors.w, kChunk * C::kK), c.s.k, C::kK);
  if (c.a.gate.gate_mode == GateMode::kLog && __syncthreads_or(grows) && c.tid == 0)
    c.a.factors.gamma[c.tile() * C::kK] = __uint_as_float(0x7fc00000u);
}

}  // namespace kda::cuda::intra
