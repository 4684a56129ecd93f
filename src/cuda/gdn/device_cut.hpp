// SPDX-License-Identifier: Apache-2.0
// Cuts sequences where only the device knows their lengths: the cut that cheapest_cut() (cost.hpp)
// makes of the same lengths on the host, bit for bit, since both call the same functions.
//
// Where nothing is cut, the last word of segment_offsets is 0 and the first places hold whole
// sequences. The forward has chains of what the places hold. The backward launches chains of whole
// sequences and those of segments, one of which ends at once.
#pragma once

#include "cuda/gdn/backward/cut_model.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda::gdn {

/// The cut, in the workspace: places for N + most_behind segments.
struct CutMaps {
  int64_t places = 0;
  int64_t* segment_offsets = nullptr;  ///< [N + 1] before each sequence; all 0 where nothing is cut
  TokenRange* segments = nullptr;  ///< [places] those that there are, or sequences where nothing
                                   ///< is cut; then empty ones
  int64_t* followed = nullptr;     ///< [places - N] the segments that have one behind them, as many
                                   ///< as there are
};
/// Words of 64 bits that they take.
constexpr int64_t cut_maps_words(int64_t N, int64_t places) {
  return N + 1 + 3 * places + (places - N);
}
inline CutMaps cut_maps(int64_t* words, int64_t N, int64_t places) {
  return {places, words, reinterpret_cast<TokenRange*>(words + N + 1), words + N + 1 + 3 * places};
}

/// Model: CutModel of a forward, BackwardModel.
template <class Model>
struct CutArgs {
  SequenceMap map;  ///< with cu_seqlens and chunk_offsets, of at most kMostCutTokens
  Model model;
  int64_t fixed_segments = 0;  ///< of each sequence, as far as it has chunks; 0: by predicted times
  CutMaps out;
};

/// The kernel counts tokens in 32 bits.
inline constexpr int64_t kMostCutTokens = int64_t{1} << 30;

/// One block, behind gdn_intra with IntraArgs::early: it waits for that launch at its end alone, so
/// that what waits for the cut has the factors too.
Status launch_cut(const CutArgs<CutModel>& args, const Launch& launch);
Status launch_cut(const CutArgs<BackwardModel>& args, const Launch& launch);

}  // namespace kda::cuda::gdn
