// SPDX-License-Identifier: Apache-2.0
// The token form: diagonal blocks of 16 tokens pair by pair in fp32.
#pragma once

#include "cuda/staged/intra/blocks.cuh"

namespace kda::cuda::intra {

/// Stores decays, and the raw rows back in their place.
template <class C>
__device__ void token_operands(const C& c) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    *reinterpret_cast<float2*>(&c.s.decay[c.subchunk() * kSubchunk + i][c.channel()]) = c.decay[i];
    put(c, c.s.q + c.subchunk() * kSubchunk, i, c.q[i]);
    put(c, c.s.k + c.subchunk() * kSubchunk, i, c.k[i]);
  }
}

/// Token of half a warp in a pass: late and early rows of the blocks of 16 take turns, so that
/// every warp has as many pairs.
template <class C>
__device__ int token_of(const C& c, int pass) {
  const int slot = pass * C::kWarps + c.warp();
  const int row = slot / kBlock % 2 == 0 ? slot % kBlock : kBlock - 1 - slot % kBlock;
  return (slot / kBlock * 2 + c.lane() / 16) * kBlock + row;
}

/// This lane's channels of a row.
template <class C>
constexpr int kLaneChannels = C::kK / 16;
template <class C>
__device__ void load_channels(const C& c, const typename C::T* row, float (&x)[kLaneChannels<C>]) {
  using T = typename C::T;
#pragma unroll
  for (int i = 0; i < kLaneChannels<C>; i += 4) {
    const uint2 raw = *reinterpret_cast<const uint2*>(row + c.lane() % 16 * kLaneChannels<C> + i);
    const float2 low = ptx::unpack<T>(raw.x), high = ptx::unpack<T>(raw.y);
    x[i] = low.x, x[i + 1] = low.y, x[i + 2] = high.x, x[i + 3] = high.y;
  }
}

/// Pair by pair in fp32, from a token back to the start of its block; lane j of 16 keeps column j.
template <class C>
__device__ void token_products(const C& c, Accumulators<C>& scores) {
  constexpr int kCount = kLaneChannels<C>;
#pragma unroll
  for (int pass = 0; pass < Tasks<C>::kPasses; ++pass) {
    const int i = token_of(c, pass);
    float of_q[kCount], of_k[kCount], factor[kCount];
    load_channels(c, c.s.q[i], of_q);
    load_channels(c, c.s.k[i], of_k);
#pragma unroll
    for (int n = 0; n < kCount; ++n) factor[n] = 1;
#pragma unroll 1
    for (int j = i - 1; j >= i / kBlock * kBlock; --j) {
      const float* after = &c.s.decay[j + 1][c.lane() % 16 * kCount];
      float other[kCount], qk = 0, kk = 0;
      load_channels(c, c.s.k[j], other);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        factor[n] *= after[n];
        const float decayed = factor[n] * other[n];
        qk = fmaf(of_q[n], decayed, qk);
        kk = fmaf(of_k[n], decayed, kk);
      }
#pragma unroll
      for (int offset = 1; offset < 16; offset *= 2) {
        qk += __shfl_xor_sync(~0u, qk, offset);
        kk += __shfl_xor_sync(~0u, kk, offset);
      }
      if (c.lane() % 16 == j % kBlock) scores.token_q[pass] = qk, scores.token_k[pass] = kk;
    }
  }
}

template <class C>
__device__ void store_tokens(const C& c, const Accumulators<C>& scores) {
  auto& s = c.s;
#pragma unroll
  for (int pass = 0; pass < Tasks<C>::kPasses; ++pass) {
    const int i = token_of(c, pass), j = i / kBlock * kBlock + c.lane() % 16;
    if (j >= i) continue;
    s.after.Aqk[i][j] =
        static_cast<typename C::F>(scores.token_q[pass] * (s.q_norm[i] * s.k_norm[j]));
    s.after.N[i][j] = scores.token_k[pass] * (s.k_norm[i] * s.k_beta[j]);
  }
}

}  // namespace kda::cuda::intra
