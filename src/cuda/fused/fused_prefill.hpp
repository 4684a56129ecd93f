// SPDX-License-Identifier: Apache-2.0
// The whole forward in one kernel. q, k, v [B, T, H or HV, K or V], g [B, T, HV, K] and beta [B, T,
// HV] go in; o [B, T, HV, V] and final states [N, HV, K, V] come out. Producer warps make the
// factors of sub-chunks of 16 tokens in shared memory, and a consumer warpgroup holds the state in
// registers. Factors never reach device memory; states do where clusters or segments hand them on.
// fused/kernel.cuh is the place to start reading.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/chain/chain.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/segments/device_cut.hpp"

namespace kda::cuda::sm90 {

inline constexpr int kSubchunk = 16;  ///< tokens of a sub-chunk

/// Where the state of a work unit begins and where it ends.
enum class FusedState : int64_t {
  kGiven,       ///< from the initial state or states_in; to the final state, at a sequence's end
  kWhole,       ///< from the initial state; to the final state
  kFirst,       ///< from the initial state; to the start state of the next segment
  kZero,        ///< from zero; to B
  kTransition,  ///< from the identity, with v = 0: outputs go to Qt, the state to M
};

/// Tokens between two norm checks of a transition that may exit early.
inline constexpr int64_t kNormCheckTokens = 1024;
static_assert(kNormCheckTokens % (2 * kSubchunk) == 0);

/// Blocks of a cluster: each has 64 columns of V, and they share factors. K = V = 64 or 128.
constexpr int fused_blocks(int64_t K) { return static_cast<int>(K / 64); }

/// A sequence, or a segment of one. A cluster works on one value head of it at a time.
struct WorkUnit {
  TokenRange tokens;
  int64_t segment;  ///< index into states_in, M and B
  FusedState state;
  int64_t before;  ///< cost of the units before this one, one head (fused/scheduler.cuh)
};
/// 64-bit words that a unit takes on its way to the device.
inline constexpr int64_t kWorkUnitWords = sizeof(WorkUnit) / sizeof(int64_t);

/// Fixed cost of a chain (one head of a unit), in chunks of 64 tokens: it takes 2.6 us, a chunk
/// 2.3 us (K = V = 128).
inline constexpr int64_t kWorkUnitCost = 1;

/// The members of ChainArgs that belong to stages of their own (factors, skip_last, h, vn,
/// num_chunks) keep their defaults, the last three but in KeepArgs.
struct FusedPrefillArgs : ChainArgs {
  unsigned cluster() const { return static_cast<unsigned>(fused_blocks(shape.K)); }  ///< blocks
  RowView q, k, v, g, beta;
  GateView gate;
  /// Operands are fp16: no factor and no decay is above 1, and g has the type of q.
  bool fp16_operands = false;
  /// g has one gate a head. Then, and only then, q/k heads may be tiled (tile/head_gates.hpp).
  bool head_gate = false, tiled = false;

  /// [num_units + 1], of the last one `before` alone; null: one a sequence, state kGiven.
  const WorkUnit* units = nullptr;
  int64_t num_units = 0;
  /// Units that the scheduler spreads over clusters. Those behind them are transitions that may
  /// exit early: a cluster runs at most one head of one of them, after its work range.
  int64_t num_scheduled = 0;
  float* starts = nullptr;  ///< [as B] end states of kFirst, where second segments read them
  void* Qt = nullptr;       ///< outputs of kTransition, with o's strides; fp16 if fp16_operands
  /// With fp16_operands Qt holds its values times a power of two, of which these are the bits.
  uint32_t Qt_scale_bits = 0;
  /// With fp16_operands: what bf16 outputs of kZero lack (fused/output_residual.cuh).
  uint32_t* residual = nullptr;
  uint64_t residual_step = 0;      ///< bytes between two sub-chunks
  int64_t* exit_tokens = nullptr;  ///< [segments of B, HV] tokens at which transitions exited

  int64_t clusters = 0;  ///< at most one a chain
  /// States that one cluster hands to the next, where there are fewer clusters than chains:
  /// [clusters, blocks, 64 K + 256] floats, each lane's accumulators and scale.
  float* handoff_states = nullptr;
  /// [clusters, blocks, 4] words. A word holds handoff_epoch once its state is there; the cluster
  /// that takes the state clears it.
  uint64_t* handoff_flags = nullptr;
  uint64_t handoff_epoch = 0;  ///< of this launch: a value that no word has before

  /// Problem::checkpoint_offsets, [N], with an index of `checkpoints` a sequence. Null: a
  /// checkpoint every checkpoint_every tokens, which else is INT64_MAX.
  const int32_t* checkpoint_offsets = nullptr;
  uint32_t checkpoint_multiple = 16;  ///< of tokens: what an offset is
  /// [as M and B] What they are up to the checkpoint of their segment, if it has one.
  float *checkpoint_M = nullptr, *checkpoint_B = nullptr;
};
/// Arguments of a forward that keeps the state before each chunk and the errors of its tokens, in
/// bf16, for a backward (fused/kept.cuh): h and vn of ChainArgs are where they go, num_chunks
/// counts the chunks of the batch. A backward takes groups of heads, so the tiles of a group follow
/// those of the one before, in each group in the order of chunks. It has no units.
struct KeepArgs : FusedPrefillArgs {
  int64_t group_heads = 0;  ///< value heads of a group; the last group may have fewer
};
/// Bytes of one cluster's handoff state, and of its flags.
constexpr std::size_t handoff_state_bytes(int64_t K) {
  return static_cast<std::size_t>(fused_blocks(K) * (64 * K + 2 * 128)) * sizeof(float);
}
constexpr std::size_t handoff_flag_bytes(int64_t K) {
  return static_cast<std::size_t>(fused_blocks(K)) * 4 * sizeof(uint64_t);
}
/// Bytes of a row of o or Qt, one head.
constexpr std::size_t fused_row_bytes(int64_t K) { return static_cast<std::size_t>(K) * 2; }
/// Bytes of the residuals of a sub-chunk, one head.
constexpr std::size_t residual_bytes(int64_t K) {
  return static_cast<std::size_t>(kSubchunk * K / 2);
}

/// Clusters for so many chains (value heads of units) on a card of `num_sms`.
constexpr int64_t fused_clusters(int64_t chains, int64_t num_sms, int64_t K) {
  const int64_t blocks = fused_blocks(K), most = num_sms < blocks ? 1 : num_sms / blocks;
  return chains < most ? chains : most;
}

/// Words that end with the units, as they will lie in device memory up to the end of `units`.
using FusedWords = std::span<const int64_t>;

/// Takes q, k, v, o in bf16 with g in bf16 or fp32, or all five in fp16 (then fp16_operands, and no
/// gates as logarithms). One gate a head is a logarithm in fp32, with the other tensors in bf16 and
/// K = V = 128. Rows are aligned to 16 bytes, K = V = 64 or 128, and checkpoints lie at multiples
/// of kSubchunk tokens. Up to 256 words travel in the kernel's parameters, and the kernel writes
/// them for kernels after it; more are uploaded before it.
/// `cut`: units, no words, as many as it says; null: the host knows them.
Status launch_fused_prefill(const FusedPrefillArgs& args, FusedWords words, const CutHeader* cut,
                            Launch launch);

/// Keeps beside all that launch_fused_prefill() does. Takes q, k, v and o in bf16 and gates a
/// channel.
Status launch_fused_keep(const KeepArgs& args, Launch launch);

}  // namespace kda::cuda::sm90
