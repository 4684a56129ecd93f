// SPDX-License-Identifier: Apache-2.0
// Decays, decayed rows and norms of a run. A thread has two channels and all tokens.
#pragma once

#include <type_traits>

#include "cuda/fused/global_io.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace kda::cuda::sm90::fused {

template <int kK, class Operand, class E, int kGateMode, bool kSegments>
struct Rows : Moves<kK, Operand, E, kSegments> {
  using Base = Moves<kK, Operand, E, kSegments>;
  using Base::a;
  using Base::Base;
  using Base::kEights;
  using Base::lane;
  using Base::norm_row;
  using Base::own;
  using Base::thread;
  using Base::warp;
  using typename Base::Betas;
  using T = InputOf<E>;
  using typename Base::Stage;

  /// With the constants of their formulas. Gate mode 2: a decay is
  /// exp2(1 / (bound - exp2(rate raw + bias))); gate mode 1: (1 + exp2(log2(e) raw + bias))^rate.
  float2 bias;
  float rate, bound;

  __device__ void begin(const Part& part, int run) {
    Base::begin(part, run);
    const int64_t head = part.head;
    rate = expf(a.gate.A_log ? a.gate.A_log[head * a.gate.stride_A] : 0.0f);
    bias = {0, 0};
    if (a.gate.dt_bias) {
      const float* row = a.gate.dt_bias + head * a.gate.stride_dt + channel();
      bias = {row[0], row[1]};
    }
    bound = 0;
    if (kGateMode == 1) {
      rate = -rate;
      multiply(bias, {kLog2e, kLog2e});
      if constexpr (kDeepHeads) {
        const float deepest = fmaxf(softplus(bias.x), softplus(bias.y)) * -rate;
        const bool deep = deepest > kDeep && rate <= -1 && rate >= -kMostRate;
        own.deep[warp()] = __any_sync(0xffffffff, deep);
      }
    }
    if (kGateMode == 2) {
      rate *= -kLog2e;
      bound = 1 / (a.gate.lower_bound * kLog2e);
      const float scale = log2f(-bound);
      bias = {fmaf(bias.x, rate, scale), fmaf(bias.y, rate, scale)};
    }
  }

  /// Rows of the anchored form span more powers of two than fp16 (with inputs in bf16 they are
  /// bf16). And with softplus gates a maker of one warp would have both forms to make.
  static constexpr bool kLevelsAlone =
      std::is_same_v<T, __half> || (kK == 64 && kHalf<Operand> && kGateMode == 1);
  /// Of heads whose gates take some channel half through the range in a run, at raw gates of 0:
  /// most of their runs would leave it. Powers of two a token.
  static constexpr bool kDeepHeads = kHalf<Operand> && kGateMode == 1 && !kLevelsAlone;
  static constexpr float kDeep = 108.0f / kRun;

  __device__ unsigned channel() const { return thread * 2; }
  __device__ static void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }
  static constexpr float kAnchor = fused::kAnchor<Operand>, kLeast = fused::kLeast<Operand>,
                         kScoreAnchor = fused::kScoreAnchor<Operand, kGateMode>,
                         kLogAnchor = fused::kLogScoreAnchor<Operand, kGateMode>;
  __device__ static bool in_range(float2 x) { return x.x >= kLeast && x.y >= kLeast; }
  /// The same; else comparisons are kept for it, and there are seven predicates.
  __device__ static bool in_range_bits(float2 x) {
    return __float_as_uint(x.x) >= __float_as_uint(kLeast) &&
           __float_as_uint(x.y) >= __float_as_uint(kLeast);
  }
  __device__ static float2 product(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
  __device__ static uint32_t operand(float2 x) { return ptx::pack<Operand>(x.x, x.y); }
  /// Of a row that makes scores.
  __device__ static uint32_t row_operand(float2 x) {
    constexpr float kBack = kAnchor / kScoreAnchor;
    return kBack == 1 ? operand(x) : operand({x.x * kBack, x.y * kBack});
  }
  using Pairs = uint32_t[kRun];  // of this thread's channels
  __device__ void load_pairs(Pairs& q, Pairs& k) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      q[i] = *reinterpret_cast<const uint32_t*>(&own.raw.q[i][channel() ^ i % 8 * 8]);
      k[i] = *reinterpret_cast<const uint32_t*>(&own.raw.k[i][channel() ^ i % 8 * 8]);
    }
  }

  // ---- decays ----------------------------------------------------------------------------------

  __device__ float decay_of(float raw, float of_channel) const {
    if constexpr (kGateMode == 0) return ptx::ex2(log2_decay_fast<kGateMode>(raw, 0, rate));
    if constexpr (kGateMode == 1) return ptx::ex2(rate * softplus(fmaf(raw, kLog2e, of_channel)));
    return ptx::ex2(ptx::rcp(bound - ptx::ex2(fmaf(raw, rate, of_channel))));
  }
  /// log2(1 + x). The unit's error is 2^-22 near 1: of what is small, a part that would add up.
  __device__ static float log2_1p(float x) {
    const float series = x * fmaf(x, -kLog2e / 2, kLog2e);
    return x < 0x1p-8f ? series : ptx::lg2(1 + x);
  }
  /// log2(1 + exp2(x)).
  __device__ static float softplus(float x) { return fmaxf(x, 0) + log2_1p(ptx::ex2(-fabsf(x))); }
  __device__ void load_gates(float2 (&gate)[kRun]) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if constexpr (std::is_same_v<E, float>)
        gate[i] = reinterpret_cast<const float2*>(own.raw.g)[i * (kK / 2) + thread];
      else
        gate[i] =
            ptx::unpack<E>(reinterpret_cast<const uint32_t*>(own.raw.g)[i * (kK / 2) + thread]);
    }
  }
  /// In place of raw gates.
  __device__ void make_decays(float2 (&decay)[kRun], int rows) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      decay[i] = {decay_of(decay[i].x, bias.x), decay_of(decay[i].y, bias.y)};
    if (rows < kRun)  // masked after the transform: gate(0) is not 0
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i >= rows) decay[i] = {1, 1};
  }
  /// In place of raw gates: decays since the start of the run, times kScoreAnchor. Returns that of
  /// the run, without. kAny: gates may be of any size.
  template <bool kAny>
  __device__ float2 scan_decays(float2 (&factor)[kRun], int rows) const {
    float2 gamma;
    if constexpr (kGateMode != 1)
      gamma = multiply_decays(factor, rows);
    else if constexpr (kAny || !kHalf<Operand>)
      gamma = add_logs(factor, rows);
    else
      gamma = multiply_powers(factor, rows);
    // Gates that come as logarithms may be positive: the last row may be in range when others are
    // not.
    bool all = true;
#pragma unroll
    for (int i = kGateMode == 0 ? 0 : kRun - 1; i < kRun; ++i) all = all && in_range(factor[i]);
    if (all) return gamma;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (count == i && in_range_bits(factor[i])) count = i + 1;
    atomicMin(&own.anchored, count);
    return gamma;
  }
  __device__ float2 multiply_decays(float2 (&factor)[kRun], int rows) const {
    make_decays(factor, rows);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (i > 0 || kScoreAnchor != 1)
        multiply(factor[i], i > 0 ? factor[i - 1] : float2{kScoreAnchor, kScoreAnchor});
    const float2 total = factor[kRun - 1];
    return {total.x * (1 / kScoreAnchor), total.y * (1 / kScoreAnchor)};
  }
  /// Of softplus gates: log2(e) times what softplus() is taken of, as it comes.
  __device__ float2 exponents_of(float2 raw) const {
    return {fmaf(raw.x, kLog2e, bias.x), fmaf(raw.y, kLog2e, bias.y)};
  }
  /// In place of raw gates: exp(raw + bias).
  __device__ void powers_of(float2 (&x)[kRun], int rows) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 exponent = exponents_of(x[i]);
      x[i] = {ptx::ex2(exponent.x), ptx::ex2(exponent.y)};
    }
    if (rows < kRun)
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i >= rows) x[i] = {0, 0};
  }
  /// By 1 + x.
  __device__ static void multiply_more(float2& product, float2 x) {
    product.x = fmaf(product.x, x.x, product.x), product.y = fmaf(product.y, x.y, product.y);
  }
  /// Anchored, from the logarithm of its base.
  __device__ float2 decay_of_logs(float2 x) const {
    return {ptx::ex2(fmaf(x.x, rate, kLogAnchor)), ptx::ex2(fmaf(x.y, rate, kLogAnchor))};
  }
  /// Of gates of any size. Rows up to where products leave fp32 are those of multiply_powers(): no
  /// later token changes their bits. Next to the anchor's logarithm the sums of slow channels would
  /// lose what adds up over runs.
  __device__ float2 add_logs(float2 (&factor)[kRun], int rows) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) factor[i] = exponents_of(factor[i]);
    if (rows < kRun)
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i >= rows) factor[i] = {-INFINITY, -INFINITY};
    float2 sum{0, 0}, product{1, 1};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 x = factor[i];
      sum.x += softplus(x.x), sum.y += softplus(x.y);
      float2 log = sum;
      if constexpr (kHalf<Operand>) {
        multiply_more(product, {ptx::ex2(x.x), ptx::ex2(x.y)});
        if (product.x < INFINITY && rate >= -kMostRate) log.x = ptx::lg2(product.x);
        if (product.y < INFINITY && rate >= -kMostRate) log.y = ptx::lg2(product.y);
      }
      factor[i] = decay_of_logs(log);
    }
    return {ptx::ex2(sum.x * rate), ptx::ex2(sum.y * rate)};
  }
  /// Logarithms of products, off by 2^-22 where they are small. Products may leave fp32, and rates
  /// make that error large: the run is made again then.
  static constexpr float kMostRate = 256;
  __device__ float2 multiply_powers(float2 (&factor)[kRun], int rows) const {
    powers_of(factor, rows);
    // Of what a run decays by, slow channels need every bit: what the product is above 1.
    float2 product{1, 1}, above{0, 0};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 x = factor[i];
      above.x += fmaf(above.x, x.x, x.x), above.y += fmaf(above.y, x.y, x.y);
      multiply_more(product, x);
      factor[i] = decay_of_logs({ptx::lg2(product.x), ptx::lg2(product.y)});
    }
    // An infinite product takes its row out of range: asked for only there.
    if (!(above.x + above.y < INFINITY) || rate < -kMostRate)
      own.unusual = 1;
    else if (!in_range(factor[kRun - 1]) && !(product.x + product.y < INFINITY))
      own.unusual = 1;
    return {ptx::ex2(log2_1p(above.x) * rate), ptx::ex2(log2_1p(above.y) * rate)};
  }

  /// In place of raw gates of a head that forgets fast, whose rate is 1 to kMostRate: decays of
  /// tokens. Returns that of the run.
  __device__ float2 decays_of_deep(float2 (&decay)[kRun], int rows) const {
    powers_of(decay, rows);
    float2 above{0, 0};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 x = decay[i];
      above.x += fmaf(above.x, x.x, x.x), above.y += fmaf(above.y, x.y, x.y);
      decay[i] = {ptx::ex2(ptx::lg2(1 + x.x) * rate), ptx::ex2(ptx::lg2(1 + x.y) * rate)};
    }
    const auto of_run = [&](float x) {  // infinite, or infinity times 0: below fp32's least
      return x < INFINITY ? ptx::ex2(log2_1p(x) * rate) : 0.0f;
    };
    return {of_run(above.x), of_run(above.y)};
  }

  /// In place of raw gates of a kernel that has levels alone: decays of tokens. Returns that of the
  /// run: of softplus gates from the sum of logarithms, since slow channels need every bit of it.
  __device__ float2 decays_of_levels(float2 (&decay)[kRun], int rows) const {
    if constexpr (kGateMode == 1) return add_logs_of_levels(decay, rows);
    make_decays(decay, rows);
    float2 total = decay[0];
#pragma unroll
    for (int i = 1; i < kRun; ++i) multiply(total, decay[i]);
    return total;
  }
  __device__ float2 add_logs_of_levels(float2 (&decay)[kRun], int rows) const {
    float2 sum{0, 0};
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 exponent = exponents_of(decay[i]);
      float2 log{softplus(exponent.x), softplus(exponent.y)};
      if (i >= rows) log = {0, 0};
      sum.x += log.x, sum.y += log.y;
      decay[i] = {ptx::ex2(log.x * rate), ptx::ex2(log.y * rate)};
    }
    return {ptx::ex2(sum.x * rate), ptx::ex2(sum.y * rate)};
  }

  // ---- decayed rows ----------------------------------------------------------------------------

  /// Where this thread's channels lie in row 0 of a swizzled tile of kRows rows, and a pair of row
  /// i.
  template <int kRows, class Item>
  __device__ uint32_t place(const Item* tile) const {
    return ptx::shared_address(tile + channel() / 64 * kRows * 64 + channel() % 64);
  }
  __device__ static void put(uint32_t place, int i, uint32_t pair) {
    ptx::st_shared((place ^ i % 8 * 16) + i * 128, pair);
  }
  __device__ void put_gamma(const Stage& s, float2 gamma) const {
    *reinterpret_cast<float2*>(&s.factors.gamma[gamma_place<kK>(channel())]) = gamma;
  }

  /// All is read before anything is stored: the compiler keeps their order.
  __device__ void put_rows(const Stage& s, const float2 (&factor)[kRun], float2 gamma,
                           const Pairs& q_pairs, const Pairs& k_pairs) const {
    const float2 total = factor[kRun - 1];
    const uint32_t of_rows = place<2 * kRun>(s.tiles.rows), of_kg = place<kRun>(s.tiles.kg),
                   of_columns = ptx::shared_address(&own.columns[0][channel()]);
    uint32_t of_q = 0, of_k = 0;
    if constexpr (kHalf<Operand>)
      of_q = place<kRun>(own.scratch.q), of_k = place<kRun>(own.scratch.k);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 k = ptx::unpack<T>(k_pairs[i]);
      const float2 k_row = product(k, factor[i]),
                   q_row = product(ptx::unpack<T>(q_pairs[i]), factor[i]);
      put(of_rows, i, row_operand(k_row));
      put(of_rows, kRun + i, row_operand(q_row));
      if constexpr (kHalf<Operand>) {
        put(of_k, i, ptx::pack<T>(k_row.x, k_row.y));
        put(of_q, i, ptx::pack<T>(q_row.x, q_row.y));
      }
      const float2 column{k.x * ptx::rcp(factor[i].x), k.y * ptx::rcp(factor[i].y)};
      ptx::st_shared(of_columns + i * kStride<kK> * 2, ptx::pack<T>(column.x, column.y));
      put(of_kg, i, operand(product(column, total)));
    }
    put_gamma(s, gamma);
  }
  /// kg where rows are out of range; k as operands. And gamma, but of softplus gates, whose
  /// logarithms have made it.
  __device__ void put_kg(const Stage& s, const float2 (&decay)[kRun], const Pairs& k) const {
    const uint32_t of_kg = place<kRun>(s.tiles.kg);
    float2 factor{1, 1};
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      put(of_kg, i, operand(product(ptx::unpack<Operand>(k[i]), factor)));
      multiply(factor, decay[i]);
    }
    if constexpr (kGateMode != 1) put_gamma(s, factor);
  }

  // ---- norms -----------------------------------------------------------------------------------

  /// beta_value() with the fast units.
  __device__ float beta_of(float raw) const {
    if (a.gate.beta_mode == 0) return raw;
    const float x = ptx::rcp(1 + ptx::ex2(-kLog2e * raw));
    return a.gate.beta_mode == 2 ? 2 * x : x;
  }
  /// Diagonals of [q; k] k^T and q q^T for 8 tokens, in two sums each: shorter chains.
  struct Squares {
    float with_k[2][4] = {}, with_q[2][4] = {};
  };
  using AllSquares = Squares[kEights];  // of a warp
  __device__ void add_squares(AllSquares& sums) const {
#pragma unroll
    for (int i = 0; i < kEights; ++i) add_squares(sums[i], i);
  }
  __device__ void add_squares(Squares& sum, int eight) const {
    const Bits(*of)[kK] = lane() % 16 < 8 ? own.raw.q : own.raw.k;
    const uint32_t from =
        ptx::shared_address(&of[(warp() + eight) * 8 + lane() % 8][(lane() / 16 ^ lane() % 8) * 8]);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      uint32_t x[4];  // q and k of 8 channels, then of the next 8
      ptx::ldmatrix_x4(x, (from ^ step % 4 * 32) + step / 4 * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_1688<T>(sum.with_k[i], x[2 * i], x[2 * i + 1], x[2 * i + 1]);
        ptx::mma_1688<T>(sum.with_q[i], x[2 * i], x[2 * i + 1], x[2 * i]);
      }
    }
  }
  /// Of one lane of four: factors of its token.
  struct Norms {
    float q, k, beta, diag;
  };
  using AllNorms = Norms[kEights];  // of a lane
  __device__ void find_norms(AllNorms& norms, const AllSquares& squares, int rows,
                             const Betas& raw_beta) const {
#pragma unroll
    for (int i = 0; i < kEights; ++i) norms[i] = norms_of(squares[i], i, rows, raw_beta[i]);
  }
  __device__ Norms norms_of(const Squares& squares, int eight, int rows, uint32_t raw_beta) const {
    const bool odd = lane() / 4 % 2;
    const auto sum = [&](const float(&x)[2][4], int i) {
      return odd ? x[0][i + 1] + x[1][i + 1] : x[0][i] + x[1][i];
    };
    const float beta = norm_row(eight) < rows ? beta_of(float_of(raw_beta, a.beta.type)) : 0.0f;
    const float q_sum = sum(squares.with_q, 0), k_sum = sum(squares.with_k, 2);
    const float q_norm = a.gate.l2norm ? ptx::rsqrt_approx(q_sum + 1e-6f) : 1.0f;
    float k_norm = a.gate.l2norm ? ptx::rsqrt_approx(k_sum + 1e-6f) : 1.0f;
    if constexpr (kHalf<Operand>) {
      if (k_sum == 0) k_norm = 0;  // nothing times what may leave fp16
      const bool fit = (q_sum == 0 || q_fits(q_norm)) && (k_sum == 0 || k_fits(k_norm));
      if (has_norms() && !fit) own.unusual = 1;
    }
    return {q_norm, k_norm, beta, sum(squares.with_k, 0)};
  }
  /// Not another lane: the diagonal is here.
  __device__ bool has_norms() const { return lane() % 4 == lane() / 8; }
  __device__ void put_norms(const Stage& s, const AllNorms& norms) const {
    if (!has_norms()) return;
    Factors<kK>& f = s.factors;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const Norms& n = norms[i];
      const unsigned row = token_place(norm_row(i));
      f.q_norm[row] = n.q * (a.gate.scale / kAnchor);
      f.k_norm[row] = n.k * (1 / kAnchor);
      f.k_beta[row] = n.k * n.beta;
      f.diag[row] = n.diag * kAnchor;
    }
  }

  // ---- operands in fp16 ------------------------------------------------------------------------
  //
  // Rows of q and k are operands as they came if norms of k are 1/2 to 2^8 and those of q 2^-6 to
  // 2^7. So are those of layers, and of vectors that are normalised already. A run with others is
  // made again, with q and k of those tokens times a power of two: other tokens keep their bits.

  __device__ static bool fits(float x, float least, float most) { return x >= least && x <= most; }
  __device__ static bool q_fits(float norm) { return fits(norm, 0x1p-7f, 0x1p6f); }
  __device__ static bool k_fits(float norm) { return fits(norm, 0x1p-8f, 2); }
  /// Moves a power of two out of a norm that does not fit; else 1.
  __device__ static uint32_t split_power(float& norm, bool fit) {
    const uint32_t bits = __float_as_uint(norm), kOne = 0x3f800000;
    if (fit || norm == 0) return kOne;
    norm = __uint_as_float(bits & 0x7fffff | kOne);
    return bits & 0x7f800000;
  }
  /// Of this lane's tokens.
  __device__ void split_powers(AllNorms& norms) const {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      Norms& n = norms[i];
      const uint32_t q = split_power(n.q, q_fits(n.q)), k = split_power(n.k, k_fits(n.k));
      n.diag *= __uint_as_float(q) * __uint_as_float(k);
      if (!has_norms()) continue;
      own.power.q[norm_row(i)] = q | q >> 16;
      own.power.k[norm_row(i)] = k | k >> 16;
    }
  }
  __device__ static void multiply_by(const uint32_t (&power)[kRun], Pairs& x) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if constexpr (std::is_same_v<T, __half>) {  // a power may be none of fp16's
        const float by = __uint_as_float(power[i] & 0xffff0000);
        const float2 y = ptx::unpack<T>(x[i]);
        x[i] = operand({y.x * by, y.y * by});
      } else {
        x[i] = ptx::mul_x2<T>(x[i], power[i]);
      }
    }
  }
};

}  // namespace kda::cuda::sm90::fused
