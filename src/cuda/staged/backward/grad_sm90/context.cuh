// SPDX-License-Identifier: Apache-2.0
// Knowledge of a thread that computes. A warp has 16 of the 128 channels and all 64 tokens, as in
// grad/context.cuh: a lane the channels g and g + 8 and of every 8 tokens 2 t and 2 t + 1.
#pragma once

#include "cuda/ptx/wgmma_small.cuh"
#include "cuda/staged/backward/grad/decays.cuh"
#include "cuda/staged/backward/grad/sums.cuh"
#include "cuda/staged/backward/grad_sm90/shared.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::sm90::grad {

using cuda::grad::decay_part;
using cuda::grad::element;
using cuda::grad::for_each;
using cuda::grad::in_range;
using cuda::grad::kAnchor;
using cuda::grad::kSubchunk;
using cuda::grad::kSubchunks;
using cuda::grad::kTokenTiles;
using cuda::grad::Operand;
using cuda::grad::Part;
using cuda::grad::scale_operand;
using cuda::grad::to_operand;
using cuda::grad::Tokens;

constexpr int kSubchunkBytes = kSubchunk * 128;  // of a tile

/// Places over which the compiler moves nothing, by numbers that differ: those in a loop over
/// sub-chunks have four each.
enum class Fence : unsigned {
  kQueries = 10,        // add_queries(), in each sub-chunk
  kColumns = 20,        // add_columns()
  kKeys = 30,           // add_keys()
  kGates = 40,          // store_gates()
  kBeforePairs = 50,    // decays are there before pairs are waited for
  kBeforeQueries = 51,  // products of states are there before those for dq are waited for
};

/// A rounded to tf32.
__device__ __forceinline__ float rounded_tf32(float x) {
  return __uint_as_float(ptx::to_tf32(x) & 0xffffe000u);
}
template <class T = Element16>
__device__ __forceinline__ float element(const Part& x, int n, int i) {
  return x[n][i];
}
template <class T = Element16, class Factor>
__device__ __forceinline__ void scale_operand(const Operand& x, Part& out, Factor&& factor) {
  for_each([&](int n, int i) { out[n][i] = rounded_tf32(element<T>(x, n, i) * factor(n, i)); });
}

/// Makes an operand that is nothing else: the product drops the bits behind.
template <class T, class Factor>
__device__ __forceinline__ void scale_rows(const Operand& x, Part& out, Factor&& factor) {
  for_each([&](int n, int i) {
    out[n][i] = __uint_as_float(ptx::to_tf32(element<T>(x, n, i) * factor(n, i)));
  });
}
template <class T, class Factor>
__device__ __forceinline__ void scale_rows(const Operand& x, Operand& out, Factor&& factor) {
  scale_operand<T>(x, out, factor);
}

/// Exclusive or with the column of a pair in tf32, of this row: rows that a warp reads or writes
/// together, eight neighbours or every second one, lie in other banks.
__device__ __forceinline__ int wide_swizzle(int row) { return ((row / 2 ^ row * 2) & 3) * 8; }

template <int kOfBlock, GradGates kOf, class ElementT>
struct ComputeContext {
  static constexpr int kHeads = kOfBlock;  // that the block has at once
  static constexpr GradGates kGates = kOf;
  static constexpr int kSteps = kK / kHeads / 16;  // of products over V
  using T = ElementT;
  using S = Shared<kHeads, kGates, T>;
  /// Sums over tokens in tf32, which has the digits of fp16 and the range that decays need. Its A
  /// operands are fp32 as it stands: a lane's tokens 2 t and 2 t + 1 are k = t and t + 4.
  static constexpr bool kWide = S::kWide;
  using Decayed = std::conditional_t<kWide, Part, Operand>;  // rows or columns of 16 tokens
  using Pairs = std::conditional_t<kWide, uint32_t[2][2][2], Operand>;
  const Args& a;
  S& s;
  const int tid, lane, warp;
  int turn = 0;  // chunks before this one
  // Whether other value heads of the q/k head have their turn before and after this one.
  bool has_earlier = false, has_later = false;
  // Addresses of this lane's 16-byte pieces. All others differ from them by constants, and by an
  // exclusive or with constants: pieces are swizzled by the last bits of their rows.
  const uint32_t transposed;  // of its warp's channels in a pair of tiles, from their start
  const uint32_t by_rows, by_columns;  // of pairs: to be summed over earlier, over later tokens

  __device__ ComputeContext(const Args& args, S& shared)
      : a(args),
        s(shared),
        tid(static_cast<int>(threadIdx.x)),
        lane(tid % 32),
        warp(__shfl_sync(~0u, tid / 32, 0)),
        transposed(warp / 4 * static_cast<int>(sizeof(Tile)) +
                   2 * swizzled(lane % 8 + lane / 16 * 8, warp % 4 * 2 + lane / 8 % 2)),
        by_rows(ptx::shared_address(shared.pairs[head()]) +
                2 * swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2)),
        by_columns(ptx::shared_address(shared.pairs[head()]) + 2 * swizzled(lane % 16, lane / 16)) {
  }

  __device__ int group() const { return warp / 4; }                  // warpgroup
  __device__ int head() const { return kHeads == 2 ? group() : 0; }  // of those of the block
  __device__ int g() const { return lane / 4; }
  __device__ int t() const { return lane % 4; }
  __device__ int channel() const { return 16 * warp + g(); }
  __device__ const Numbers<kHeads, kGates>& numbers() const { return s.numbers[turn & 1]; }
  __device__ const Factors& factors() const { return s.factors[head()]; }
  /// The factor that takes a product with operands of this kind back; 1 in bf16.
  __device__ __forceinline__ float back(OperandKind kind) const {
    if constexpr (kWide)
      return s.of_elements.scales[turn & 1].back[kind];
    else
      return 1;
  }
  /// The compiler moves nothing over it.
  template <Fence kFence>
  __device__ __forceinline__ void fence() const {
    fence_of_number<static_cast<unsigned>(kFence)>();
  }
  /// One in each sub-chunk of an unrolled loop.
  template <Fence kFence>
  __device__ __forceinline__ void fence_in(int subchunk) const {
    constexpr auto kNumber = static_cast<unsigned>(kFence);
    if (subchunk == 0) fence_of_number<kNumber>();
    if (subchunk == 1) fence_of_number<kNumber + 1>();
    if (subchunk == 2) fence_of_number<kNumber + 2>();
    if (subchunk == 3) fence_of_number<kNumber + 3>();
  }
  template <unsigned kNumber>
  __device__ __forceinline__ void fence_of_number() const {
    ptx::compiler_fence(a.zero == kNumber);
  }
  /// The threads of a value head.
  __device__ __forceinline__ void sync() const {
    ptx::bar_sync<kComputeThreads / kHeads>(kComputeBarrier + head());
  }

  /// The warp's channels of the tokens of a sub-chunk, as an A operand.
  __device__ __forceinline__ uint32_t channels_of(const Tile (&rows)[kHalves]) const {
    return ptx::shared_address(rows) + transposed;
  }
  __device__ __forceinline__ static void load(uint32_t channels, int subchunk, Operand& x) {
    ptx::ldmatrix_x4_trans(x, channels + subchunk * kSubchunkBytes);
  }
  /// B operands of pairs, by d_o (0) or by dZ (1): sums over the tokens of sub-chunk `earlier`, n8
  /// tiles of those of `later`; and the other way.
  __device__ __forceinline__ void load_rows(int which, int later, int earlier, Operand& x) const {
    ptx::ldmatrix_x4(x, (by_rows ^ earlier * 32) + which * static_cast<int>(sizeof(Tile)) +
                            later * kSubchunkBytes);
  }
  __device__ __forceinline__ void load_columns(int which, int later, int earlier,
                                               Operand& x) const {
    ptx::ldmatrix_x4_trans(x, (by_columns ^ earlier * 32) + which * static_cast<int>(sizeof(Tile)) +
                                  later * kSubchunkBytes);
  }
  /// Pairs in tf32: [n8 tile of results][of sums][token 2 t or 2 t + 1].
  __device__ __forceinline__ void load_rows(int which, int later, int earlier,
                                            uint32_t (&x)[2][2][2]) const {
    const float* pairs = wide_pairs(which) + g() * kChunk;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = 16 * later + 8 * m, column = (16 * earlier + 8 * n) ^ wide_swizzle(g());
        const float2 pair =
            *reinterpret_cast<const float2*>(pairs + row * kChunk + column + 2 * t());
        x[m][n][0] = __float_as_uint(pair.x), x[m][n][1] = __float_as_uint(pair.y);
      }
  }
  __device__ __forceinline__ void load_columns(int which, int later, int earlier,
                                               uint32_t (&x)[2][2][2]) const {
    const float* pairs = wide_pairs(which) + g();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 2 * t() + i, column = (16 * earlier + 8 * m) ^ wide_swizzle(row);
          x[m][n][i] = __float_as_uint(pairs[(16 * later + 8 * n + row) * kChunk + column]);
        }
  }
  __device__ __forceinline__ float* wide_pairs(int which) const {
    if constexpr (kWide) return s.pairs[0][which];
    return nullptr;
  }
  /// acc += x y for two n8 tiles.
  __device__ __forceinline__ static void multiply(float (*acc)[4], const Operand& x,
                                                  const Operand& y) {
    ptx::mma_16816<T>(acc[0], x, y[0], y[1]);
    ptx::mma_16816<T>(acc[1], x, y[2], y[3]);
  }
  __device__ __forceinline__ static void multiply(float (*acc)[4], const Part& x,
                                                  const uint32_t (&y)[2][2][2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t a[4] = {__float_as_uint(x[n][0]), __float_as_uint(x[n][2]),
                             __float_as_uint(x[n][1]), __float_as_uint(x[n][3])};
#pragma unroll
      for (int m = 0; m < 2; ++m) ptx::mma_1688_tf32(acc[m], a, y[m][n][0], y[m][n][1]);
    }
  }
  __device__ __forceinline__ float2 of_tokens(const float (&numbers)[kChunk], int n) const {
    return *reinterpret_cast<const float2*>(&numbers[8 * n + 2 * t()]);
  }
  __device__ __forceinline__ void scale_tokens(const float (&factors)[kChunk], Tokens& x) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 f = of_tokens(factors, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] *= i % 2 ? f.y : f.x;
    }
  }
};

/// A product over tokens 2 t and 2 t + 1 of each lane, of numbers in two parts of 11 bits:
/// acc[.][token] += x[.][earlier or later token], as `weights` of this lane say.
struct TwoParts {
  uint32_t high[4], low[4];
  __device__ __forceinline__ explicit TwoParts(const float (&x)[4]) {
    constexpr int kPlace[4] = {0, 2, 1, 3};  // tokens are k = t and t + 4
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[kPlace[i]] = __float_as_uint(x[i]) & 0xffffe000u;
      low[kPlace[i]] = __float_as_uint(x[i] - __uint_as_float(high[kPlace[i]]));
    }
  }
  __device__ __forceinline__ void add(float (&acc)[4], float weight0, float weight1) const {
    const uint32_t w0 = __float_as_uint(weight0), w1 = __float_as_uint(weight1);
    ptx::mma_1688_tf32(acc, low, w0, w1);
    ptx::mma_1688_tf32(acc, high, w0, w1);
  }
};

}  // namespace kda::cuda::sm90::grad
