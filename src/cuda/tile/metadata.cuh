// SPDX-License-Identifier: Apache-2.0
// Flags of bad device metadata. One block looks at all of it while the others compute; each of
// them skips what is out of range by itself.
#pragma once

#include "cuda/tile/elements.cuh"

namespace kda::cuda {

struct MetadataArgs {
  int32_t* flags = nullptr;
  bool accumulate = false;
  SequenceMap map;
  int64_t index_columns = 1;
  int64_t num_checkpoints = 0;
  const int32_t* num_accepted = nullptr;
  int64_t most_tokens = INT64_MAX;  ///< of a sequence, in decode
};

__device__ inline bool any_index_outside(const int32_t* indices, int64_t count, int64_t slots) {
  bool outside = false;
  for (int64_t i = threadIdx.x; indices && i < count; i += blockDim.x)
    outside |= indices[i] >= slots;
  return outside;
}

/// Called by every thread of one block.
__device__ inline void write_metadata_flags(const MetadataArgs& m, const StateView& initial,
                                            const StateView& final_state,
                                            const StateView& checkpoints) {
  int32_t mine = 0;
  const int64_t N = m.map.num_sequences;
  if (any_index_outside(initial.indices, N * m.index_columns, initial.num_slots))
    mine |= kBadInitialIndex;
  if (any_index_outside(final_state.indices, N, final_state.num_slots)) mine |= kBadFinalIndex;
  if (any_index_outside(checkpoints.indices, m.num_checkpoints, checkpoints.num_slots))
    mine |= kBadCheckpointIndex;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    if (m.num_accepted && (m.num_accepted[n] < 1 || m.num_accepted[n] > m.index_columns))
      mine |= kBadAcceptedTokens;
    const TokenRange tokens = sequence_range(m.map, n);
    if (tokens.end - tokens.begin > m.most_tokens) mine |= kTooManyDecodeTokens;
  }
  int32_t all = 0;
  for (int bit = 1; bit <= kTooManyDecodeTokens; bit <<= 1)
    if (__syncthreads_or(mine & bit)) all |= bit;
  if (threadIdx.x == 0) *m.flags = (m.accumulate ? *m.flags : 0) | all;
}

/// Number of checkpoints of the sequences before `n`; every thread of the block takes part.
__device__ inline int64_t checkpoints_before(const SequenceMap& map, int64_t every, int64_t n) {
  if (!map.cu_seqlens) return n * (map.num_tokens / every);
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
    mine += static_cast<unsigned long long>((map.cu_seqlens[i + 1] - map.cu_seqlens[i]) / every);
  if (mine) atomicAdd(&sum, mine);  // integers: any order gives the same sum
  __syncthreads();
  return static_cast<int64_t>(sum);
}

}  // namespace kda::cuda
