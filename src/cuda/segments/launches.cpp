// SPDX-License-Identifier: Apache-2.0
#include "cuda/segments/launches.hpp"

#include <algorithm>
#include <cstdint>

#include "core/text.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/segments/fold_states.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/segments/segment_merge_sm90.hpp"

namespace kda::cuda {

SegmentMergeArgs merge_args(const stage::SegmentMerge& merge, const SequenceMaps& maps) {
  const stage::Call& call = merge.call;
  SegmentMergeArgs args;
  args.shape = shape_of(call.problem);
  args.map = maps.map;
  args.segment_offsets = maps.segment_offsets;
  args.initial = initial_view(call.problem, call.tensors);
  args.M = merge.M;
  args.B = merge.B;
  args.states_in = merge.states_in;
  return args;
}

Status segment_merge(const stage::SegmentMerge& merge) {
  const stage::Call& call = merge.call;
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, merge.segments, merge.prepared, &maps));
  return launch_merge(merge_args(merge, maps),
                      merges_on_hopper(call.plan->device, call.problem.key_dim), {call.stream});
}

Status launch_merge(const SegmentMergeArgs& args, bool hopper, const Launch& where) {
  if constexpr (sm90::kBuilt)
    if (hopper) return sm90::launch_segment_merge({args}, where);
  return launch_segment_merge(args, where);
}

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
