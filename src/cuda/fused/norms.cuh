// SPDX-License-Identifier: Apache-2.0
// Norms of q and k, beta, and the diagonal of the scores: one value a token.
#pragma once

#include <type_traits>

#include "cuda/fused/producer_context.cuh"

namespace kda::cuda::sm90::fused {

/// Diagonals of [q; k] k^T and q q^T for 8 tokens, in two sums each: shorter chains of additions.
struct Squares {
  float with_k[2][4] = {}, with_q[2][4] = {};
};
/// Factors of a token, in the lane of four that has_norms().
struct Norms {
  float q, k, beta, diag;
};

template <class P>
__device__ void add_squares(const P& p, Squares& sum, int eight) {
  const Bits(*half)[P::kK] = p.lane() % 16 < 8 ? p.own.raw.q : p.own.raw.k;
  const uint32_t from = ptx::shared_address(
      &half[(p.warp() + eight) * 8 + p.lane() % 8][(p.lane() / 16 ^ p.lane() % 8) * 8]);
#pragma unroll
  for (int step = 0; step < P::kK / 16; ++step) {
    uint32_t x[4];  // q and k of 8 channels, then of the next 8
    ptx::ldmatrix_x4(x, (from ^ step % 4 * 32) + step / 4 * 128);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_1688<typename P::T>(sum.with_k[i], x[2 * i], x[2 * i + 1], x[2 * i + 1]);
      ptx::mma_1688<typename P::T>(sum.with_q[i], x[2 * i], x[2 * i + 1], x[2 * i]);
    }
  }
}
template <class P>
__device__ void add_squares(const P& p, Squares (&sums)[P::kEights]) {
#pragma unroll
  for (int i = 0; i < P::kEights; ++i) add_squares(p, sums[i], i);
}

/// beta_value() with the fast units.
template <class P>
__device__ float beta_of(const P& p, float raw) {
  if (p.a.gate.beta_mode == BetaMode::kPlain) return raw;
  const float x = ptx::rcp(1 + ptx::ex2(-kLog2e * raw));
  return p.a.gate.beta_mode == BetaMode::kSigmoid2 ? 2 * x : x;
}
/// With operands in fp16, rows of q and k are operands as they came if |k| is 1/2 to 2^8 and |q| is
/// 2^-6 to 2^7: those of layers are, and vectors that are normalised already. A sub-chunk with
/// others is made again, with q and k of those tokens times a power of two: other tokens keep their
/// bits. `norm`, here and below, is what Factors has: 1 / |q| or 1 / |k|.
__device__ __forceinline__ bool fits(float x, float least, float most) {
  return x >= least && x <= most;
}
__device__ __forceinline__ bool q_fits(float norm) { return fits(norm, 0x1p-7f, 0x1p6f); }
__device__ __forceinline__ bool k_fits(float norm) { return fits(norm, 0x1p-8f, 2); }

template <class P>
__device__ Norms norms_of(const P& p, const Squares& squares, int eight, int rows,
                          uint32_t raw_beta) {
  const bool odd = p.lane() / 4 % 2;
  const auto sum = [&](const float(&x)[2][4], int i) {
    return odd ? x[0][i + 1] + x[1][i + 1] : x[0][i] + x[1][i];
  };
  const float beta =
      p.norm_row(eight) < rows ? beta_of(p, float_of(raw_beta, p.a.beta.type)) : 0.0f;
  const float q_sum = sum(squares.with_q, 0), k_sum = sum(squares.with_k, 2);
  const float q_norm = p.a.gate.l2norm ? ptx::rsqrt_approx(q_sum + 1e-6f) : 1.0f;
  float k_norm = p.a.gate.l2norm ? ptx::rsqrt_approx(k_sum + 1e-6f) : 1.0f;
  if constexpr (kFp16<typename P::Operand>) {
    if (k_sum == 0) k_norm = 0;  // else 1000: k_beta times errors may leave fp16, times 0 then NaN
    const bool fit = (q_sum == 0 || q_fits(q_norm)) && (k_sum == 0 || k_fits(k_norm));
    if (p.has_norms() && !fit) p.own.needs_rescale = 1;
  }
  return {q_norm, k_norm, beta, sum(squares.with_k, 0)};
}
template <class P>
__device__ void find_norms(const P& p, Norms (&norms)[P::kEights],
                           const Squares (&squares)[P::kEights], int rows,
                           const uint32_t (&raw_beta)[P::kEights]) {
#pragma unroll
  for (int i = 0; i < P::kEights; ++i) norms[i] = norms_of(p, squares[i], i, rows, raw_beta[i]);
}
template <class P>
__device__ void put_norms(const P& p, const PipeStage<P::kK>& s, const Norms (&norms)[P::kEights]) {
  if (!p.has_norms()) return;
  Factors<P::kK>& f = s.factors;
#pragma unroll
  for (int i = 0; i < P::kEights; ++i) {
    const Norms& n = norms[i];
    const unsigned row = token_place(p.norm_row(i));
    f.q_norm[row] = n.q * (p.a.gate.scale / P::kAnchor);
    f.k_norm[row] = n.k * (1 / P::kAnchor);
    f.k_beta[row] = n.k * n.beta;
    f.diag[row] = n.diag * P::kAnchor;
  }
}

// ---- powers of two out of norms

/// Moves a power of two out of a norm that does not fit, and returns its bits; else those of 1.
__device__ __forceinline__ uint32_t split_power(float& norm, bool fit) {
  const uint32_t bits = __float_as_uint(norm), kOne = 0x3f800000;
  if (fit || norm == 0) return kOne;
  norm = __uint_as_float(bits & 0x7fffff | kOne);
  return bits & 0x7f800000;
}
/// Does so for this lane's tokens, and stores the powers for all threads of the group.
template <class P>
__device__ void split_powers(const P& p, Norms (&norms)[P::kEights]) {
#pragma unroll
  for (int i = 0; i < P::kEights; ++i) {
    Norms& n = norms[i];
    const uint32_t q = split_power(n.q, q_fits(n.q)), k = split_power(n.k, k_fits(n.k));
    n.diag *= __uint_as_float(q) * __uint_as_float(k);
    if (!p.has_norms()) continue;
    p.own.power.q[p.norm_row(i)] = q | q >> 16;
    p.own.power.k[p.norm_row(i)] = k | k >> 16;
  }
}
template <class P>
__device__ void multiply_by(const uint32_t (&power)[kSubchunk], Pairs& x) {
  using T = typename P::T;
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    if constexpr (std::is_same_v<T, __half>) {  // a power may be none of fp16's
      const float by = __uint_as_float(power[i] & 0xffff0000);
      const float2 y = ptx::unpack<T>(x[i]);
      x[i] = ptx::pack<typename P::Operand>(y.x * by, y.y * by);
    } else {
      x[i] = ptx::mul_x2<T>(x[i], power[i]);
    }
  }
}

}  // namespace kda::cuda::sm90::fused
