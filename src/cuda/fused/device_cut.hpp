// SPDX-License-Identifier: Apache-2.0
// Cuts sequences where only the device knows their lengths: the cut that auto_partition()
// (fused/cost.hpp) makes of the same lengths on the host, bit for bit, since both call the same
// functions. It takes the place of the kernel that makes the maps of sequences.
#pragma once

#include "cuda/fused/cut_model.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/launch/sequence_map.hpp"
#include "cuda/segments/device_cut.hpp"
#include "kda/plan.hpp"

namespace kda::cuda::sm90 {

/// Bytes of shared memory that the kernel needs for a sequence, and for one more.
inline constexpr int kDeviceCutEntryBytes = 16;
inline constexpr int64_t kMostDeviceCutSequences = 12000;  ///< these fit

/// The cut where one sequence has all tokens; others of 0 chunks: it stays whole.
struct WholeCut {
  plan::CutLengths<int> lengths;
  int early_exit = 0;
};
/// That of a plan from bounds.
inline WholeCut guess_of(const DeviceCut& cut) {
  return {{static_cast<int>(cut.first_chunks), static_cast<int>(cut.segment_chunks)},
          cut.early_exit ? 1 : 0};
}

struct DeviceCutArgs {
  SequenceMapArgs map;  ///< of less than 2^30 tokens
  fused::CutModel model;
  WholeCut guess;                     ///< of one sequence
  CutHeader* cut = nullptr;           ///< out
  int64_t* offsets_behind = nullptr;  ///< out [N + 1] segments behind first ones before a sequence
  WorkUnit* units = nullptr;  ///< out: segments, then transitions, then where the schedule ends
};

/// One block. It waits for the kernels before it itself (ptx/pdl.cuh).
Status launch_device_cut(const DeviceCutArgs& args, const Launch& launch);

}  // namespace kda::cuda::sm90
