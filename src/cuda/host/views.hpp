// SPDX-License-Identifier: Apache-2.0
// From a checked Call to what kernels are given.
#pragma once

#include <span>

#include "cuda/host/launch.hpp"
#include "cuda/tile/arguments.hpp"
#include "stage/forward.hpp"

namespace kda::cuda {

RowView row_view(const TensorDesc& desc, const void* base);
StateView state_view(const Problem& p, const std::optional<StateDesc>& desc, void* base,
                     const int32_t* indices, const uint8_t* mask);
/// Dense fp32 states [spans, HV, K, columns] of segments.
StateView span_states(const Problem& p, const float* base, int64_t columns);
GateView gate_view(const Problem& p, const Tensors& t);
Shape shape_of(const Problem& p);

/// The maps of a call, uploaded or made on the device in the workspace.
struct Maps {
  SequenceMap map;
  const int64_t* segment_offsets = nullptr;
  int32_t* flags = nullptr;       ///< null: no device metadata to flag
  bool accumulate_flags = false;  ///< the map kernel has set the word
};

/// Launches what makes the maps: nothing for a plain batch; one kernel for cu_seqlens or segments
/// (a few for thousands of sequences). `prepared`: an earlier stage of this run() has made them.
Status make_maps(const stage::Call& call, std::span<const Segment> segments, bool prepared,
                 Maps* maps);

}  // namespace kda::cuda
