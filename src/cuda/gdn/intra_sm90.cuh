// SPDX-License-Identifier: Apache-2.0
// A warpgroup a (chunk, q/k head). It copies q and k, multiplies [q; k] k^T by wgmma and keeps
// both squares in registers, rows of 16 tokens a warp. Then value heads one after the other: sums
// of gates, decayed scores, the inverse, the stores. Of four value heads each warp has prepared
// the gates of one.
#pragma once

#include "cuda/gdn/intra_sm90.hpp"

#include "cuda/chain/products_sm90.cuh"
#include "cuda/gdn/inverse.cuh"
#include "cuda/gdn/rows.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/recurrent/backward/gates.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::gdn {
namespace {

constexpr int kThreads = 128, kWarpsOfBlock = 4;
constexpr int kScoreTiles = kChunk / 8;  // n8 tiles of a warp's 16 rows

/// Beyond it a decay is 0 or infinite. 64 times as much is still exact in fp32.
constexpr float kMostLog2 = 0x1p17f;

/// Gates and steps of a value head. The sum of log2 decays to a token is `whole` + `part`:
/// differences of whole numbers are exact, so a decay of nearly 0 costs later tokens nothing.
struct TokenSums {
  float whole[kChunk], part[kChunk];
  float beta[kChunk];
};

/// Operands give way to squares once they are multiplied.
template <class T, int kK>
struct alignas(1024) Shared {
  union {
    struct {
      T q[kChunk * kK], k[kChunk * kK];
    } rows;
    struct {
      float N[kChunk][intra::kScoreStride];  // (T')^-1 - I, then T' but for its last quarter
      T inverse[kChunk][intra::kSquareStride], Aqk[kChunk][intra::kSquareStride];
    } after;
  };
  TokenSums sums[kWarpsOfBlock];
  float q_norm[kChunk], k_norm[kChunk];
  float k_square[kChunk];  // of normalised k
  float diag[kChunk];      // q . k of a token
};

template <class ElementT, int kChannels, class Args>
struct Context {
  using T = ElementT;
  static constexpr int kK = kChannels;
  static constexpr bool kForBackward = std::is_same_v<Args, BackwardIntraArgs>;

  const Args& a;
  Shared<T, kK>& s;
  const ChunkTokens& chunk;
  const int q_head;
  const int tid;

  __device__ int warp() const { return tid / 32; }
  __device__ int lane() const { return tid % 32; }
  /// First of this lane's two rows of a square; the other one lies 8 below.
  __device__ int row() const { return warp() * 16 + lane() / 4; }
  /// First of its two columns of tile n.
  __device__ int column(int n) const { return n * 8 + lane() % 4 * 2; }
  /// Index of this chunk and a value head.
  __device__ int64_t tile(int head) const {
    return static_cast<int64_t>(a.q_heads.quotient(blockIdx.x)) * a.shape.HV + head;
  }
};

// ---- once a q/k head

template <class C>
__device__ void load_rows(const C& c) {
  using T = typename C::T;
  const auto copy = [&](T* tile, const RowView& view) {
    const T* rows = static_cast<const T*>(view.base) + chunk_offset(view, c.chunk, c.q_head);
    copy_rows<C::kK, kThreads>(tile, rows, view.stride_t, c.chunk.count, c.a.shape.K, c.tid);
  };
  copy(c.s.rows.k, c.a.k);
  copy(c.s.rows.q, c.a.q);
  ptx::cp_async_commit();
}

/// The sum of squares of a row, by two neighbouring lanes; in 64 columns it is one lane's.
template <class T, int kK>
__device__ float square_of_row(const T* tile, int row, int half) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // The two lanes of a row read other banks.
    const int piece = kK == 128 ? half * 8 + (i ^ half * 4) : i;
    const uint4 x = *reinterpret_cast<const uint4*>(tile + swizzled(row, piece));
#pragma unroll
    for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
      const float2 y = ptx::unpack<T>(pair);
      sum = fmaf(y.x, y.x, sum), sum = fmaf(y.y, y.y, sum);
    }
  }
  return kK == 128 ? sum + __shfl_xor_sync(~0u, sum, 1) : sum;
}

__device__ __forceinline__ float norm_of(const GateView& gate, float square) {
  return gate.l2norm ? rsqrtf(square + 1e-6f) : 1.0f;
}

template <class C>
__device__ void find_q_norms(const C& c) {
  const int row = c.tid / 2, half = c.tid % 2;
  const float square = square_of_row<typename C::T, C::kK>(c.s.rows.q, row, half);
  if (half == 0) c.s.q_norm[row] = c.a.gate.scale * norm_of(c.a.gate, square);
}

/// Starts to hand on q and k as they lie here: chains copy a tile at once. By one thread.
template <class C>
__device__ void store_rows(const C& c) {
  const auto store = [&](void* tiles, const auto& tile) {
    ptx::cp_async_bulk_store(static_cast<char*>(tiles) + blockIdx.x * sizeof(tile), tile,
                             sizeof(tile));
  };
  store(c.a.made.k, c.s.rows.k);
  store(c.a.made.q, c.s.rows.q);
}

/// Rows of this warp of x k^T.
template <class C>
__device__ void multiply_by_k(const C& c, const typename C::T* x, float (&out)[kScoreTiles][4]) {
  using T = typename C::T;
  const uint64_t left = chain::tile_at(x), right = chain::tile_at(c.s.rows.k);
  ptx::wgmma_n64_shared<T, false, false>(out, left, right);
#pragma unroll
  for (int step = 1; step < C::kK / 16; ++step)
    ptx::wgmma_n64_shared<T, false, true>(out, ptx::next_columns(left, step * 16),
                                          ptx::next_columns(right, step * 16));
}

/// q k^T and k k^T, raw and then of normalised rows.
struct Scores {
  float q[kScoreTiles][4], k[kScoreTiles][4];
};

/// q . k and k . k of a token: the norm of k comes with the product.
template <class C>
__device__ void find_diagonals(const C& c, const Scores& scores) {
  if (c.lane() % 4 != c.lane() / 8) return;  // lanes of the diagonals of 8x8 blocks
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
    if (n / 2 != c.warp()) continue;
    const auto at = [&](const float(&x)[4]) {
      return c.lane() / 4 % 2 == 0 ? x[n % 2 * 2] : x[n % 2 * 2 + 1];
    };
    const int row = n * 8 + c.lane() / 4;
    const float square = at(scores.k[n]), norm = norm_of(c.a.gate, square);
    c.s.diag[row] = at(scores.q[n]);
    c.s.k_norm[row] = norm;
    c.s.k_square[row] = square * (norm * norm);
  }
}

template <class C>
__device__ void multiply_rows(const C& c, Scores& scores) {
  ptx::wgmma_fence();
  multiply_by_k(c, c.s.rows.k, scores.k);
  multiply_by_k(c, c.s.rows.q, scores.q);
  ptx::wgmma_commit();
  find_q_norms(c);
  ptx::wgmma_wait<0>();
  ptx::fence_operands(scores.q);
  ptx::fence_operands(scores.k);
  find_diagonals(c, scores);
}

/// Once norms are there, of what is not above the diagonal blocks.
template <class C>
__device__ void scale_scores(const C& c, Scores& scores) {
  const float q_norm[2] = {c.s.q_norm[c.row()], c.s.q_norm[c.row() + 8]};
  const float k_norm[2] = {c.s.k_norm[c.row()], c.s.k_norm[c.row() + 8]};
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
    if (n / 2 > c.warp()) continue;
    const float2 column = *reinterpret_cast<const float2*>(&c.s.k_norm[c.column(n)]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = i % 2 == 0 ? column.x : column.y;
      scores.q[n][i] *= q_norm[i / 2] * x;
      scores.k[n][i] *= k_norm[i / 2] * x;
    }
  }
}

/// Squares above their diagonal blocks, which no value head writes.
template <class C>
__device__ void clear_squares(const C& c) {
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
    if (n / 2 > c.warp())
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = c.row() + half * 8, j = c.column(n);
        *reinterpret_cast<uint32_t*>(&c.s.after.Aqk[i][j]) = 0;
        *reinterpret_cast<uint32_t*>(&c.s.after.inverse[i][j]) = 0;
      }
}

// ---- gates and steps of a value head, by a warp

/// Two neighbours of the chunk's tokens a lane, on their way from memory.
struct RawTokens {
  uint32_t gate[2] = {}, beta[2] = {};
  float A_log = 0, bias = 0;

  template <class C>
  __device__ RawTokens(const C& c, int head) {
    const GateView& gates = c.a.gate;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = c.lane() * 2 + i;
      if (token >= c.chunk.count) continue;
      const auto load = [&](const RowView& view) {
        return load_bits(view.base, view.type,
                         chunk_offset(view, c.chunk, head) + token * view.stride_t);
      };
      gate[i] = load(c.a.g);
      beta[i] = load(c.a.beta);
    }
    if (gates.A_log) A_log = gates.A_log[head * gates.stride_A];
    if (gates.dt_bias) bias = gates.dt_bias[head * gates.stride_dt];
  }
};

/// The log2 decay of a token within +-kMostLog2; NaN stays NaN.
template <class C>
__device__ float log2_decay(const C& c, uint32_t raw, float bias, float rate) {
  const float x = log2_decay_exact(c.a.gate, float_of(raw, c.a.g.type), bias, rate);
  if (x < -kMostLog2) return -kMostLog2;
  return x > kMostLog2 ? kMostLog2 : x;
}

/// Adds what the lanes before this one have.
__device__ __forceinline__ float sum_before(float x, int lane) {
  const float before = __shfl_sync(~0u, sum_up_to(x, lane), (lane - 1) & 31);
  return lane == 0 ? 0.0f : before;
}

/// A plain step below it has its gradient by another sum than dZ . E.
constexpr float kSmallBeta = 0x1p-8f;

/// Numbers of this lane's tokens, once their sums are there.
template <class C>
__device__ void store_for_backward(const C& c, int head, const RawTokens& raw, float rate,
                                   const TokenSums& sums) {
  BackwardNumbers& to = c.a.numbers[c.tile(head)];
  const bool plain = c.a.gate.beta_mode == BetaMode::kPlain;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = c.lane() * 2 + i;
    const bool exists = token < c.chunk.count;
    to.whole[token] = sums.whole[token], to.part[token] = sums.part[token];
    to.beta[token] = sums.beta[token];
    const backward::GateGradient slope =
        backward::undo_gate(c.a.gate, float_of(raw.gate[i], c.a.g.type), raw.bias, rate, 1);
    to.by_gate[token] = exists ? slope.raw : 0.0f;
    to.by_A_log[token] = exists ? slope.A_log : 0.0f;
    // Through the sigmoid beta cancels: beta' = beta sigmoid(-raw).
    const float raw_beta = float_of(raw.beta[i], c.a.beta.type);
    const float by_beta = !plain                                  ? 1 / (1 + expf(raw_beta))
                          : fabsf(sums.beta[token]) >= kSmallBeta ? 1 / sums.beta[token]
                                                                  : 0.0f;
    to.by_beta[token] = exists ? by_beta : 0.0f;
  }
}

template <class C>
__device__ void prepare_tokens(const C& c, int head, const RawTokens& raw, TokenSums& sums) {
  const float rate = expf(raw.A_log);
  float whole[2], part[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = c.lane() * 2 + i;
    const bool exists = token < c.chunk.count;  // gate(0) is not 0
    const float x = exists ? log2_decay(c, raw.gate[i], raw.bias, rate) : 0;
    whole[i] = rintf(x);
    part[i] = x - whole[i];
    sums.beta[token] = exists ? beta_value(c.a.gate, float_of(raw.beta[i], c.a.beta.type)) : 0.0f;
  }
  const auto put = [&](float(&target)[kChunk], const float(&x)[2]) {
    const float first = sum_before(x[0] + x[1], c.lane()) + x[0];
    target[c.lane() * 2] = first;
    target[c.lane() * 2 + 1] = first + x[1];
  };
  put(sums.whole, whole);
  put(sums.part, part);
  if constexpr (C::kForBackward) store_for_backward(c, head, raw, rate, sums);
}

// ---- factors of a value head

/// The decay from token j to token i.
__device__ __forceinline__ float decay_between(const TokenSums& sums, int i, int j) {
  return ptx::ex2((sums.whole[i] - sums.whole[j]) + (sums.part[i] - sums.part[j]));
}

/// Decayed scores of tile n: A, and what T' is the inverse of, less I. kDiagonal: nothing on the
/// diagonal or above it.
template <bool kDiagonal, class C>
__device__ __forceinline__ void put_scores(const C& c, const TokenSums& sums, int n,
                                           const float (&whole)[2], const float (&part)[2],
                                           const float (&q)[4], const float (&k)[4]) {
  const int j = c.column(n);
  const auto pair_at = [j](const float* x) { return *reinterpret_cast<const float2*>(x + j); };
  const float2 whole_j = pair_at(sums.whole), part_j = pair_at(sums.part),
               beta = pair_at(sums.beta);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = c.row() + half * 8;
    const bool first = !kDiagonal || i > j, second = !kDiagonal || i > j + 1;
    const float d0 = ptx::ex2((whole[half] - whole_j.x) + (part[half] - part_j.x));
    const float d1 = ptx::ex2((whole[half] - whole_j.y) + (part[half] - part_j.y));
    const auto put = [&](float x0, float x1) {
      return float2{first ? x0 : 0.0f, second ? x1 : 0.0f};
    };
    const float first_step = d0 * beta.x, second_step = d1 * beta.y;
    const float2 a = put(q[2 * half] * first_step, q[2 * half + 1] * second_step);
    *reinterpret_cast<uint32_t*>(&c.s.after.Aqk[i][j]) = ptx::pack<typename C::T>(a.x, a.y);
    float2 l = put(k[2 * half] * first_step, k[2 * half + 1] * second_step);
    if constexpr (!kDiagonal) l = {round_to_tf32(l.x), round_to_tf32(l.y)};
    *reinterpret_cast<float2*>(&c.s.after.N[i][j]) = l;
  }
}
template <class C>
__device__ void decay_scores(const C& c, const TokenSums& sums, const Scores& scores) {
  const float whole[2] = {sums.whole[c.row()], sums.whole[c.row() + 8]};
  const float part[2] = {sums.part[c.row()], sums.part[c.row() + 8]};
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
    if (n / 2 < c.warp())
      put_scores<false>(c, sums, n, whole, part, scores.q[n], scores.k[n]);
    else if (n / 2 == c.warp())
      put_scores<true>(c, sums, n, whole, part, scores.q[n], scores.k[n]);
}

/// The log2 of |I - beta k k^T|, which is 1 at least; of NaN it is NaN.
__device__ __forceinline__ float log2_growth(float beta, float k_square) {
  const float other = fabsf(1 - beta * k_square);  // along k
  return other <= 1 ? 0.0f : ptx::lg2(other);
}

/// By 64 threads, one a token.
template <class C>
__device__ void store_numbers(const C& c, const TokenSums& sums, Numbers* to, int i) {
  const float q_norm = c.s.q_norm[i], k_norm = c.s.k_norm[i];
  const float since_start = ptx::ex2(sums.whole[i] + sums.part[i]);
  to->row_k[i] = since_start * k_norm;
  to->row_q[i] = since_start * q_norm;
  to->col_k[i] = decay_between(sums, kChunk - 1, i) * k_norm * sums.beta[i];
  to->diag[i] = c.s.diag[i] * (q_norm * k_norm) * sums.beta[i];
  const float growth = sum_over(log2_growth(sums.beta[i], c.s.k_square[i]), 1, 32);
  if (c.lane() == 0) to->log2_growth[i / 32] = growth;
  if (i != kChunk - 1) return;
  to->last = since_start;
  to->log2_decay = sums.whole[i] + sums.part[i];
}

template <int kStorers, class T>
__device__ void store_square(const T (&square)[kChunk][intra::kSquareStride], T* to, int thread) {
  const int row0 = thread / 8, piece = thread % 8;
#pragma unroll
  for (int row = 0; row < kChunk; row += kStorers / 8)
    *reinterpret_cast<uint4*>(to + swizzled(row0, piece) + row * 64) =
        *reinterpret_cast<const uint4*>(&square[row0 + row][piece * 8]);
}

template <class C>
__device__ void make_factors(const C& c, int head, const TokenSums& sums, const Scores& scores) {
  using T = typename C::T;
  const int64_t tile = c.tile(head);
  decay_scores(c, sums, scores);
  __syncthreads();
  if (c.warp() < kWarpsOfBlock / 2) {
    invert_pairs(c);
  } else {
    const int thread = c.tid - kThreads / 2;
    store_numbers(c, sums, c.a.made.numbers + tile, thread);
    if constexpr (C::kForBackward) {
      c.a.numbers[tile].q_norm[thread] = c.s.q_norm[thread];
      c.a.numbers[tile].k_norm[thread] = c.s.k_norm[thread];
    }
    store_square<kThreads / 2>(c.s.after.Aqk, static_cast<T*>(c.a.made.scores) + tile * kSquare,
                               thread);
  }
  __syncthreads();
  invert_halves(c);
  __syncthreads();  // the next head's scores may go where these were, its inverse after a barrier
  store_square<kThreads>(c.s.after.inverse, static_cast<T*>(c.a.made.inverse) + tile * kSquare,
                         c.tid);
}

// ---- the kernel

template <class C>
__device__ void run(const C& c) {
  const auto group = static_cast<int>(c.a.shape.group.value);
  Scores scores;
  load_rows(c);
  for (int first = 0; first < group; first += kWarpsOfBlock) {
    const int mine = first + c.warp();
    if (mine < group) {
      const int head = value_head_of(c.a, c.q_head, mine);
      prepare_tokens(c, head, RawTokens(c, head), c.s.sums[c.warp()]);
    }
    if (first == 0) {
      ptx::cp_async_wait<0>();
      ptx::fence_async_proxy();
      __syncthreads();
      if (c.tid == 0) store_rows(c);
      multiply_rows(c, scores);
      if (c.tid == 0) ptx::cp_async_bulk_wait_read();
      __syncthreads();  // norms are there; q and k were read
      scale_scores(c, scores);
      clear_squares(c);
    }
    __syncthreads();  // sums are there
    for (int i = 0; i < min(kWarpsOfBlock, group - first); ++i)
      make_factors(c, value_head_of(c.a, c.q_head, first + i), c.s.sums[i], scores);
  }
}

template <class T, int kK, class Args>
__global__ void __launch_bounds__(kThreads, 4) gdn_intra_kernel(const __grid_constant__ Args a) {
  ptx::griddepcontrol_wait();
  if (a.early) ptx::griddepcontrol_launch_dependents();
  const ChunkTokens chunk = chunk_tokens(a.map, a.q_heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  run(Context<T, kK, Args>{a, *reinterpret_cast<Shared<T, kK>*>(ptx::dynamic_shared()), chunk,
                           static_cast<int>(a.q_heads.remainder(blockIdx.x)),
                           static_cast<int>(threadIdx.x)});
}

template <class T, int kK, class Args>
Status launch(const char* name, const Args& args, const Launch& where) {
  constexpr auto kBytes = static_cast<int>(sizeof(Shared<T, kK>));
  static_assert(4 * (kBytes + 1024) <= 228 * 1024, "four blocks an SM");
  return launch_kernel(name, gdn_intra_kernel<T, kK, Args>, args.num_chunks * args.shape.H,
                       kThreads, kBytes, where, args);
}

}  // namespace
}  // namespace kda::cuda::gdn
