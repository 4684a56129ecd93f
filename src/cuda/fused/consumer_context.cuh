// SPDX-License-Identifier: Apache-2.0
// Knowledge of a consumer thread: its part of the state, and what scales it. The steps of its work
// are functions of this context: state_scale.cuh, state_transfer.cuh, consumer.cuh.
#pragma once

#include <type_traits>

#include "cuda/chain/chain.cuh"
#include "cuda/fused/output_residual.cuh"
#include "cuda/fused/scheduler.cuh"
#include "cuda/fused/shared_storage.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace kda::cuda::sm90::fused {

/// Where outputs go. They are bf16 or fp16, as the call has them; those that will be corrected
/// leave in the residual what bf16 lacks (fp16 has as many digits as that); Qt is fp16, times a
/// power of two. Each has a loop of its own: as questions in one loop they cost 4 to 10%.
enum class Outputs { kRounded, kWithResidual, kQt };

/// Scale of a warp's state (state_scale.cuh).
struct StateScale {
  int exponent = 0;    // the state is times 2 to this
  float headroom = 0;  // |v| of this lane that may add up until its warp looks at its state
};

/// A warp holds S^T of 16 columns of V: rows v of the accumulators, all of K in their columns. An
/// accumulator pair of columns, rounded, is an A operand as it stands. InputT: the type of v and o.
template <int kChannels, class InputT, class OperandType, bool kUnits,
          class Form = ClusterForm<kChannels>>
struct ConsumerContext {
  static constexpr int kK = kChannels;
  using T = InputT;
  using Operand = OperandType;
  static constexpr bool kSegments = kUnits;
  static constexpr bool kKeeps = false;  // states and errors for a backward (kept.cuh)
  static constexpr int kBlocks = Form::kBlocks, kColumnTiles = Form::kColumnTiles;
  static constexpr bool kHopper = Form::kHopper;
  static constexpr int kTiles = kK / 8;   // n8 tiles of S^T
  static constexpr int kSteps = kK / 16;  // k16 steps over channels
  /// Segments with operands in fp16 have outputs that need more digits than bf16: Qt in fp16, and o
  /// with a residual. (With operands in bf16 Qt is bf16, stored as o is.)
  static constexpr bool kHasQt = kSegments && kFp16<Operand>;
  static constexpr bool kHasResidual = kHasQt && std::is_same_v<T, __nv_bfloat16>;

  const FusedPrefillArgs& a;
  int64_t head, unit;  // unit: index into states_in (WorkItem::segment), not of the work unit
  TokenRange tokens;
  int column;       // first state column of this warp, of V
  int tile_column;  // the same within the block's 64 columns
  float state[kTiles][4];
  const int lane;  // out of a shuffle: else the thread's index is asked for in every sub-chunk
  StateScale scale;
  char* residual = nullptr;  // where this lane's residual of the next sub-chunk goes

  __device__ explicit ConsumerContext(const FusedPrefillArgs& args)
      : a(args),
        lane(__shfl_sync(0xffffffff, static_cast<int>(threadIdx.x % 32),
                         static_cast<int>(threadIdx.x % 32))) {}

  __device__ static int rank() { return Form::rank(); }  // of the block
  __device__ void take(const WorkItem& item) {
    head = head_of<kColumnTiles>(item);
    if constexpr (kColumnTiles > 1) column = column_tile<kColumnTiles>(item) * kVTile + tile_column;
    unit = item.segment;
    tokens = item.tokens;
  }
};

}  // namespace kda::cuda::sm90::fused
