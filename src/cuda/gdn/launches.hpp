// SPDX-License-Identifier: Apache-2.0
// Launches of Gated DeltaNet's forward, from checked calls: the functions of its row, and what a
// backward makes alike.
#pragma once

#include "core/return_if_error.hpp"
#include "cuda/gdn/device_cut.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/gdn/intra_sm90.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "plan/ledger.hpp"
#include "stage/forward.hpp"
#include "stage/segment_merge.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::gdn {

/// Where a call has the factors of its chunks, and what the kernel that makes them is given.
Factors factors_of(const stage::Call& call);
HeadGates<IntraArgs> intra_args(const stage::Call& call, const SequenceMaps& maps);

/// The maps of a call, with the segments of the plan or those that a kernel makes by `model`.
template <class Model>
Status make_maps(const stage::Call& call, const Model& model, std::span<const Segment> segments,
                 bool prepared, SequenceMaps* maps) {
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, segments, prepared, maps));
  const Plan& plan = *call.plan;
  if (!plan.device_cut.on) return {};
  auto* words = static_cast<int64_t*>(plan::find_block(plan, call.workspace, block::kDeviceCut));
  const int64_t N = plan.problem.num_sequences;
  const CutArgs<Model> args{maps->map, model, staged::fixed_segments(plan),
                            cut_maps(words, N, N + plan.device_cut.most_behind)};
  maps->segment_offsets = args.out.segment_offsets;
  maps->map.segments = args.out.segments;
  maps->map.num_segments = args.out.places;
  return prepared ? Status{} : launch_cut(args, {call.stream, true});
}

Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);

}  // namespace kda::cuda::gdn
