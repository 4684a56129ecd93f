// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block of decode with a tail.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace kda::cuda::tail {

constexpr int kMostWarps = 8;  // of a block
constexpr int kRound = 16;     // rows whose scores are summed over channels together
/// Scores of a round: those of k and of q, of 32 channels each.
KDA_HOST_DEVICE_INLINE constexpr int32_t sums_of_round(int32_t keys) {
  return 2 * (keys / 32) * kRound;
}

/// Channels of the kernel that serves K, or fewer of them.
KDA_HOST_DEVICE_INLINE int32_t channels_of(int64_t K) {
  return K <= 64 ? 64 : K <= 128 ? 128 : 256;
}

/// Arrays of floats, one behind the other.
struct Layout {
  int32_t keys = 0;     ///< floats of a row of channels; those past K are 0
  int32_t columns = 0;  ///< of a row of values
  int32_t rows = 0;     ///< of the tail and of the tokens behind it
  int32_t tokens = 0;
  int32_t rounds = 0;

  /// `keys`: as channels_of() has them.
  KDA_HOST_DEVICE_INLINE static Layout of(int32_t R, int32_t tokens, int32_t keys, int32_t V) {
    const int32_t rows = R + tokens;
    return {keys, (V + 31) / 32 * 32, rows, tokens, (rows + kRound - 1) / kRound};
  }
  KDA_HOST_DEVICE_INLINE int32_t decays() const { return rows * keys; }
  KDA_HOST_DEVICE_INLINE int32_t v_new() const { return decays() + rows * keys; }
  KDA_HOST_DEVICE_INLINE int32_t q() const { return v_new() + rows * columns; }
  KDA_HOST_DEVICE_INLINE int32_t v() const { return q() + tokens * keys; }
  KDA_HOST_DEVICE_INLINE int32_t with_k() const { return v() + tokens * columns; }
  KDA_HOST_DEVICE_INLINE int32_t with_q() const { return with_k() + keys; }
  KDA_HOST_DEVICE_INLINE int32_t bias() const { return with_q() + keys; }
  KDA_HOST_DEVICE_INLINE int32_t scores() const { return bias() + keys; }
  KDA_HOST_DEVICE_INLINE int32_t a_log() const { return scores() + rounds * sums_of_round(keys); }
  KDA_HOST_DEVICE_INLINE int32_t qk() const { return a_log() + 32; }
  KDA_HOST_DEVICE_INLINE int32_t beta() const { return qk() + tokens; }
  KDA_HOST_DEVICE_INLINE int32_t before() const { return beta() + tokens; }
  KDA_HOST_DEVICE_INLINE int32_t floats() const { return before() + tokens; }
};

/// Shared memory of a block, in bytes.
inline int64_t shared_bytes(int64_t R, int64_t tokens, int64_t K, int64_t V) {
  return 4 * Layout::of(static_cast<int32_t>(R), static_cast<int32_t>(tokens), channels_of(K),
                        static_cast<int32_t>(V))
                 .floats();
}

}  // namespace kda::cuda::tail
