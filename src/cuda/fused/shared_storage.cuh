// SPDX-License-Identifier: Apache-2.0
// Shared memory of fused_prefill: a ring of stages from producers to the consumer, and what each
// maker has for itself.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/fused/scheduler.cuh"
#include "cuda/launch/built.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::sm90::fused {

using Bits = uint16_t;           // of bf16 or fp16
constexpr int kRun = kSubchunk;  // tokens of a stage
template <int kK>
constexpr int kStride = kK + 8;  // of rows that only ldmatrix reads

constexpr int kMakers = 8;        // of runs, in a cluster
constexpr int kStages = kMakers;  // a maker fills one stage, and always the same
template <int kK>
constexpr int kBlocks = fused_blocks(kK);  // of a cluster: 64 columns of V each
template <int kK>
constexpr int kBlockMakers = kMakers / kBlocks<kK>;
template <int kK>
constexpr int kMakerWarps = kK / 64;  // a thread has two channels
constexpr int kProducerWarps = 8;
static_assert(kBlockMakers<64> * kMakerWarps<64> == kProducerWarps);
static_assert(kBlockMakers<128> * kMakerWarps<128> == kProducerWarps);

/// Of q, k, v and o where gates are E.
template <class E>
using InputOf = std::conditional_t<std::is_same_v<E, __half>, __half, __nv_bfloat16>;

/// What the consumer multiplies with, and the state and errors where it does. fp16 has three bits
/// more than bf16 but spans 40 powers of two (consumer.cuh says how they suffice).
template <class Operand>
constexpr bool kHalf = std::is_same_v<Operand, __half>;

/// Scores inside a run are anchored at its start: rows are decayed since then, columns divided by
/// it. Rows reach from the anchor to the least. Operands in bf16 are these rows, and keep clear of
/// denormals. Operands in fp16 are rows without the anchor, and scores have rows of their own: with
/// softplus gates, which have no bound, these span 216 powers of two.
template <class Operand>
constexpr float kAnchor = kHalf<Operand> ? 1.0f : 0x1p48f;  // of operands
template <class Operand, int kGateMode>
constexpr int kLogScoreAnchor = kHalf<Operand> ? kGateMode == 1 ? 100 : 0 : 48;
template <class Operand, int kGateMode>
constexpr float kScoreAnchor = kHalf<Operand>&& kGateMode == 1 ? 0x1p100f : kAnchor<Operand>;
template <class Operand>
constexpr float kLeast = kHalf<Operand> ? 0x1p-116f : 0x1p-96f;

/// A lane of the consumer has channels 2j and 2j + 1 of every 8: its 32 lie together, those of
/// other lanes in other banks.
template <int kK>
constexpr int kGammaStride = kK / 4 + 4;
template <int kK>
__device__ __forceinline__ constexpr unsigned gamma_place(unsigned channel) {
  return channel % 8 / 2 * kGammaStride<kK> + channel / 8 * 2 + channel % 2;
}

/// A lane of the consumer has tokens 2j and 2j + 1 of both 8: their factors lie together too.
__device__ __forceinline__ constexpr unsigned token_place(unsigned token) {
  return token % 8 / 2 * 4 + token / 8 * 2 + token % 2;
}

/// Factors of a run, the same for both blocks, of operands. Norms are factors of tokens here, not
/// of elements: rows and columns are those of q and k as they came, decayed. wgmma wants tiles
/// aligned to 1024 bytes.
template <int kK>
struct alignas(1024) Tiles {
  uint16_t rows[2 * kRun * kK];  // k, then q, times kAnchor exp(G); [32, 64] for each 64 channels
  uint16_t kg[kRun * kK];        // k exp(G_end - G); [16, 64] for each 64 channels
};
/// Squares are strictly lower triangular, at square_place().
template <int kK>
struct alignas(16) Factors {
  uint16_t inverse[kRun * kRun];      // of T' = (I + N diag(beta))^-1
  uint16_t Aqk[kRun * kRun];          // without norms, times kAnchor
  float gamma[4 * kGammaStride<kK>];  // exp(G_end), at gamma_place()
  // Of tokens, at token_place():
  float k_norm[kRun], q_norm[kRun];  // with 1 / kAnchor; q_norm with the scale of outputs too
  float k_beta[kRun];                // norm of k and beta
  float diag[kRun];                  // q . k, times kAnchor
};
/// Halves of rows that ldmatrix reads at once lie in all banks.
__device__ __forceinline__ constexpr int square_place(int i, int j) {
  return i * kRun + (j ^ (i / 4 & 1) * 8);
}
template <int kK>
struct Stage {
  Tiles<kK>& tiles;
  Factors<kK>& factors;
};

template <int kK>
using Tile = Bits[kRun][kStride<kK>];
template <int kK>
using SwizzledTile = Bits[kRun * kK];  // [16, 64] for each 64 channels
/// Rows as they came, kGateBytes of g. Pieces of q and k are swizzled (tile/swizzle.cuh): in rows
/// kStride apart their copies take 2.6 times as many wavefronts.
template <int kK, int kGateBytes>
struct RawRows {
  Bits q[kRun][kK], k[kRun][kK];
  unsigned char g[kRun * kK * kGateBytes];
};
/// A maker's own. Operands in bf16: the rows of a stage make scores too.
template <int kK, class Operand>
struct Scratch {
  alignas(16) float L[kRun][kRun + 4];  // N diag(beta), then blocks of its inverse
};
/// In fp16: rows that make scores, or those of two dyadic levels. L comes where rows of k were.
template <int kK>
struct Scratch<kK, __half> {
  alignas(128) SwizzledTile<kK> q;
  union {
    SwizzledTile<kK> k;
    float L[kRun][kRun + 4];
  };
};
template <int kK, class Operand, class E>
struct Workshop {
  union {
    alignas(128) RawRows<kK, sizeof(E)> raw;
    // Where raw rows are in registers:
    Tile<kK> levels[2];  // rows of dyadic levels, as operands
    struct {
      uint32_t q[kRun], k[kRun];
    } power;  // of tokens, pairs of bf16
  };
  Scratch<kK, Operand> scratch;
  Tile<kK> columns;           // k / (kScoreAnchor exp(G))
  int anchored;               // rows that the anchored form has right
  int unusual;                // fp16 cannot take a norm as it is, or softplus gates are large
  int deep[kMakerWarps<kK>];  // the head forgets fast: by channels of each warp
  // Where a maker has two warps:
  ptx::Mbarrier meet;  // of both
  ptx::Mbarrier half;  // the first one has done its part of a run
};

/// Of a warp of the consumer, from one stop to the next: in shared memory, as its course.
struct Stops {
  bool in_part;
  int num_runs, left;        // runs of the part
  int to_checkpoint, until;  // runs: to a checkpoint, to that or the end of the part
  int64_t checkpoint;        // the next one
  int64_t counted, before;   // sequences, and the checkpoints that they have
};

template <int kK, class Operand, class E>
struct Ring {
  Tiles<kK> tiles[kStages];
  Factors<kK> factors[kStages];
  Bits v[kStages][kRun * kVTile];  // of this block; then o
  Workshop<kK, Operand, E> workshops[kBlockMakers<kK>];
  /// Factors and v are there; this block, the other one is done with them.
  ptx::Mbarrier full[kStages], done[kStages], peer_done[kStages];
  Share share;
  int longest;  // stream, while the share is looked for
  Looks<kBlocks<kK>> looks;
  Course courses[4 + kProducerWarps];
  Stops stops[4];

  __device__ Stage<kK> stage(int i) { return {tiles[i], factors[i]}; }
};
constexpr int kOfClusters = 1024;  // what a kernel of clusters has besides
static_assert(sizeof(Ring<128, __nv_bfloat16, float>) <= kSharedMemory - kOfClusters);
static_assert(sizeof(Ring<128, __half, __nv_bfloat16>) <= kSharedMemory - kOfClusters);

/// swizzled() for a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ constexpr int swizzled_in(int row, int piece) {
  return piece / 8 * kRows * 64 + row * 64 + ((piece ^ row) & 7) * 8;
}

}  // namespace kda::cuda::sm90::fused
