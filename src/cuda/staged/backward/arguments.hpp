// SPDX-License-Identifier: Apache-2.0
// From a checked backward to the arguments of its kernels, a function a struct. Which kernels there
// are to be has been decided (kernels.hpp); in which order they run is in launches.cpp.
#pragma once

#include "cuda/chain/chain.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/segments/segment_merge.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/device_cut.hpp"
#include "cuda/staged/backward/kernels.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/staged/backward/reverse_merge.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "stage/span_maps.hpp"

namespace kda::cuda::staged {

/// The workspace of a group of heads.
struct Blocks {
  Factors factors;
  void *h, *dh, *errors, *dz;
  float* scales;         ///< of these four, if they are in fp16
  bool kept;             ///< h and errors are the forward's, in `saved`
  uint32_t* fallback;    ///< behind the factors and the rows
  uint32_t* fallback_2;  ///< of the second phase
};

/// Memory that segments add; without any `count` is 0. A cut on the device has as many places, some
/// of which are empty.
struct SegmentBlocks {
  int64_t count = 0;
  const int64_t* offsets = nullptr;  ///< [N + 1] segments before each sequence
  SequenceMap sequences;             ///< each segment a sequence
  int32_t *initial_slots = nullptr, *sequence_slots = nullptr;  ///< [count]
  const int32_t* own_slots = nullptr;  ///< [count] of a cut on the device: -1 of an empty place
  /// These are a group's.
  float *M = nullptr, *B = nullptr, *states = nullptr;  ///< states before segments
  float *D = nullptr, *d_states = nullptr;              ///< dS behind segments
};
SegmentBlocks segments_of(const stage::Call& call, const SequenceMaps& maps);

/// The maps of a cut on the device. With no such cut `units` is 0.
CutMaps cut_maps_of(const stage::Call& call);
/// Arguments of the kernel that makes them.
BackwardCutArgs cut_arguments(const stage::Call& call, const SequenceMap& map,
                              const StateView& initial);

/// A group of heads, which is a problem of its own: its tensors begin further on.
struct Group {
  const Plan& plan;
  const BackwardKernels& kernels;
  const SegmentBlocks& segments;
  HeadGates<BackwardArgs> args;
  Blocks blocks;
};

/// The q/k heads from `first` on: `heads` of them, or fewer at the end.
Group group_at(const stage::Call& call, const HeadGates<BackwardArgs>& all,
               const BackwardKernels& kernels, const SegmentBlocks& segments, int64_t first,
               int64_t heads);

/// For a cut on the device: a group for kernels of whole sequences, which are not to run if
/// sequences are cut, and one for kernels of segments.
struct CutFamilies {
  CutFamilies(const Group& group, const CutMaps& maps);
  CutFamilies(const CutFamilies&) = delete;  // groups refer to members
  SegmentBlocks none;
  BackwardKernels kernels;  ///< of segments
  Group whole, cut;
};

/// chunk_intra.
HeadGates<ChunkIntraArgs> intra_arguments(const Group& group);

/// M and B of segments.
ChainArgs scan_arguments(const Group& group);
/// States before segments.
SegmentMergeArgs states_arguments(const Group& group);
/// dS behind segments, from `d_final`; behind an empty first one it is the gradient before the
/// sequence.
SegmentMergeArgs d_states_arguments(const Group& group, const StateView& d_final);
SegmentSequencesArgs sequences_arguments(const SequenceMap& map, const StateView& initial,
                                         const SegmentBlocks& segments);

/// States and errors from left to right. Where the forward has kept them, flags alone are to be
/// written.
ChainArgs errors_arguments(const Group& group);
/// dS and dZ from right to left, all that is wanted of it.
ReverseArgs reverse_arguments(const Group& group);
/// Segments from zero, for D behind none. Hopper's chains leave nothing else; what others leave in
/// dh and dz is written again.
ReverseArgs segments_d_arguments(const Group& group);
/// Whole sequences from zero, for D, which other spans need.
ReverseArgs sequences_d_arguments(const Group& group, const SpanGradients& spans);

/// chunk_grad, of either kernel.
HeadGates<FinishedGradArgs> grad_arguments(const Group& group);
HeadGates<ChunkGradArgs> portable_grad_arguments(const Group& group);
/// The sums for A_log and dt_bias, of as many parts as chunk_grad has left.
BackwardArgs parameter_arguments(const Group& group);

}  // namespace kda::cuda::staged
