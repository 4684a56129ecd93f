// SPDX-License-Identifier: Apache-2.0
// The token form: diagonal blocks of 16 tokens pair by pair in fp32.
#pragma once

#include "cuda/staged/intra/blocks.cuh"

namespace kda::cuda::intra {

template <class T, int kK>
struct Tokens : Blocks<T, kK> {
  using Base = Blocks<T, kK>;
  using Base::Base;
  using Base::channel;
  using Base::decay;
  using Base::k;
  using Base::kPasses;
  using Base::kWarps;
  using Base::lane;
  using Base::put;
  using Base::q;
  using Base::run;
  using Base::s;
  using Base::warp;
  using typename Base::Accumulators;

  /// Decays, and the raw rows back in their place.
  __device__ void token_operands() const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      *reinterpret_cast<float2*>(&s.decay[run() * kRun + i][channel()]) = decay[i];
      put(s.q + run() * kRun, i, q[i]);
      put(s.k + run() * kRun, i, k[i]);
    }
  }

  /// Token of half a warp in a pass: late and early rows of the blocks of 16 take turns, so that
  /// every warp has as many pairs.
  __device__ int token_of(int pass) const {
    const int slot = pass * kWarps + warp();
    const int row = slot / kBlock % 2 == 0 ? slot % kBlock : kBlock - 1 - slot % kBlock;
    return (slot / kBlock * 2 + lane() / 16) * kBlock + row;
  }

  /// This lane's channels of a row.
  static constexpr int kLaneChannels = kK / 16;
  __device__ void load_channels(const T* row, float (&x)[kLaneChannels]) const {
#pragma unroll
    for (int c = 0; c < kLaneChannels; c += 4) {
      const uint2 raw = *reinterpret_cast<const uint2*>(row + lane() % 16 * kLaneChannels + c);
      const float2 low = ptx::unpack<T>(raw.x), high = ptx::unpack<T>(raw.y);
      x[c] = low.x, x[c + 1] = low.y, x[c + 2] = high.x, x[c + 3] = high.y;
    }
  }

  /// Pair by pair in fp32, from a token back to the start of its block; lane j of 16 keeps column
  /// j.
  __device__ void token_products(Accumulators& scores) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = token_of(pass);
      float of_q[kLaneChannels], of_k[kLaneChannels], factor[kLaneChannels];
      load_channels(s.q[i], of_q);
      load_channels(s.k[i], of_k);
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) factor[c] = 1;
#pragma unroll 1
      for (int j = i - 1; j >= i / kBlock * kBlock; --j) {
        const float* after = &s.decay[j + 1][lane() % 16 * kLaneChannels];
        float other[kLaneChannels], qk = 0, kk = 0;
        load_channels(s.k[j], other);
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) {
          factor[c] *= after[c];
          const float decayed = factor[c] * other[c];
          qk = fmaf(of_q[c], decayed, qk);
          kk = fmaf(of_k[c], decayed, kk);
        }
#pragma unroll
        for (int offset = 1; offset < 16; offset *= 2) {
          qk += __shfl_xor_sync(~0u, qk, offset);
          kk += __shfl_xor_sync(~0u, kk, offset);
        }
        if (lane() % 16 == j % kBlock) scores.token_q[pass] = qk, scores.token_k[pass] = kk;
      }
    }
  }

  __device__ void store_tokens(const Accumulators& scores) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = token_of(pass), j = i / kBlock * kBlock + lane() % 16;
      if (j >= i) continue;
      s.after.Aqk[i][j] = static_cast<T>(scores.token_q[pass] * (s.q_norm[i] * s.k_norm[j]));
      s.after.N[i][j] = scores.token_k[pass] * (s.k_norm[i] * s.k_beta[j]);
    }
  }
};

}  // namespace kda::cuda::intra
