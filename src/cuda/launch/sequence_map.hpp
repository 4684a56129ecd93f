// SPDX-License-Identifier: Apache-2.0
// Sequence maps on the device, from host lengths (inside kernel parameters: no copy whose source
// must outlive the call) or from the caller's device cu_seqlens. Capturable either way.
#pragma once

#include <cstddef>

#include "cuda/launch/launch.hpp"
#include "cuda/launch/written_tensor.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

/// Up to four runs of 64-bit words on the host, to be written one after the other.
struct WordPieces {
  static constexpr int kMost = 4;
  const int64_t* source[kMost] = {};
  int64_t count[kMost] = {};
  int pieces = 0;
  void add(const int64_t* words, int64_t number) {
    source[pieces] = words;
    count[pieces++] = number;
  }
};

/// Writes the pieces to device memory; one launch for about 500 words, none for none.
Status launch_upload(int64_t* target, const WordPieces& words, const Launch& launch);

struct SequenceMapArgs {
  const void* raw = nullptr;  ///< the caller's [N + 1]
  bool wide = false;          ///< int64
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;
  int64_t* cu_seqlens = nullptr;     ///< [N + 1] out: clamped to a non-decreasing row of 0..T
  int64_t* chunk_offsets = nullptr;  ///< [N + 1] out
  int32_t* flags = nullptr;          ///< set to kBadSequences or 0
  /// Gets zeros in rows before the first offset and from the last one on: of a call with one batch
  /// entry. No base: none does.
  WrittenTensor rest = {};
  int64_t rest_blocks = 0;  ///< that do it
};

/// One block makes the map: running maxima and sums over the sequences.
Status launch_sequence_map(const SequenceMapArgs& args, const Launch& launch);

}  // namespace kda::cuda
