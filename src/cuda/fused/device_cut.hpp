// SPDX-License-Identifier: Apache-2.0
// Cuts sequences where only the device knows their lengths: the cut that auto_partition()
// (fused/cost.hpp) makes of the same lengths on the host, bit for bit, since both call the same
// functions. It takes the place of the kernel that makes the maps of sequences.
#pragma once

#include "cuda/fused/cost.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/launch/sequence_map.hpp"
#include "cuda/segments/device_cut.hpp"

namespace kda::cuda::sm90 {

struct DeviceCutArgs {
  SequenceMapArgs map;
  /// The problem and the card; the kernel fills in what follows from lengths.
  CostInput input;
  fused::Costs costs;
  int64_t check_tokens = 0;  ///< transitions may exit early, looked at so often; 0: they must not
  CutHeader* cut = nullptr;  ///< out
  int64_t* offsets_behind = nullptr;  ///< out [N + 1] segments behind first ones before a sequence
  WorkUnit* units = nullptr;  ///< out: segments, then transitions, then where the schedule ends
  int64_t* exit_tokens = nullptr;  ///< out [num_behind, HV] ends of segments, without early exit
};

/// One block. It waits for the kernels before it itself (ptx/pdl.cuh).
Status launch_device_cut(const DeviceCutArgs& args, const Launch& launch);

}  // namespace kda::cuda::sm90
