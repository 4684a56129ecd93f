// SPDX-License-Identifier: Apache-2.0
// Launches of Gated DeltaNet's forward, from checked calls: the functions of its row, and what a
// backward makes alike.
#pragma once

#include "core/return_if_error.hpp"
#include "cuda/gdn/device_cut.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/gdn/intra_sm90.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "stage/forward.hpp"
#include "stage/segment_merge.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::gdn {

/// Where a call has the factors of its chunks, and what the kernel that makes them is given.
Factors factors_of(const stage::Call& call);
HeadGates<IntraArgs> intra_args(const stage::Call& call, const SequenceMaps& maps);

/// The maps of a call, with the segments of the plan or places for those that a kernel makes.
Status make_maps(const stage::Call& call, std::span<const Segment> segments, bool prepared,
                 SequenceMaps* maps);

CutMaps cut_maps_of(const stage::Call& call);

/// Launches `intra`, and behind it the kernel that cuts by `model`, where one does.
template <class Args, class Model>
Status launch_factors(const stage::Call& call, const SequenceMaps& maps, Args intra,
                      const Model& model, const Launch& where) {
  intra.early = call.plan->device_cut.on;
  KDA_RETURN_IF_ERROR(launch_intra(intra, where));
  if (!intra.early) return {};
  return launch_cut(
      CutArgs<Model>{maps.map, model, staged::fixed_segments(*call.plan), cut_maps_of(call)},
      {call.stream, true});
}

Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);

}  // namespace kda::cuda::gdn
