// SPDX-License-Identifier: Apache-2.0
// Stage segment_merge, of both backends.
#include "cuda/segments/launches.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/segments/segment_merge_sm90.hpp"

namespace kda::cuda {

Status segment_merge(const stage::SegmentMerge& merge) {
  const stage::Call& call = merge.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, merge.segments, merge.prepared, &maps));
  SegmentMergeArgs args;
  args.shape = shape_of(call.problem);
  args.map = maps.map;
  args.segment_offsets = maps.segment_offsets;
  args.initial = initial_view(call.problem, call.tensors);
  args.M = merge.M;
  args.B = merge.B;
  args.states_in = merge.states_in;
  return launch_merge(args, call.plan->device, {call.stream});
}

Status launch_merge(const SegmentMergeArgs& args, const DeviceFacts& device, const Launch& where) {
  const int64_t K = args.shape.K;
  if (sm90::kBuilt && device.compute_capability == 90 && (K == 64 || K == 128))
    return sm90::launch_segment_merge({args}, where);
  return launch_segment_merge(args, where);
}

}  // namespace kda::cuda
