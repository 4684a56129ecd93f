// SPDX-License-Identifier: Apache-2.0
// The whole forward in one kernel: producer warps make the factors of runs of 16 tokens in shared
// memory, a consumer warpgroup holds the state. Nothing but inputs and outputs goes through device
// memory.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/staged/chunk_delta_h.hpp"

namespace kda::cuda::sm90 {

inline constexpr int kSubchunk = 16;  ///< tokens of a run

/// Where the state of a span begins and ends.
enum class FusedState : int64_t {
  kGiven,       ///< initial state or states_in; final state, if it is the last of its sequence
  kWhole,       ///< initial state; final state
  kFirst,       ///< initial state; the start of the segment behind it
  kZero,        ///< zero; B
  kTransition,  ///< the identity, with v = 0: outputs to Qt; M
};

/// After every so many tokens a transition that may stop early is looked at.
inline constexpr int64_t kNormCheckTokens = 1024;
static_assert(kNormCheckTokens % (2 * kSubchunk) == 0);

/// Blocks of a cluster, which share factors: 64 columns of V each. K = V = 64 or 128.
constexpr int fused_blocks(int64_t K) { return static_cast<int>(K / 64); }

/// What a cluster does one head at a time: a sequence, or a segment of one.
struct WorkUnit {
  Span span;
  int64_t segment;  ///< of states_in, M and B
  FusedState state;
  int64_t before;  ///< place in the line of all units (fused/scheduler.cuh)
};
/// Words of a unit on its way to the device.
inline constexpr int64_t kWorkUnitWords = sizeof(WorkUnit) / sizeof(int64_t);

/// What a unit costs besides its chunks of 64 tokens, in such chunks (2.6 us, one takes 2.3; K = V
/// = 128).
inline constexpr int64_t kWorkUnitCost = 1;

struct FusedPrefillArgs : ChainArgs {  // without its factors
  unsigned cluster() const { return static_cast<unsigned>(fused_blocks(shape.K)); }  ///< blocks
  RowView q, k, v, g, beta;
  GateView gate;
  /// Operands are fp16: no factor and no decay is above 1, and g is as narrow as q.
  bool fp16_operands = false;

  const WorkUnit* units = nullptr;  ///< [num_units + 1]; null: one a sequence, state kGiven
  int64_t num_units = 0;
  /// The units behind these are transitions that stop where M is small, at most one stream of them
  /// a cluster, which runs it after its share of the line.
  int64_t num_scheduled = 0;
  float* starts = nullptr;  ///< like B: states after first segments, where second ones read them
  void* Qt =
      nullptr;  ///< outputs of kTransition, with the strides of o; of `fp16_operands`, in fp16
  uint32_t Qt_scale_bits = 0;  ///< of `fp16_operands`: bits of the power of two that they are times
  uint32_t* residual =
      nullptr;  ///< of `fp16_operands`: what bf16 outputs of kZero lack (fused/output_residual.cuh)
  uint64_t residual_step = 0;      ///< bytes of a run
  int64_t* exit_tokens = nullptr;  ///< [segments of B, HV] tokens at which such transitions stopped

  int64_t clusters = 0;  ///< clusters: at most one a stream
  /// States between shares, where there are fewer of them than streams: [shares, blocks, 64 K +
  /// 256], in the order of the threads that hold them, and what scales them; and words that say
  /// which are there: [shares, blocks, 4]. A word has the key where its state is there; who takes
  /// the state over clears it.
  float* handoff_states = nullptr;
  uint64_t* handoff_flags = nullptr;
  uint64_t handoff_epoch = 0;  ///< of this launch: what no word has before
};
/// Of K = V: a state handed on, and its words; a row of o and Qt of a head; rests of a run and
/// head.
constexpr std::size_t handoff_state_bytes(int64_t K) {
  return static_cast<std::size_t>(fused_blocks(K) * (64 * K + 2 * 128)) * sizeof(float);
}
constexpr std::size_t handoff_flag_bytes(int64_t K) {
  return static_cast<std::size_t>(fused_blocks(K)) * 4 * sizeof(uint64_t);
}
constexpr std::size_t fused_row_bytes(int64_t K) { return static_cast<std::size_t>(K) * 2; }
constexpr std::size_t residual_bytes(int64_t K) {
  return static_cast<std::size_t>(kSubchunk * K / 2);
}

/// Of a problem with so many streams (value heads of units), on a card of `num_sms`.
constexpr int64_t fused_clusters(int64_t streams, int64_t num_sms, int64_t K) {
  const int64_t blocks = fused_blocks(K), most = num_sms < blocks ? 1 : num_sms / blocks;
  return streams < most ? streams : most;
}

/// Words that end with the units, as they will lie in device memory up to the end of `units`.
using FusedWords = std::span<const int64_t>;

/// q, k, v, o bf16, g bf16 or fp32; or all five fp16, `fp16_operands` and no gates as logarithms;
/// rows aligned to 16 bytes; K = V = 64 or 128; checkpoints at multiples of kSubchunk tokens. Few
/// words come with the kernel's parameters and it writes them, for kernels after it; more are
/// uploaded before it.
Status launch_fused_prefill(const FusedPrefillArgs& args, FusedWords words, Launch launch);

}  // namespace kda::cuda::sm90
