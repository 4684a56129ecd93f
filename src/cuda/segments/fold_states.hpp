// SPDX-License-Identifier: Apache-2.0
// States folded over gathered maps (include/kda/span.hpp): S = M S + A, step by step, in fp32.
#pragma once

#include "cuda/launch/launch.hpp"

namespace kda::cuda {

/// One step, as in the caller's table.
struct FoldEntry {
  int64_t start, map, store;
};
inline constexpr int64_t kFoldNone = -1, kFoldZero = -2;

/// Map i lies (i / maps_per_row) row_stride + (i % maps_per_row) map_stride floats behind M and A.
struct FoldArgs {
  int32_t HV = 0, K = 0, V = 0;
  int64_t num_maps = 0, maps_per_row = 1, map_stride = 0, row_stride = 0;
  const float* M = nullptr;  ///< [HV, K, K] a map
  const float* A = nullptr;  ///< [HV, K, V] a map
  int64_t num_starts = 0;
  const float* starts = nullptr;  ///< [num_starts, HV, K, V]
  int64_t num_states = 0;
  float* states = nullptr;  ///< [num_states, HV, K, V]
  int64_t num_steps = 0;
  const FoldEntry* steps = nullptr;  ///< device memory
  int64_t num_chains = 0;            ///< steps with a start; each begins a chain of its own blocks
};

/// `transposed`: M^T in the place of M. `vectors`: rows of M may be read 16 bytes at a time.
Status launch_fold_states(const FoldArgs& args, bool transposed, bool vectors,
                          const Launch& launch);

}  // namespace kda::cuda
