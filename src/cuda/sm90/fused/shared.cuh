// SPDX-License-Identifier: Apache-2.0
// Shared memory of fused_prefill: a ring of stages from producers to the consumer, and what each
// pair of producer warps has for itself.
#pragma once

#include <cstddef>

#include "cuda/ptx/cluster.cuh"
#include "cuda/sm90/built.hpp"
#include "cuda/sm90/fused/line.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::sm90::fused {

using T = __nv_bfloat16;
constexpr int kK = 128;
constexpr int kRun = kFusedRun;  // tokens of a stage
constexpr int kStride = kK + 8;  // of rows that only ldmatrix reads
constexpr int kSquare = kRun + 8;

constexpr int kHalves = FusedPrefillArgs::kCluster;  // blocks of a cluster: 64 columns of V each
constexpr int kPairs = 4;                            // of producer warps in a block
constexpr int kMakers = kHalves * kPairs;
constexpr int kStages = kMakers;  // a maker fills one stage, and always the same

/// Scores inside a run are anchored at its start: rows are decayed since then, columns divided by
/// it. Rows reach from kAnchor to kLeast.
constexpr float kAnchor = 0x1p48f, kLeast = 0x1p-96f;

/// A lane of the consumer has channels 2j and 2j + 1 of every 8: its 32 lie together, those of
/// other lanes in other banks.
constexpr int kGammaStride = kK / 4 + 4;
__device__ __forceinline__ constexpr int gamma_place(int channel) {
  return channel % 8 / 2 * kGammaStride + channel / 8 * 2 + channel % 2;
}

/// A lane of the consumer has tokens 2j and 2j + 1 of both 8: their factors lie together too.
__device__ __forceinline__ constexpr int token_place(int token) {
  return token % 8 / 2 * 4 + token / 8 * 2 + token % 2;
}

/// Factors of a run, the same for both blocks. Norms are factors of tokens here, not of elements:
/// rows and columns are those of q and k as they came, decayed. wgmma wants tiles aligned to 1024
/// bytes.
struct alignas(1024) Stage {
  T rows[2 * kRun * kK];          // k, then q, times kAnchor exp(G); [32, 64] twice
  T kg[kRun * kK];                // k exp(G_end - G); [16, 64] twice
  T inverse[kRun][kSquare];       // strictly lower part of T' = (I + N diag(beta))^-1
  T Aqk[kRun][kSquare];           // strictly lower part, without norms, times kAnchor
  float gamma[4 * kGammaStride];  // exp(G_end), at gamma_place()
  // Of tokens, at token_place():
  float k_norm[kRun], q_norm[kRun];  // with 1 / kAnchor; q_norm with the scale of outputs too
  float k_beta[kRun];                // norm of k and beta
  float diag[kRun];                  // q . k, times kAnchor
};
constexpr int kStageBytes = offsetof(Stage, diag) + kRun * 4;
static_assert(kStageBytes % 16 == 0);

using Tile = T[kRun][kStride];
/// Rows as they came. Pieces of q and k are swizzled (tile/swizzle.cuh): in rows kStride apart
/// their copies take 2.6 times as many wavefronts.
struct RawRows {
  T q[kRun][kK], k[kRun][kK];
  unsigned char g[kRun * kK * 4];
};
struct Workshop {
  union {
    alignas(128) RawRows raw;
    Tile levels[2];  // rows of dyadic levels, where raw ones are in registers
  };
  Tile columns;                         // k / (kAnchor exp(G))
  alignas(16) float L[kRun][kRun + 4];  // N diag(beta), then blocks of its inverse
  int anchored;                         // rows that the anchored form has right
  ptx::Mbarrier meet;                   // of both warps
  ptx::Mbarrier half;                   // the first warp has done its part of a run
};

/// Of a warp of the consumer, from one stop to the next: in shared memory, as its course.
struct Stops {
  bool in_part;
  int num_runs, left;        // runs of the part
  int to_checkpoint, until;  // runs: to a checkpoint, to that or the end of the part
  int64_t checkpoint;        // the next one
  int64_t counted, before;   // sequences, and the checkpoints that they have
};

struct Ring {
  Stage stages[kStages];
  T v[kStages][kRun * kVTile];  // of this block; then o
  Workshop workshops[kPairs];
  /// Factors and v are there; this block, the other one is done with them.
  ptx::Mbarrier full[kStages], done[kStages], peer_done[kStages];
  Share share;
  int longest;  // stream, while the share is looked for
  Looks looks;
  Course courses[4 + 2 * kPairs];
  Stops stops[4];
};
static_assert(sizeof(Ring) <= kSharedMemory);

/// swizzled() for a tile of kRows rows.
template <int kRows>
__device__ __forceinline__ constexpr int swizzled_in(int row, int piece) {
  return piece / 8 * kRows * 64 + row * 64 + ((piece ^ row) & 7) * 8;
}

}  // namespace kda::cuda::sm90::fused
