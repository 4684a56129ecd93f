// SPDX-License-Identifier: Apache-2.0
// Cuts sequences for a backward where only the device knows their lengths: the cut that
// auto_backward_partition() (cost.hpp) makes of the same lengths on the host, bit for bit, since
// both call the same functions.
//
// Kernels of whole sequences and kernels of segments are launched, and one of the two families has
// nothing to do: its maps have no chunk, and none of its states has a slot.
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/staged/backward/cut_model.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda::staged {

/// The kernel counts tokens in 32 bits.
inline constexpr int64_t kMostDeviceCutTokens = int64_t{1} << 30;

/// The cut, in the workspace. `units` places for segments, N + most_behind: those that no sequence
/// has are empty.
struct CutMaps {
  int64_t units;
  int64_t* segment_offsets;  ///< [N + 1] segments before each sequence; all 0 where nothing is cut
  TokenRange* segments;      ///< [units]
  int64_t *cu_seqlens, *chunk_offsets;  ///< [units + 1] of a map where each segment is a sequence
  int64_t* cut_chunk_offsets;           ///< [N + 1] of sequences, for segments: 0 if not cut
  int64_t *whole_cu_seqlens, *whole_chunk_offsets;  ///< [N + 1] for whole sequences: 0 if cut
  int32_t* initial_slots;   ///< [units] of first segments, as the initial states have it, else -1
  int32_t* sequence_slots;  ///< [units] of first segments their sequence, else -1
  int32_t* own_slots;       ///< [units] its number, or -1 of an empty place
  int32_t* whole_slots;     ///< [N] the sequence, or -1 if cut
};

/// Words of 64 bits that they take.
constexpr int64_t cut_maps_words(int64_t N, int64_t units) {
  const int64_t slots = 3 * units + N;
  return 4 * (N + 1) + 3 * units + 2 * (units + 1) + (slots + 1) / 2;
}

inline CutMaps cut_maps(int64_t* words, int64_t N, int64_t units) {
  const auto take = [&](int64_t count) {
    int64_t* place = words;
    words += count;
    return place;
  };
  CutMaps maps;
  maps.units = units;
  maps.segment_offsets = take(N + 1);
  maps.segments = reinterpret_cast<TokenRange*>(take(3 * units));
  maps.cu_seqlens = take(units + 1);
  maps.chunk_offsets = take(units + 1);
  maps.cut_chunk_offsets = take(N + 1);
  maps.whole_cu_seqlens = take(N + 1);
  maps.whole_chunk_offsets = take(N + 1);
  maps.initial_slots = reinterpret_cast<int32_t*>(words);
  maps.sequence_slots = maps.initial_slots + units;
  maps.own_slots = maps.sequence_slots + units;
  maps.whole_slots = maps.own_slots + units;
  return maps;
}

struct BackwardCutArgs {
  SequenceMap map;    ///< with cu_seqlens and chunk_offsets, of at most kMostDeviceCutTokens
  StateView initial;  ///< of the forward
  BackwardModel model;
  int64_t fixed_segments = 0;  ///< of each sequence, as far as it has chunks; 0: by predicted times
  CutMaps out;
};

/// One block.
Status launch_backward_cut(const BackwardCutArgs& args, const Launch& launch);

}  // namespace kda::cuda::staged
