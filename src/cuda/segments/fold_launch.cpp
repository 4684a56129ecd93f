// SPDX-License-Identifier: Apache-2.0
// fold_states() on a GPU: from the call, which is checked, to its launch.
#include "cuda/segments/fold_states.hpp"

#include <algorithm>
#include <cstdint>

#include "cuda/common/common.hpp"

namespace kda::cuda {

Status fold_states(const StateFold& f) {
  static_assert(sizeof(FoldEntry) == sizeof(FoldStep));
  static_assert(kFoldNone == FoldStep::kNone && kFoldZero == FoldStep::kZero);
  FoldArgs a;
  a.HV = static_cast<int32_t>(f.num_value_heads);
  a.K = static_cast<int32_t>(f.key_dim), a.V = static_cast<int32_t>(f.value_dim);
  a.num_maps = f.num_maps, a.map_stride = f.map_stride;
  a.maps_per_row = f.maps_per_row > 0 ? f.maps_per_row : std::max<int64_t>(f.num_maps, 1);
  a.row_stride = f.row_stride;
  a.M = f.M, a.A = f.A;
  a.num_starts = f.num_starts, a.starts = f.starts;
  a.num_states = f.num_states, a.states = f.states;
  a.num_steps = static_cast<int64_t>(f.steps.size());
  a.steps = reinterpret_cast<const FoldEntry*>(f.device_steps);
  for (const FoldStep& step : f.steps) a.num_chains += step.start != FoldStep::kNone;
  const bool vectors = reinterpret_cast<std::uintptr_t>(f.M) % 16 == 0 && f.key_dim % 4 == 0 &&
                       f.map_stride % 4 == 0 && a.row_stride % 4 == 0;
  return launch_fold_states(a, f.transposed, vectors, {f.stream});
}

}  // namespace kda::cuda
