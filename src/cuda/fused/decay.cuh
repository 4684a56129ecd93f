// SPDX-License-Identifier: Apache-2.0
// Decays of a sub-chunk, and rows times decays. A thread has two channels and all tokens. "Factor"
// is the decay since the start of the sub-chunk times kScoreAnchor; gamma is the decay over all of
// it.
#pragma once

#include <type_traits>

#include "cuda/fused/producer_context.cuh"

namespace kda::cuda::sm90::fused {

/// Larger rates make errors of 2^-22 in logarithms count.
constexpr float kMostRate = 256;

/// log2(1 + x). lg2 is off by 2^-22 near 1: for small x that is much, and adds up over tokens.
__device__ __forceinline__ float log2_1p(float x) {
  const float series = x * fmaf(x, -kLog2e / 2, kLog2e);
  return x < 0x1p-8f ? series : ptx::lg2(1 + x);
}
/// log2(1 + exp2(x)).
__device__ __forceinline__ float softplus2(float x) {
  return fmaxf(x, 0) + log2_1p(ptx::ex2(-fabsf(x)));
}

/// Sets the constants of a head's gates. kBounded: a decay is exp2(1 / (bound - exp2(rate raw +
/// bias))). kSoftplus: it is (1 + exp2(log2(e) raw + bias))^rate.
template <class P>
__device__ void begin_gates(P& p, int64_t head) {
  const GateView& gate = p.a.gate;
  p.rate = expf(gate.A_log ? gate.A_log[head * gate.stride_A] : 0.0f);
  p.bias = {0, 0};
  if (gate.dt_bias) {
    const float* row = gate.dt_bias + head * gate.stride_dt + p.channel();
    p.bias = {row[0], row[1]};
  }
  p.bound = 0;
  if (P::kGateMode == GateMode::kSoftplus) {
    p.rate = -p.rate;
    multiply(p.bias, {kLog2e, kLog2e});
    if constexpr (P::kDyadicOnlyHeads) {
      constexpr float kFast = 108.0f / kSubchunk;  // powers of two a token
      const float fastest = fmaxf(softplus2(p.bias.x), softplus2(p.bias.y)) * -p.rate;
      const bool dyadic_only = fastest > kFast && p.rate <= -1 && p.rate >= -kMostRate;
      p.own.dyadic_only[p.warp()] = __any_sync(0xffffffff, dyadic_only);
    }
  }
  if (P::kGateMode == GateMode::kBounded) {
    p.rate *= -kLog2e;
    p.bound = 1 / (gate.lower_bound * kLog2e);
    const float scale = log2f(-p.bound);
    p.bias = {fmaf(p.bias.x, p.rate, scale), fmaf(p.bias.y, p.rate, scale)};
  }
}

template <class Item, class P>
__device__ void load_pairs_of_gates(const P& p, float2 (&gate)[kSubchunk]) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const unsigned pair = i * (P::kK / 2) + p.thread;
    if constexpr (std::is_same_v<Item, float>)
      gate[i] = reinterpret_cast<const float2*>(p.own.raw.g)[pair];
    else
      gate[i] = ptx::unpack<Item>(reinterpret_cast<const uint32_t*>(p.own.raw.g)[pair]);
  }
}
template <class P>
__device__ void load_gates(const P& p, float2 (&gate)[kSubchunk]) {
  if constexpr (P::kOneAHead)
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i)
      gate[i].x = gate[i].y = reinterpret_cast<const typename P::Gate*>(p.own.raw.g)[i];
  else if constexpr (!P::kAnyGate)
    load_pairs_of_gates<typename P::E>(p, gate);
  else if (p.a.g.type == Element::kFloat32)
    load_pairs_of_gates<float>(p, gate);
  else
    load_pairs_of_gates<__nv_bfloat16>(p, gate);
}

template <class P>
__device__ float decay_of(const P& p, float raw, float bias) {
  if constexpr (P::kGateMode == GateMode::kLog)
    return ptx::ex2(log2_decay_fast<P::kGateMode>(raw, 0, p.rate));
  if constexpr (P::kGateMode == GateMode::kSoftplus)
    return ptx::ex2(p.rate * softplus2(fmaf(raw, kLog2e, bias)));
  return ptx::ex2(ptx::rcp(p.bound - ptx::ex2(fmaf(raw, p.rate, bias))));
}
/// Puts decays of tokens in place of raw gates; 1 for tokens from `rows` on.
template <class P>
__device__ void make_decays(const P& p, float2 (&decay)[kSubchunk], int rows) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i)
    decay[i] = {decay_of(p, decay[i].x, p.bias.x), decay_of(p, decay[i].y, p.bias.y)};
  if (rows < kSubchunk)  // masked after the transform: gate(0) is not 0
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i)
      if (i >= rows) decay[i] = {1, 1};
}

// ---- factors of the anchored form

/// Puts factors in place of raw gates that are not softplus. Returns gamma.
template <class P>
__device__ float2 multiply_decays(const P& p, float2 (&factor)[kSubchunk], int rows) {
  constexpr float kAnchor = P::kScoreAnchor;
  make_decays(p, factor, rows);
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i)
    if (i > 0 || kAnchor != 1)
      multiply(factor[i], i > 0 ? factor[i - 1] : float2{kAnchor, kAnchor});
  const float2 total = factor[kSubchunk - 1];
  return {total.x * (1 / kAnchor), total.y * (1 / kAnchor)};
}
/// The argument of softplus2() for a raw gate.
template <class P>
__device__ float2 exponents_of(const P& p, float2 raw) {
  return {fmaf(raw.x, kLog2e, p.bias.x), fmaf(raw.y, kLog2e, p.bias.y)};
}
/// Puts exp(raw + bias) in place of raw softplus gates.
template <class P>
__device__ void powers_of(const P& p, float2 (&x)[kSubchunk], int rows) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const float2 exponent = exponents_of(p, x[i]);
    x[i] = {ptx::ex2(exponent.x), ptx::ex2(exponent.y)};
  }
  if (rows < kSubchunk)
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i)
      if (i >= rows) x[i] = {0, 0};
}
/// product *= 1 + x.
__device__ __forceinline__ void multiply_1p(float2& product, float2 x) {
  product.x = fmaf(product.x, x.x, product.x), product.y = fmaf(product.y, x.y, product.y);
}
/// The factors from log2 of products of 1 + x: products to the power of rate, times the anchor.
template <class P>
__device__ float2 factor_of_logs(const P& p, float2 x) {
  return {ptx::ex2(fmaf(x.x, p.rate, P::kLogAnchor)), ptx::ex2(fmaf(x.y, p.rate, P::kLogAnchor))};
}
/// Puts factors in place of softplus gates of any size. Rows up to where products leave fp32 are
/// those of multiply_powers(): no later token changes their bits. Returns gamma from the sums: out
/// of the last factor, with the anchor's logarithm, slow channels would lose bits that add up.
template <class P>
__device__ float2 add_logs(const P& p, float2 (&factor)[kSubchunk], int rows) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) factor[i] = exponents_of(p, factor[i]);
  if (rows < kSubchunk)
#pragma unroll
    for (int i = 0; i < kSubchunk; ++i)
      if (i >= rows) factor[i] = {-INFINITY, -INFINITY};
  float2 sum{0, 0}, product{1, 1};
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const float2 x = factor[i];
    sum.x += softplus2(x.x), sum.y += softplus2(x.y);
    float2 log = sum;
    if constexpr (kFp16<typename P::Operand>) {
      multiply_1p(product, {ptx::ex2(x.x), ptx::ex2(x.y)});
      if (product.x < INFINITY && p.rate >= -kMostRate) log.x = ptx::lg2(product.x);
      if (product.y < INFINITY && p.rate >= -kMostRate) log.y = ptx::lg2(product.y);
    }
    factor[i] = factor_of_logs(p, log);
  }
  return {ptx::ex2(sum.x * p.rate), ptx::ex2(sum.y * p.rate)};
}
template <class P>
__device__ bool in_range(float2 x) {
  return x.x >= P::kLeast && x.y >= P::kLeast;
}
/// Compares by bits; else the compiler keeps comparisons for it, and there are seven predicates.
template <class P>
__device__ bool in_range_bits(float2 x) {
  return __float_as_uint(x.x) >= __float_as_uint(P::kLeast) &&
         __float_as_uint(x.y) >= __float_as_uint(P::kLeast);
}
/// Does what add_logs() does, from logarithms of products, which are off by 2^-22 where they are
/// small. Products may leave fp32, and large rates make that error large: then own.needs_rescale is
/// set, and the sub-chunk is made again.
template <class P>
__device__ float2 multiply_powers(const P& p, float2 (&factor)[kSubchunk], int rows) {
  powers_of(p, factor, rows);
  // Slow channels need every bit of gamma: `above` is what the product is above 1.
  float2 product{1, 1}, above{0, 0};
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const float2 x = factor[i];
    above.x += fmaf(above.x, x.x, x.x), above.y += fmaf(above.y, x.y, x.y);
    multiply_1p(product, x);
    factor[i] = factor_of_logs(p, {ptx::lg2(product.x), ptx::lg2(product.y)});
  }
  // An infinite product takes its row out of range: it is asked for only there.
  if (!(above.x + above.y < INFINITY) || p.rate < -kMostRate)
    p.own.needs_rescale = 1;
  else if (!in_range<P>(factor[kSubchunk - 1]) && !(product.x + product.y < INFINITY))
    p.own.needs_rescale = 1;
  return {ptx::ex2(log2_1p(above.x) * p.rate), ptx::ex2(log2_1p(above.y) * p.rate)};
}

/// Puts factors in place of raw gates, and counts rows in range into own.num_anchored. Returns
/// gamma. kAny: softplus gates may be of any size.
template <bool kAny, class P>
__device__ float2 scan_decays(const P& p, float2 (&factor)[kSubchunk], int rows) {
  float2 gamma;
  if constexpr (P::kGateMode != GateMode::kSoftplus)
    gamma = multiply_decays(p, factor, rows);
  else if constexpr (kAny || !kFp16<typename P::Operand>)
    gamma = add_logs(p, factor, rows);
  else
    gamma = multiply_powers(p, factor, rows);
  // Gates that come as logarithms may be positive: the last row may be in range when others are
  // not.
  bool all = true;
#pragma unroll
  for (int i = P::kGateMode == GateMode::kLog ? 0 : kSubchunk - 1; i < kSubchunk; ++i)
    all = all && in_range<P>(factor[i]);
  if (all) return gamma;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i)
    if (count == i && in_range_bits<P>(factor[i])) count = i + 1;
  atomicMin(&p.own.num_anchored, count);
  return gamma;
}

// ---- decays of tokens, for dyadic levels

/// Puts decays of tokens in place of raw gates of a dyadic-only head, whose rate is 1 to kMostRate.
/// Returns gamma.
template <class P>
__device__ float2 decays_of_fast_head(const P& p, float2 (&decay)[kSubchunk], int rows) {
  powers_of(p, decay, rows);
  float2 above{0, 0};
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const float2 x = decay[i];
    above.x += fmaf(above.x, x.x, x.x), above.y += fmaf(above.y, x.y, x.y);
    decay[i] = {ptx::ex2(ptx::lg2(1 + x.x) * p.rate), ptx::ex2(ptx::lg2(1 + x.y) * p.rate)};
  }
  const auto gamma = [&](float x) {  // x may be infinite, or NaN (infinity times 0): gamma is 0
    return x < INFINITY ? ptx::ex2(log2_1p(x) * p.rate) : 0.0f;
  };
  return {gamma(above.x), gamma(above.y)};
}
/// Puts decays of tokens in place of softplus gates of any size. Returns gamma from the sum of
/// logarithms: slow channels need every bit of it.
template <class P>
__device__ float2 add_logs_of_tokens(const P& p, float2 (&decay)[kSubchunk], int rows) {
  float2 sum{0, 0};
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const float2 exponent = exponents_of(p, decay[i]);
    float2 log{softplus2(exponent.x), softplus2(exponent.y)};
    if (i >= rows) log = {0, 0};
    sum.x += log.x, sum.y += log.y;
    decay[i] = {ptx::ex2(log.x * p.rate), ptx::ex2(log.y * p.rate)};
  }
  return {ptx::ex2(sum.x * p.rate), ptx::ex2(sum.y * p.rate)};
}
/// Puts decays of tokens in place of raw gates, in a kernel that has dyadic levels alone. Returns
/// gamma.
template <class P>
__device__ float2 decays_of_tokens(const P& p, float2 (&decay)[kSubchunk], int rows) {
  if constexpr (P::kGateMode == GateMode::kSoftplus) return add_logs_of_tokens(p, decay, rows);
  make_decays(p, decay, rows);
  float2 total = decay[0];
#pragma unroll
  for (int i = 1; i < kSubchunk; ++i) multiply(total, decay[i]);
  return total;
}

// ---- decayed rows

template <class P>
__device__ uint32_t operand(float2 x) {
  return ptx::pack<typename P::Operand>(x.x, x.y);
}
/// The operand of a row that was made for scores: with kAnchor in place of kScoreAnchor.
template <class P>
__device__ uint32_t row_operand(float2 x) {
  constexpr float kBack = P::kAnchor / P::kScoreAnchor;
  return kBack == 1 ? operand<P>(x) : operand<P>({x.x * kBack, x.y * kBack});
}
/// Loads q and k of this thread's channels.
template <class P>
__device__ void load_pairs(const P& p, Pairs& q, Pairs& k) {
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    q[i] = *reinterpret_cast<const uint32_t*>(&p.own.raw.q[i][p.channel() ^ i % 8 * 8]);
    k[i] = *reinterpret_cast<const uint32_t*>(&p.own.raw.k[i][p.channel() ^ i % 8 * 8]);
  }
}
template <class P>
__device__ void put_gamma(const P& p, const PipeStage<P::kK>& s, float2 gamma) {
  *reinterpret_cast<float2*>(&s.factors.gamma[gamma_place<P::kK>(p.channel())]) = gamma;
}
/// Stores rows and kg of the stage, and rows and columns of scores. Everything is read before
/// anything is stored: the compiler keeps their order.
template <class P>
__device__ void put_rows(const P& p, const PipeStage<P::kK>& s, const float2 (&factor)[kSubchunk],
                         float2 gamma, const Pairs& q_pairs, const Pairs& k_pairs) {
  using T = typename P::T;
  const float2 total = factor[kSubchunk - 1];
  const uint32_t to_rows = swizzled_channels<2 * kSubchunk>(p, s.tiles.rows),
                 to_kg = swizzled_channels<kSubchunk>(p, s.tiles.kg),
                 to_columns = ptx::shared_address(&p.own.columns[0][p.channel()]);
  uint32_t to_q = 0, to_k = 0;
  if constexpr (kFp16<typename P::Operand>)
    to_q = swizzled_channels<kSubchunk>(p, p.own.scratch.q),
    to_k = swizzled_channels<kSubchunk>(p, p.own.scratch.k);
#pragma unroll
  for (int i = 0; i < kSubchunk; ++i) {
    const float2 k = ptx::unpack<T>(k_pairs[i]);
    const float2 k_row = product(k, factor[i]),
                 q_row = product(ptx::unpack<T>(q_pairs[i]), factor[i]);
    put_swizzled(to_rows, i, row_operand<P>(k_row));
    put_swizzled(to_rows, kSubchunk + i, row_operand<P>(q_row));
    if constexpr (kFp16<typename P::Operand>) {
      put_swizzled(to_k, i, ptx::pack<T>(k_row.x, k_row.y));
      put_swizzled(to_q, i, ptx::pack<T>(q_row.x, q_row.y));
    }
    const float2 column{k.x * ptx::rcp(factor[i].x), k.y * ptx::rcp(factor[i].y)};
    ptx::st_shared(to_columns + i * kStride<P::kK> * 2, ptx::pack<T>(column.x, column.y));
    put_swizzled(to_kg, i, operand<P>(product(column, total)));
  }
  put_gamma(p, s, gamma);
}
/// Stores kg where rows are out of range, from k as operands; and gamma, but for softplus gates,
/// whose logarithms have made it.
template <class P>
__device__ void put_kg(const P& p, const PipeStage<P::kK>& s, const float2 (&decay)[kSubchunk],
                       const Pairs& k) {
  const uint32_t to_kg = swizzled_channels<kSubchunk>(p, s.tiles.kg);
  float2 factor{1, 1};
#pragma unroll
  for (int i = kSubchunk - 1; i >= 0; --i) {
    put_swizzled(to_kg, i, operand<P>(product(ptx::unpack<typename P::Operand>(k[i]), factor)));
    multiply(factor, decay[i]);
  }
  if constexpr (P::kGateMode != GateMode::kSoftplus) put_gamma(p, s, factor);
}

}  // namespace kda::cuda::sm90::fused
