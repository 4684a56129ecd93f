// SPDX-License-Identifier: Apache-2.0
// Decode: a few tokens a sequence against a state pool in place, or from one buffer of states to
// another. The state is read once and written once (once a token with an index column a token), and
// nothing else is of size: the time is that of a copy of the states. A block has half a head of one
// sequence; its warps hold the state in registers. The token's rows are asked for, then the state,
// and only then is anything waited for; the warps meet once a token, when its q, k and decays are
// ready.
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

struct DecodeArgs {
  Shape shape;
  SequenceMap map;
  /// The caller's cu_seqlens [N + 1] where only the device knows them (the map has none then): a
  /// block reads its two, so that no kernel has to check them first. Clamped to 0..T; where they
  /// decrease, a sequence is empty or shares tokens with another.
  const void* lengths = nullptr;
  bool wide_lengths = false;  ///< int64
  RowView q, k, v, g, beta, o;
  GateView gate;
  StateView initial;      ///< base null: zeros; in place, indices [N, index_columns]
  StateView target;       ///< where states go: the same buffer in place
  bool in_place = false;  ///< a sequence without a slot is skipped
  int64_t index_columns = 1;
  const int32_t* num_accepted =
      nullptr;                ///< [N]; sequence n starts from column num_accepted[n] - 1
  bool zero_skipped = false;  ///< o is 0 where no token is computed
  int32_t* flags = nullptr;   ///< MetadataFlag bits, or null
  uint32_t ahead = 0;  ///< how many blocks on is the one whose state a block prefetches; 0: none
};

Status launch_decode(const DecodeArgs& args, const Launch& launch);

}  // namespace kda::cuda
