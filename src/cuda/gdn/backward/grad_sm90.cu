// SPDX-License-Identifier: Apache-2.0
// A block an SM takes chunks of a q/k head, and of each the value heads in turn.
//
// Roles: two warpgroups compute, with 64 of 128 channels each and all 64 tokens as rows of their
// accumulators; the first also has P and q k^T, the second R and k k^T. Two warps copy tiles of 64
// columns of V into a ring of two stages, and q, k and numbers beside it. Two more finish numbers
// of tokens (dg, dbeta, sums for parameters) while the next value head is under way.
//
// Barriers
//   ring          full: tiles of V are there; empty: they were read
//   head_full[2]  numbers of a value head are there;   head_empty[2]  they were read
//   rows_full     q and k are there;                   rows_empty     they were read
//   M_full        M and what tokens sum are there;     M_empty        M was read
//   bar.sync 1    threads that compute;   2, 3: a warpgroup of them;   4: threads that finish
#include "cuda/gdn/backward/grad_sm90.hpp"

#include "cuda/chain/products_sm90.cuh"
#include "cuda/chain/ring_sm90.cuh"
#include "cuda/gdn/rows.cuh"
#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/wgmma_shared.cuh"
#include "cuda/recurrent/backward/gates.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::gdn {
namespace {

using T = __nv_bfloat16;
using Args = HeadGates<GradArgs>;
constexpr int kK = kMostK, kChannels = 64;  // all, and those of a warpgroup
constexpr int kGroups = 2, kGroupThreads = 128, kComputeThreads = kGroups * kGroupThreads;
constexpr int kCopiers = 64, kFinishers = kChunk,
              kThreads = kComputeThreads + kCopiers + kFinishers;
constexpr int kComputeRegisters = 224, kCopierRegisters = 56;
constexpr int kHalf = kChunk * kChannels;  // elements of a tile's 64 columns
using Square = float[8][4];                // [64, 64] of a warpgroup

struct alignas(1024) Stage {
  T state[kVTile * kK], d_state[kVTile * kK];
  T d_o[kHalf], errors[kHalf], dz[kHalf];
};

/// Sums over channels that tokens have, a half of them from each warpgroup.
enum Share { kQueries, kKeys, kColumns, kShares };

/// Numbers of a value head that the next one may write while they are read.
struct Tokens {
  float shares[kShares][kGroups][kChunk];
  float product[kChunk];              // dZ . E
  float own_score[kChunk];            // p_jj q_j . k_j
  float trace[kComputeThreads / 32];  // of <S0, dS>
};

struct alignas(1024) Shared {
  chain::Ring<Stage, 2> ring;
  T q[kChunk * kK], k[kChunk * kK];
  T pairs[kGroups][kSquare];         // p_ij beta_j; r_ij beta_j; then rows of dq, of dk
  float M[kGroups][kChunk][kChunk];  // of p; of r. Then sums of both over later rows. place_of()
  struct {
    Numbers numbers;
    BackwardNumbers tokens;
  } of_head[2];
  Tokens tokens[2];
  float own[kChunk];                // p_ii beta_i, of all value heads
  float along[2][kGroups][kChunk];  // q . dq', k . dk'
  float inside[kChunk];             // sums of beta_j M_ij over rectangles
  float columns[kChunk];            // sums of M_ij over rows
  ptx::Mbarrier head_full[2], head_empty[2], rows_full, rows_empty, M_full, M_empty;
};

/// Chunks and q/k heads, the chunk's after each other: all, and those that exist, which come first.
__device__ __forceinline__ unsigned all_units(const Args& a) {
  return static_cast<unsigned>(a.num_chunks * a.shape.H);
}
__device__ __forceinline__ unsigned existing_units(const Args& a) {
  const unsigned all = all_units(a);
  if (!a.map.cu_seqlens) return all;
  const int64_t chunks = a.map.chunk_offsets[a.map.num_sequences];
  return static_cast<unsigned>(min(chunks * a.shape.H, static_cast<int64_t>(all)));
}
struct Unit {
  unsigned chunk;
  int q_head;
  __device__ Unit(const Args& a, unsigned index)
      : chunk(a.q_heads.quotient(index)), q_head(static_cast<int>(a.q_heads.remainder(index))) {}
  /// Index of the chunk and a value head.
  __device__ unsigned tile(const Args& a, int head) const {
    return chunk * static_cast<unsigned>(a.shape.HV) + static_cast<unsigned>(head);
  }
};
__device__ __forceinline__ int v_tiles_of(const Args& a) {
  return (a.shape.V + kVTile - 1) / kVTile;
}

/// Where column j of row i of M lies in its row. Pairs of columns of 4 rows are in other banks, and
/// so are columns of a row, and rows of a column but for two of them.
__device__ __forceinline__ int place_of(int i, int j) { return j ^ (i % 4 * 8 + i / 4 % 4 * 2); }

__device__ __forceinline__ void init_barriers(Shared& s) {
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(s.head_full[i], 1);
    ptx::mbarrier_init(s.head_empty[i], kComputeThreads + kFinishers);
  }
  ptx::mbarrier_init(s.rows_full, 1);
  ptx::mbarrier_init(s.rows_empty, kComputeThreads);
  ptx::mbarrier_init(s.M_full, kComputeThreads);
  ptx::mbarrier_init(s.M_empty, kFinishers);
  s.ring.init_barriers(kCopiers + 1, kComputeThreads, 0);
}

// ---- copies ------------------------------------------------------------------------------------

template <class Target>
__device__ __forceinline__ void copy_tile(Target& to, const void* tiles, int64_t tile,
                                          ptx::Mbarrier& barrier) {
  ptx::cp_async_bulk(&to, static_cast<const char*>(tiles) + tile * sizeof(to), sizeof(to), barrier);
}

struct Copier {
  const Args& a;
  Shared& s;
  const int thread;
  int turn = 0, heads = 0, units = 0;  // so far

  __device__ void copy_values(const T* d_o, int count, unsigned tile, int v_tile) {
    const int i = turn % 2;
    s.ring.wait_until_free(i, turn / 2);
    Stage& stage = s.ring.stages[i];
    const int64_t part = int64_t{tile} * v_tiles_of(a) + v_tile;
    if (thread == 0)
      s.ring.copy(i, [&](auto&& visit) {
        const auto whole = [&](auto& to, const void* tiles) {
          visit(&to, static_cast<const char*>(tiles) + part * sizeof(to),
                static_cast<int>(sizeof(to)));
        };
        whole(stage.errors, a.errors);
        whole(stage.dz, a.dz);
        whole(stage.state, a.h);
        whole(stage.d_state, a.dh);
      });
    const int column = v_tile * kVTile;
    copy_rows<kVTile, kCopiers>(stage.d_o, d_o + column, a.d_o.stride_t, count, a.shape.V - column,
                                thread);
    s.ring.arrive_after_copies(i);
    ++turn;
  }
  __device__ void copy_numbers(unsigned tile) {
    const int i = heads % 2;
    if (thread == 0) {
      if (heads > 1) ptx::mbarrier_wait(s.head_empty[i], (heads / 2 - 1) % 2);
      ptx::mbarrier_arrive_expect_tx(s.head_full[i], sizeof(s.of_head[i]));
      copy_tile(s.of_head[i].numbers, a.made.numbers, tile, s.head_full[i]);
      copy_tile(s.of_head[i].tokens, a.numbers, tile, s.head_full[i]);
    }
    ++heads;
  }
  __device__ void copy_rows_of(const Unit& unit) {
    const int64_t tile = int64_t{unit.chunk} * a.shape.H + unit.q_head;
    if (thread == 0) {
      if (units > 0) ptx::mbarrier_wait(s.rows_empty, (units - 1) % 2);
      ptx::mbarrier_arrive_expect_tx(s.rows_full, sizeof(s.q) + sizeof(s.k));
      copy_tile(s.q, a.made.q, tile, s.rows_full);
      copy_tile(s.k, a.made.k, tile, s.rows_full);
    }
    ++units;
  }
  __device__ void run() {
    const unsigned existing = existing_units(a);
    const int v_tiles = v_tiles_of(a), group = static_cast<int>(a.shape.group.value);
    for (unsigned index = blockIdx.x; index < existing; index += gridDim.x) {
      const Unit unit(a, index);
      const ChunkTokens chunk = chunk_tokens(a.map, unit.chunk);
      for (int member = 0; member < group; ++member) {
        const int head = value_head_of(a, unit.q_head, member);
        const unsigned tile = unit.tile(a, head);
        const T* d_o = static_cast<const T*>(a.d_o.base) + chunk_offset(a.d_o, chunk, head);
        const int count = a.d_o.base ? chunk.count : 0;
        for (int v_tile = 0; v_tile < v_tiles; ++v_tile) {
          copy_values(d_o, count, tile, v_tile);
          // The ring is full: what is awaited next is not behind it.
          if (v_tile != min(1, v_tiles - 1)) continue;
          copy_numbers(tile);
          if (member == 0) copy_rows_of(unit);
        }
      }
    }
  }
};

// ---- products, which are begun here ------------------------------------------------------------

/// acc += a b^T over kSteps * 16 columns of both.
template <int kSteps>
__device__ __forceinline__ void add_rows_product(Square& acc, const T* a, const T* b) {
  const uint64_t left = chain::tile_at(a), right = chain::tile_at(b);
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::wgmma_n64_shared<T, false, true>(acc, ptx::next_columns(left, step * 16),
                                          ptx::next_columns(right, step * 16));
}
/// acc += a b, or a^T b, of squares.
template <bool kTransposed>
__device__ __forceinline__ void add_product(Square& acc, const T* a, const T* b) {
  const uint64_t left = chain::tile_at(a), right = chain::tile_at(b);
#pragma unroll
  for (int step = 0; step < 4; ++step)
    ptx::wgmma_n64_shared_mn_major<T, kTransposed>(
        acc, kTransposed ? ptx::next_rows(left, step * 16) : ptx::next_columns(left, step * 16),
        ptx::next_rows(right, step * 16));
}
__device__ __forceinline__ void clear(Square& x) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = 0;
}

// ---- what a warpgroup computes -----------------------------------------------------------------

struct Compute {
  const Args& a;
  Shared& s;
  const int tid, group, warp, lane;    // the warp in its group
  int turn = 0, heads = 0, units = 0;  // so far

  __device__ Compute(const Args& args, Shared& shared)
      : a(args),
        s(shared),
        tid(static_cast<int>(threadIdx.x)),
        group(__shfl_sync(~0u, tid / kGroupThreads, 0)),
        warp(tid / 32 % 4),
        lane(tid % 32) {}

  // A lane's rows are tokens row() and row() + 8, its columns of tile n column(n) and the next.
  __device__ int row(int half) const { return warp * 16 + lane / 4 + half * 8; }
  __device__ int column(int n) const { return n * 8 + lane % 4 * 2; }
  /// Thread of the warpgroup.
  __device__ int thread() const { return tid % kGroupThreads; }

  __device__ void sync() const { ptx::bar_sync<kComputeThreads>(1); }
  __device__ void sync_group() const { ptx::bar_sync<kGroupThreads>(2 + group); }

  __device__ const Numbers& numbers() const { return s.of_head[heads % 2].numbers; }
  __device__ const BackwardNumbers& of_tokens() const { return s.of_head[heads % 2].tokens; }
  __device__ Tokens& tokens() const { return s.tokens[heads % 2]; }

  /// Two elements of q or k, of a row and this warpgroup's channels.
  __device__ __forceinline__ float2 pair_of(const T* rows, int half, int n) const {
    return ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(
        rows + group * kHalf + swizzled(row(half), n) + lane % 4 * 2));
  }

  /// This thread's share of <S0, dS> of a stage: in any order, which is the same of both.
  __device__ __forceinline__ float trace_of(const Stage& stage) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVTile * kK / 8 / kComputeThreads; ++i) {
      const int at = (i * kComputeThreads + tid) * 8;
      const uint4 x = *reinterpret_cast<const uint4*>(stage.state + at);
      const uint4 y = *reinterpret_cast<const uint4*>(stage.d_state + at);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 u = ptx::unpack<T>(xs[pair]), v = ptx::unpack<T>(ys[pair]);
        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
      }
    }
    return sum;
  }

  /// P or R, and the products with states, of all columns of V. Returns the warp's <S0, dS>.
  __device__ __forceinline__ float multiply_values(Square& pairs, Square& queries, Square& keys,
                                                   Square& columns) {
    clear(pairs), clear(queries), clear(keys), clear(columns);
    float trace = 0;
    for (int v_tile = 0; v_tile < v_tiles_of(a); ++v_tile, ++turn) {
      const Stage& stage = s.ring.stage(turn);
      s.ring.wait_for_operands(turn);
      ptx::fence_async_proxy();  // d_o was not copied by it
      ptx::fence_operands(pairs), ptx::fence_operands(queries);
      ptx::fence_operands(keys), ptx::fence_operands(columns);
      ptx::wgmma_fence();
      add_rows_product<4>(pairs, group == 0 ? stage.d_o : stage.dz, stage.errors);
      add_product<false>(queries, stage.d_o, stage.state + group * kHalf);
      add_product<false>(keys, stage.dz, stage.state + group * kHalf);
      add_product<false>(columns, stage.errors, stage.d_state + group * kHalf);
      ptx::wgmma_commit();
      trace += trace_of(stage);
      ptx::wgmma_wait<0>();
      ptx::fence_operands(pairs), ptx::fence_operands(queries);
      ptx::fence_operands(keys), ptx::fence_operands(columns);
      s.ring.is_read(turn);
    }
    return sum_over(trace, 1, 32);
  }

  /// Adds products with states to dq' and dk', and leaves what they are along q and k.
  __device__ __forceinline__ void add_states(const Square& queries, const Square& keys,
                                             const Square& columns, Square& dq, Square& dk) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row(half);
      const float row_q = numbers().row_q[token], row_k = numbers().row_k[token],
                  col_k = numbers().col_k[token];
      float sums[kShares] = {};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 q = pair_of(s.q, half, n), k = pair_of(s.k, half, n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 2 * half + i;
          const float q_i = i ? q.y : q.x, k_i = i ? k.y : k.x;
          sums[kQueries] = fmaf(q_i, queries[n][at], sums[kQueries]);
          sums[kKeys] = fmaf(k_i, keys[n][at], sums[kKeys]);
          sums[kColumns] = fmaf(k_i, columns[n][at], sums[kColumns]);
          dq[n][at] = fmaf(row_q, queries[n][at], dq[n][at]);
          dk[n][at] = fmaf(col_k, columns[n][at], fmaf(-row_k, keys[n][at], dk[n][at]));
        }
      }
#pragma unroll
      for (int i = 0; i < kShares; ++i) {
        const float sum = sum_over(sums[i], 1, 4);
        if (lane % 4 == 0) tokens().shares[i][group][token] = sum;
      }
    }
  }

  /// Whether this lane has the pairs of tokens with themselves, in visit(half, n, element).
  template <class Visit>
  __device__ __forceinline__ void for_own_pairs(Visit&& visit) const {
    if (lane % 4 != lane / 8) return;
#pragma unroll
    for (int n = 0; n < 8; ++n)
      if (n / 2 == warp) visit(n % 2, n, n % 2 * 2);
  }
  __device__ __forceinline__ float own_of(const Square& x, int n, int first) const {
    return lane / 4 % 2 == 0 ? x[n][first] : x[n][first + 1];
  }

  /// P or R: of a token with itself.
  __device__ __forceinline__ void take_own_pairs(const Square& pairs, float (&own)[2],
                                                 bool first_head) {
    for_own_pairs([&](int half, int n, int first) {
      const int token = row(half);
      const float x = own_of(pairs, n, first);
      if (group == 1) {
        tokens().product[token] = x;
        return;
      }
      own[half] = x * of_tokens().q_norm[token] * of_tokens().k_norm[token];
      const float step = own[half] * of_tokens().beta[token];
      s.own[token] = first_head ? step : s.own[token] + step;
    });
  }

  /// p or r of pairs below the diagonal, in place of P or R; times beta as operands of products.
  __device__ __forceinline__ void decay_pairs(Square& pairs) const {
    const BackwardNumbers& of = of_tokens();
    float whole[2], part[2], norm[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row(half);
      whole[half] = of.whole[i], part[half] = of.part[i];
      norm[half] = group == 0 ? of.q_norm[i] : -of.k_norm[i];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = column(n);
      const auto pair_at = [j](const float* of) {
        return *reinterpret_cast<const float2*>(of + j);
      };
      const float2 whole_j = pair_at(of.whole), part_j = pair_at(of.part),
                   norm_j = pair_at(of.k_norm), beta = pair_at(of.beta);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row(half);
        float *x = pairs[n] + 2 * half, factor = norm[half];
        const float first = ptx::ex2((whole[half] - whole_j.x) + (part[half] - part_j.x));
        const float second = ptx::ex2((whole[half] - whole_j.y) + (part[half] - part_j.y));
        x[0] = i > j ? first * (factor * norm_j.x) * x[0] : 0.0f;
        x[1] = i > j + 1 ? second * (factor * norm_j.y) * x[1] : 0.0f;
        *reinterpret_cast<uint32_t*>(s.pairs[group] + swizzled(i, n) + lane % 4 * 2) =
            ptx::pack<T>(x[0] * beta.x, x[1] * beta.y);
      }
    }
  }

  /// p times q . k, or r times k . k.
  __device__ __forceinline__ void put_scored_pairs(const Square& pairs, const Square& scores,
                                                   const float (&own)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int i = row(half), j = column(n);
        const float *x = pairs[n] + 2 * half, *y = scores[n] + 2 * half;
        *reinterpret_cast<float2*>(&s.M[group][i][place_of(i, j)]) = {
            i > j ? x[0] * y[0] : 0.0f, i > j + 1 ? x[1] * y[1] : 0.0f};
      }
    if (group == 1) return;
    for_own_pairs([&](int half, int n, int first) {
      tokens().own_score[row(half)] = own[half] * own_of(scores, n, first);
    });
  }

  // ---- a value head

  /// 1 / |q| and 1 / |k| of a lane's tokens.
  struct Norms {
    float q[2], k[2];
  };
  __device__ __forceinline__ void load_norms(Norms& norms) const {
    const float of_scale = a.gate.scale != 0 ? 1 / a.gate.scale : 0;  // then dq is 0
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      norms.q[half] = of_tokens().q_norm[row(half)] * of_scale;
      norms.k[half] = of_tokens().k_norm[row(half)];
    }
  }

  __device__ __forceinline__ void run_head(const Unit& unit, const ChunkTokens& chunk, int member,
                                           Norms& norms, Square& dq, Square& dk) {
    Square pairs, queries, keys, columns;
    float own[2] = {};
    const float trace = multiply_values(pairs, queries, keys, columns);
    ptx::mbarrier_wait(s.head_full[heads % 2], heads / 2 % 2);
    if (lane == 0) tokens().trace[tid / 32] = trace;
    if (member == 0) ptx::mbarrier_wait(s.rows_full, units % 2);
    add_states(queries, keys, columns, dq, dk);
    clear(queries);  // scores from here on
    ptx::fence_operands(queries);
    ptx::wgmma_fence();
    add_rows_product<kK / 16>(queries, group == 0 ? s.q : s.k, s.k);
    ptx::wgmma_commit();
    load_norms(norms);
    take_own_pairs(pairs, own, member == 0);
    sync();  // both warpgroups are done with the pairs of the value head before
    decay_pairs(pairs);
    ptx::wgmma_wait<0>();
    ptx::fence_operands(queries);
    if (heads > 0) ptx::mbarrier_wait(s.M_empty, (heads - 1) % 2);
    put_scored_pairs(pairs, queries, own);
    ptx::mbarrier_arrive(s.M_full);
    ptx::fence_async_proxy();  // pairs are operands
    sync();
    ptx::fence_operands(dq), ptx::fence_operands(dk);
    ptx::wgmma_fence();
    const T *q = s.q + group * kHalf, *k = s.k + group * kHalf;
    add_product<false>(dq, s.pairs[0], k);
    add_product<true>(dk, s.pairs[0], q);
    add_product<false>(dk, s.pairs[1], k);
    add_product<true>(dk, s.pairs[1], k);
    ptx::wgmma_commit();
    ptx::mbarrier_arrive(s.head_empty[heads % 2]);
    ptx::wgmma_wait<0>();
    ptx::fence_operands(dq), ptx::fence_operands(dk);
    ++heads;
  }

  // ---- dq and dk of a q/k head

  /// Adds the pairs of tokens with themselves; leaves what dq' is along q, and dk' along k.
  __device__ __forceinline__ void add_own_pairs(Square& dq, Square& dk) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row(half);
      const float own = s.own[token];
      float along_q = 0, along_k = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 q = pair_of(s.q, half, n), k = pair_of(s.k, half, n);
        float *x = dq[n] + 2 * half, *y = dk[n] + 2 * half;
        x[0] = fmaf(own, k.x, x[0]), x[1] = fmaf(own, k.y, x[1]);
        y[0] = fmaf(own, q.x, y[0]), y[1] = fmaf(own, q.y, y[1]);
        along_q = fmaf(q.x, x[0], fmaf(q.y, x[1], along_q));
        along_k = fmaf(k.x, y[0], fmaf(k.y, y[1], along_k));
      }
      along_q = sum_over(along_q, 1, 4), along_k = sum_over(along_k, 1, 4);
      if (lane % 4 == 0) s.along[0][group][token] = along_q, s.along[1][group][token] = along_k;
    }
  }

  /// Back through the norm, to the warpgroup's tile.
  __device__ __forceinline__ void put_rows(const Square& x, const T* rows, int which,
                                           const float (&norm)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row(half);
      const float along = a.gate.l2norm ? norm[half] * norm[half] *
                                              (s.along[which][0][token] + s.along[which][1][token])
                                        : 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = pair_of(rows, half, n);
        *reinterpret_cast<uint32_t*>(s.pairs[group] + swizzled(token, n) + lane % 4 * 2) =
            ptx::pack<T>(x[n][2 * half] - along * y.x, x[n][2 * half + 1] - along * y.y);
      }
    }
  }
  __device__ __forceinline__ void store_rows(const RowView& view, const ChunkTokens& chunk,
                                             int q_head) const {
    sync_group();
    const int piece = thread() % 8, channel = group * kChannels + piece * 8;
    if (view.base && channel < a.shape.K) {
      T* to = static_cast<T*>(view.base) + chunk_offset(view, chunk, q_head) + channel;
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) {
        const int token = i * 16 + thread() / 8;
        if (token < chunk.count)
          *reinterpret_cast<uint4*>(to + token * view.stride_t) =
              *reinterpret_cast<const uint4*>(s.pairs[group] + swizzled(token, piece));
      }
    }
    sync_group();
  }

  __device__ __forceinline__ void finish_rows(const Unit& unit, const ChunkTokens& chunk,
                                              const Norms& norms, Square& dq, Square& dk) const {
    add_own_pairs(dq, dk);
    sync();
    put_rows(dq, s.q, 0, norms.q);
    store_rows(a.dq, chunk, unit.q_head);
    put_rows(dk, s.k, 1, norms.k);
    ptx::mbarrier_arrive(s.rows_empty);
    store_rows(a.dk, chunk, unit.q_head);
  }

  __device__ __forceinline__ void run_unit(const Unit& unit) {
    const ChunkTokens chunk = chunk_tokens(a.map, unit.chunk);
    const auto members = static_cast<int>(a.shape.group.value);
    Square dq, dk;
    Norms norms;
    clear(dq), clear(dk);
    for (int member = 0; member < members; ++member) run_head(unit, chunk, member, norms, dq, dk);
    finish_rows(unit, chunk, norms, dq, dk);
    ++units;
  }

  __device__ void run() {
    const unsigned existing = existing_units(a);
    for (unsigned index = blockIdx.x; index < existing; index += gridDim.x)
      run_unit(Unit(a, index));
  }
};

// ---- numbers of tokens -------------------------------------------------------------------------

/// Two warps: a thread a token, then a warp with two neighbours a lane.
struct Finisher {
  const Args& a;
  Shared& s;
  const int thread;
  int heads = 0;  // so far

  __device__ int lane() const { return thread % 32; }
  __device__ void sync() const { ptx::bar_sync<kFinishers>(4); }
  __device__ const Numbers& numbers() const { return s.of_head[heads % 2].numbers; }
  __device__ const BackwardNumbers& of_tokens() const { return s.of_head[heads % 2].tokens; }
  __device__ const Tokens& tokens() const { return s.tokens[heads % 2]; }

  /// Sums of M over later rows, in place of the first warpgroup's part. Returns that of all rows.
  __device__ float sum_columns() const {
    float sum = 0;
#pragma unroll 4
    for (int i = kChunk - 1; i >= 0; --i) {
      const int j = place_of(i, thread);
      sum += s.M[0][i][j] + s.M[1][i][j];
      s.M[0][i][j] = sum;
    }
    return sum;
  }
  /// Sums over rectangles j < t <= i.
  __device__ void sum_rectangles() const {
    float sum = 0;
#pragma unroll 4
    for (int j = 0; j < kChunk; ++j)
      sum += j < thread ? of_tokens().beta[j] * s.M[0][thread][place_of(thread, j)] : 0.0f;
    s.inside[thread] = sum;
  }

  struct Pair {
    float x[2];
  };
  /// Sums over this token and those behind it.
  __device__ __forceinline__ Pair sums_from(const Pair& x) const {
    float behind = 0, sum = x.x[0] + x.x[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_sync(~0u, sum, (lane() + offset) & 31);
      if (lane() + offset < 32) sum += other;
    }
    behind = __shfl_sync(~0u, sum, (lane() + 1) & 31);
    if (lane() == 31) behind = 0;
    return {behind + x.x[1] + x.x[0], behind + x.x[1]};
  }
  /// Sums over the tokens before this one.
  __device__ __forceinline__ Pair sums_before(const Pair& x) const {
    const float sum = sum_up_to(x.x[0] + x.x[1], lane());
    float before = __shfl_sync(~0u, sum, (lane() - 1) & 31);
    if (lane() == 0) before = 0;
    return {before, before + x.x[0]};
  }

  __device__ void store(const Unit& unit, const ChunkTokens& chunk, int head) const {
    const Numbers& n = numbers();
    const BackwardNumbers& of = of_tokens();
    const Tokens& t = tokens();
    Pair rows, columns;
    float k_columns[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane() * 2 + i;
      const auto share = [&](Share which) {
        return t.shares[which][0][token] + t.shares[which][1][token];
      };
      k_columns[i] = share(kColumns);
      rows.x[i] = n.row_q[token] * share(kQueries) - n.row_k[token] * share(kKeys);
      columns.x[i] = n.col_k[token] * k_columns[i];
    }
    const Pair from = sums_from(rows), before = sums_before(columns);
    float trace = 0;
#pragma unroll
    for (int i = 0; i < kComputeThreads / 32; ++i) trace += t.trace[i];
    float ddt_bias = 0, dA_log = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane() * 2 + i;
      const float dG = n.last * trace + from.x[i] + before.x[i] + s.inside[token];
      const float dg = backward::product_or_zero(of.by_gate[token], dG);
      const bool exists = token < chunk.count;
      if (exists) {
        ddt_bias += dg;
        dA_log += backward::product_or_zero(of.by_A_log[token], dG);
      }
      const auto put = [&](const RowView& view, float x) {
        if (view.base && exists)
          store_element(view.base, view.type,
                        chunk_offset(view, chunk, head) + token * view.stride_t, x);
      };
      put(a.dg, dg);
      put(a.dbeta, d_step(token, k_columns[i]));
    }
    if (!a.sums) return;
    ddt_bias = sum_over(ddt_bias, 1, 32), dA_log = sum_over(dA_log, 1, 32);
    double* to = a.sums + 2 * int64_t{unit.tile(a, head)};
    if (lane() == 0) to[0] = ddt_bias, to[1] = dA_log;
  }
  __device__ __forceinline__ float d_step(int token, float k_column) const {
    const BackwardNumbers& of = of_tokens();
    const Tokens& t = tokens();
    if (a.gate.beta_mode != BetaMode::kPlain || of.by_beta[token] != 0)
      return t.product[token] * of.by_beta[token];
    const float to_end =
        ptx::ex2((of.whole[kChunk - 1] - of.whole[token]) + (of.part[kChunk - 1] - of.part[token]));
    return to_end * of.k_norm[token] * k_column + s.columns[token] + t.own_score[token];
  }

  __device__ void run_head(const Unit& unit, const ChunkTokens& chunk, int head) {
    ptx::mbarrier_wait(s.head_full[heads % 2], heads / 2 % 2);
    ptx::mbarrier_wait(s.M_full, heads % 2);
    const float column = sum_columns();
    sync();  // store() of the value head before is over, and reads its sums no more
    s.columns[thread] = column;
    sum_rectangles();
    ptx::mbarrier_arrive(s.M_empty);
    sync();
    if (thread < 32) store(unit, chunk, head);
    ptx::mbarrier_arrive(s.head_empty[heads % 2]);
    ++heads;
  }
  __device__ void run() {
    const unsigned existing = existing_units(a);
    const auto members = static_cast<int>(a.shape.group.value);
    unsigned index = blockIdx.x;
    for (; index < existing; index += gridDim.x) {
      const Unit unit(a, index);
      const ChunkTokens chunk = chunk_tokens(a.map, unit.chunk);
      for (int member = 0; member < members; ++member)
        run_head(unit, chunk, value_head_of(a, unit.q_head, member));
    }
    if (!a.sums) return;
    for (; index < all_units(a); index += gridDim.x) {  // chunks that no sequence has
      const Unit unit(a, index);
      for (int member = thread; member < members; member += kFinishers) {
        double* to = a.sums + 2 * int64_t{unit.tile(a, value_head_of(a, unit.q_head, member))};
        to[0] = to[1] = 0;
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    gdn_chunk_grad_kernel(const __grid_constant__ Args a) {
  auto& s = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  if (threadIdx.x == 0) init_barriers(s);
  __syncthreads();
  ptx::griddepcontrol_wait();
  if (threadIdx.x < kComputeThreads) {
    ptx::warpgroup_reg_alloc<kComputeRegisters>();
    Compute(a, s).run();
    return;
  }
  ptx::warpgroup_reg_dealloc<kCopierRegisters>();
  const int thread = static_cast<int>(threadIdx.x) - kComputeThreads;
  if (thread < kCopiers)
    Copier{a, s, thread}.run();
  else
    Finisher{a, s, thread - kCopiers}.run();
}

}  // namespace

Status launch_chunk_grad(const HeadGates<GradArgs>& args, int64_t num_sms, const Launch& where) {
  static_assert(sizeof(Shared) <= sm90::kSharedMemory);
  return launch_kernel("gdn_chunk_grad_sm90", gdn_chunk_grad_kernel,
                       min(args.num_chunks * args.shape.H, num_sms), kThreads, sizeof(Shared),
                       where, args);
}

}  // namespace kda::cuda::gdn
