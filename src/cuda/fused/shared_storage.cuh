// SPDX-License-Identifier: Apache-2.0
// Shared memory of the fused kernel: pipeline stages from producers to the consumer, and what each
// producer group has for itself. The map is on the first page of fused/kernel.cuh.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/fused/scheduler.cuh"
#include "cuda/launch/built.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/swizzle.hpp"

namespace kda::cuda::sm90::fused {

using Bits = uint16_t;  // of bf16 or fp16
template <int kK>
constexpr int kStride = kK + 8;  // of rows that only ldmatrix reads

constexpr int kGroups = 8;            // producer groups of a cluster
constexpr int kPipeStages = kGroups;  // a group fills one stage, and always the same
template <int kK>
constexpr int kBlocks = fused_blocks(kK);  // of a cluster: 64 columns of V each
template <int kK>
constexpr int kBlockGroups = kGroups / kBlocks<kK>;
template <int kK>
constexpr int kGroupWarps = kK / 64;  // a thread has two channels
constexpr int kProducerWarps = 8;     // of a block
static_assert(kBlockGroups<64> * kGroupWarps<64> == kProducerWarps);
static_assert(kBlockGroups<128> * kGroupWarps<128> == kProducerWarps);

/// In place of the type E of a gate: one a head, for all channels.
template <class E>
struct OneAHead {};
template <class E>
struct GateOf {
  using Value = E;
  static constexpr bool kOneAHead = false;
};
template <class E>
struct GateOf<OneAHead<E>> {
  using Value = E;
  static constexpr bool kOneAHead = true;
};
/// In its place too: bf16 or fp32, as RowView::type says. There is room for fp32.
struct AnyGate {};
template <>
struct GateOf<AnyGate> {
  using Value = float;
  static constexpr bool kOneAHead = false;
};
/// Bytes of the gates of a token.
template <int kK, class E>
constexpr int kGateBytes = (GateOf<E>::kOneAHead ? 1 : kK) *
                           static_cast<int>(sizeof(typename GateOf<E>::Value));

/// Type of q, k, v and o where gates have type E.
template <class E>
using InputOf = std::conditional_t<std::is_same_v<E, __half>, __half, __nv_bfloat16>;

/// Operand is the type of what the consumer multiplies: factors, and the state and errors, rounded.
/// fp16 has three bits more than bf16 but spans 40 powers of two (state_scale.cuh says how they
/// suffice).
template <class Operand>
constexpr bool kFp16 = std::is_same_v<Operand, __half>;

/// Anchored scores: rows are times the decay since the sub-chunk's start and times a power of two,
/// the anchor; columns are divided by both. A row is in range where decay times anchor, its
/// factor (decay.cuh), is at least kLeast. Operands in bf16 are these rows, which the anchor keeps
/// clear of denormals. Operands in fp16 are rows without an anchor, and scores have rows of their
/// own, in the type of q: with softplus gates, which have no bound, their factors span 216 powers
/// of two.
template <class Operand>
constexpr float kAnchor = kFp16<Operand> ? 1.0f : 0x1p48f;  // of operands
template <class Operand, GateMode kGateMode>
constexpr int kLogScoreAnchor = kFp16<Operand> ? kGateMode == GateMode::kSoftplus ? 100 : 0 : 48;
template <class Operand, GateMode kGateMode>
constexpr float kScoreAnchor =
    kFp16<Operand>&& kGateMode == GateMode::kSoftplus ? 0x1p100f : kAnchor<Operand>;
template <class Operand>
constexpr float kLeast = kFp16<Operand> ? 0x1p-116f : 0x1p-96f;

/// A consumer lane has channels 2j and 2j + 1 of every 8. Its K / 4 lie together, those of other
/// lanes in other banks.
template <int kK>
constexpr int kGammaStride = kK / 4 + 4;
template <int kK>
__device__ __forceinline__ constexpr unsigned gamma_place(unsigned channel) {
  return channel % 8 / 2 * kGammaStride<kK> + channel / 8 * 2 + channel % 2;
}

/// A consumer lane has tokens 2j and 2j + 1 of each 8: their factors lie together too.
__device__ __forceinline__ constexpr unsigned token_place(unsigned token) {
  return token % 8 / 2 * 4 + token / 8 * 2 + token % 2;
}

/// Factors of a sub-chunk, the same for both blocks, as operands. Rows and columns are those of q
/// and k as they came, decayed: "norms", 1 / |q| and 1 / |k|, are applied a token at a time, by the
/// consumer and to L.
template <int kK>
struct alignas(128) Tiles {
  /// k, then q, times kAnchor exp(G): [32, 64] for each 64 channels.
  uint16_t rows[2 * kSubchunk * kK];
  uint16_t kg[kSubchunk * kK];  // k exp(G_end - G): [16, 64] for each 64 channels
};
/// The squares of 16 x 16, inverse and Aqk, are strictly lower triangular: the ones of T' are left
/// out, and diag is the diagonal of Aqk. square_place() says where an element is.
template <int kK>
struct alignas(16) Factors {
  uint16_t inverse[kSubchunk * kSubchunk];  // T' - I, T' = (I + N diag(beta))^-1
  uint16_t Aqk[kSubchunk * kSubchunk];      // without norms, times kAnchor
  float gamma[4 * kGammaStride<kK>];        // exp(G_end), at gamma_place()
  // One value a token, at token_place():
  float k_norm[kSubchunk], q_norm[kSubchunk];  // with 1 / kAnchor; q_norm with the output scale too
  float k_beta[kSubchunk];                     // norm of k, times beta
  float diag[kSubchunk];                       // q . k, times kAnchor
};
/// Halves of rows that ldmatrix reads at once lie in all banks.
__device__ __forceinline__ constexpr int square_place(int i, int j) {
  return i * kSubchunk + (j ^ (i / 4 & 1) * 8);
}
template <int kK>
struct PipeStage {
  Tiles<kK>& tiles;
  Factors<kK>& factors;
};

template <int kK>
using Tile = Bits[kSubchunk][kStride<kK>];
template <int kK>
using SwizzledTile = Bits[kSubchunk * kK];  // [16, 64] for each 64 channels
/// Rows as they came, kRowBytes of g a token. The 8 pieces of each 128 bytes of q and k are
/// permuted as in tile/swizzle.hpp, but rows of 256 bytes stay whole: in rows kStride apart their
/// copies take 2.6 times as many wavefronts.
template <int kK, int kRowBytes>
struct RawRows {
  Bits q[kSubchunk][kK], k[kSubchunk][kK];
  unsigned char g[kSubchunk * kRowBytes];
};
/// Operands of scores. With operands in bf16 the rows of a stage make scores too.
template <int kK, class Operand>
struct ScoreScratch {
  // N diag(beta); then the diagonal blocks of 8 are those of T'.
  alignas(16) float L[kSubchunk][kSubchunk + 4];
};
/// With operands in fp16: rows that make scores, or those of two dyadic levels. L takes the place
/// of rows of k.
template <int kK>
struct ScoreScratch<kK, __half> {
  alignas(128) SwizzledTile<kK> q;
  union {
    SwizzledTile<kK> k;
    float L[kSubchunk][kSubchunk + 4];
  };
};
/// Memory of a producer group alone.
template <int kK, class Operand, class E>
struct ProducerStorage {
  union {
    alignas(128) RawRows<kK, kGateBytes<kK, E>> raw;
    // Once raw q and k are in registers (g lies behind; levels reach into it once it is read too):
    Tile<kK> levels[2];  // rows of dyadic levels, as operands
    struct {
      uint32_t q[kSubchunk], k[kSubchunk];
    } power;  // one a token, as a pair of bf16
  };
  ScoreScratch<kK, Operand> scratch;
  Tile<kK> columns;   // k / (kScoreAnchor exp(G))
  int num_anchored;   // rows that the anchored form has right
  int needs_rescale;  // make_rows_again(): a norm does not fit fp16, or softplus gates are large
                      // (the consumer's rescale is another thing: of the state)
  int dyadic_only[kGroupWarps<kK>];  // by channels of each warp: the head forgets fast
  // Where a group has two warps:
  ptx::Mbarrier rows_ready;   // both have written (or read) what the other one reads (or writes)
  ptx::Mbarrier scores_done;  // the first warp has done its part of a sub-chunk
};

/// Memory of a consumer warp from one stop to the next.
struct ConsumerState {
  bool in_item;
  int num_subchunks, left;   // sub-chunks of the item
  int to_checkpoint, until;  // sub-chunks to the next checkpoint; to that or the end of the item
  int64_t checkpoint;        // number of the next one
  int64_t counted, before;   // sequences, and the checkpoints that they have
};

template <int kChannels, class OperandType, class GateElement>
struct SharedStorage {
  static constexpr int kK = kChannels;
  using Operand = OperandType;
  using E = GateElement;
  using Form = ClusterForm<kK>;
  static constexpr int block_groups = kBlockGroups<kK>;
  static constexpr int turn_tokens =
      kGroups * kSubchunk;  // from a sub-chunk of a group to its next

  alignas(1024) Tiles<kK> tiles[kPipeStages];  // as wgmma wants them
  Factors<kK> factors[kPipeStages];
  Bits v[kPipeStages][kSubchunk * kVTile];  // of this block; then o
  ProducerStorage<kK, Operand, E> producers[kBlockGroups<kK>];
  /// Factors and v are there; this block, the other block is done with them.
  ptx::Mbarrier full[kPipeStages], done[kPipeStages], peer_done[kPipeStages];
  WorkRange range;
  int longest;  // cost of the longest chain, while the range is looked for
  NormCheck<Form::kBlocks> norm_check;
  SchedulerState schedulers[4 + kProducerWarps];
  ConsumerState consumers[4];

  __device__ PipeStage<kK> stage(int i) { return {tiles[i], factors[i]}; }
  __device__ Bits* values(int i) { return v[i]; }
  __device__ ptx::Mbarrier& full_barrier(int i) { return full[i]; }
  __device__ ptx::Mbarrier& done_barrier(int i) { return done[i]; }
  __device__ ProducerStorage<kK, Operand, E>& producer(int i) { return producers[i]; }
};
constexpr int kClusterReserve = 1024;  // bytes that a kernel of clusters has besides
static_assert(sizeof(SharedStorage<128, __nv_bfloat16, float>) <= kSharedMemory - kClusterReserve);
static_assert(sizeof(SharedStorage<128, __half, __nv_bfloat16>) <= kSharedMemory - kClusterReserve);

}  // namespace kda::cuda::sm90::fused
