// SPDX-License-Identifier: Apache-2.0
// One checkpoint a sequence, at an offset that only the device knows.
#pragma once

#include "cuda/chain/chain.cuh"
#include "cuda/fused/fused_prefill.hpp"

namespace kda::cuda::sm90::fused {

/// Tokens of a sequence before its checkpoint; 0: it has none. Args: FusedPrefillArgs or
/// SegmentCorrectArgs.
template <class Args>
__device__ inline int64_t checkpoint_offset(const Args& a, const TokenRange& sequence) {
  const int32_t offset = a.checkpoint_offsets[sequence.sequence];
  const bool fits = offset > 0 && offset <= sequence.end - sequence.begin &&
                    static_cast<uint32_t>(offset) % a.checkpoint_multiple == 0;
  return fits ? offset : 0;
}

/// The first block reports metadata that it cannot use. An offset that is none of a sequence is
/// reported where the sequence could have a checkpoint.
__device__ inline void write_flags(const FusedPrefillArgs& a) {
  chain::write_flags<ChainUse::kForward>(a);  // which sees no checkpoint where there are offsets
  if (!a.checkpoint_offsets || blockIdx.x != 0 || !a.flags) return;
  bool bad = false;
  for (int64_t n = threadIdx.x; n < a.map.num_sequences; n += blockDim.x) {
    const TokenRange sequence = sequence_range(a.map, n);
    const int64_t index = a.checkpoints.indices[n];
    const bool none = is_none(a.checkpoints, index) || a.checkpoint_offsets[n] <= 0 ||
                      sequence.end - sequence.begin < a.checkpoint_multiple;
    bad |= !none && (index >= a.checkpoints.num_slots || checkpoint_offset(a, sequence) == 0);
  }
  if (__syncthreads_or(bad) && threadIdx.x == 0) *a.flags |= kBadCheckpointIndex;
}

}  // namespace kda::cuda::sm90::fused
