// SPDX-License-Identifier: Apache-2.0
// A cut that was made on the device, as the kernels behind it read it: in the workspace, since its
// numbers follow from lengths that only the device knows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.hpp"

namespace kda::cuda {

struct CutHeader {
  int64_t num_segments = 0;    ///< of all sequences; one of a sequence that is not cut
  int64_t num_behind = 0;      ///< behind the first ones of their sequences: those with transitions
  int64_t most_behind = 0;     ///< of a sequence
  int64_t longest_behind = 0;  ///< tokens that none of them is longer than
  int64_t num_cut = 0;         ///< sequences that are cut
  int64_t early_exit = 0;      ///< 1: transitions may exit early, and are not in the schedule
};

/// Words of the block that has a CutHeader, then a word a cut sequence (which one), of at most
/// `most_cut`.
constexpr int64_t device_cut_words(int64_t most_cut) {
  return static_cast<int64_t>(sizeof(CutHeader) / sizeof(int64_t)) + most_cut;
}
/// Which sequences are cut, in order.
template <class Cut>
KDA_HOST_DEVICE constexpr auto* cut_sequences(Cut* cut) {
  return &cut[1].num_segments;
}

}  // namespace kda::cuda
