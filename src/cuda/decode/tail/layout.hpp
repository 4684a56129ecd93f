// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block of decode with a tail.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.hpp"
#include "kda/problem.hpp"

namespace kda::cuda::tail {

constexpr int kMostWarps = 8;  // of a block
constexpr int kPart = 32;      // channels of which a warp makes rows that are not dense, one a lane
constexpr int kBatch = 8;      // tokens whose scores are made before any of them is solved

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
  int32_t batch = 0;  ///< of tokens
  /// Whether S_0^T k and S_0^T q have room of their own, not that of v_new to come and of q.
  bool products_apart = true;

  /// `keys`: as channels_of() has them.
  KDA_HOST_DEVICE_INLINE static Layout of(int32_t sure, int32_t tokens, int32_t keys, int32_t V,
                                          bool products_apart = true) {
    const int32_t batch = tokens < kBatch ? tokens : kBatch;
    return {keys, (V + 31) / 32 * 32, sure + tokens, tokens, batch, products_apart};
  }
  KDA_HOST_DEVICE_INLINE int32_t parts() const { return keys / kPart; }
  KDA_HOST_DEVICE_INLINE int32_t decays() const { return rows * keys; }
  KDA_HOST_DEVICE_INLINE int32_t v_new() const { return decays() + rows * keys; }
  KDA_HOST_DEVICE_INLINE int32_t q() const { return v_new() + rows * columns; }
  KDA_HOST_DEVICE_INLINE int32_t v() const { return q() + tokens * keys; }
  /// k and q of a token of the batch, as they meet S_0.
  KDA_HOST_DEVICE_INLINE int32_t with_state() const { return v() + tokens * columns; }
  /// S_0^T k and S_0^T q likewise, where they are apart.
  KDA_HOST_DEVICE_INLINE int32_t products() const { return with_state() + batch * 2 * keys; }
  /// Scores of a token of the batch with the rows in front of it, newest first: of k and of q.
  KDA_HOST_DEVICE_INLINE int32_t scores() const {
    return products() + (products_apart ? batch * 2 * columns : 0);
  }
  /// Squares of keys; of rows that are not dense a sum a part.
  KDA_HOST_DEVICE_INLINE int32_t squares() const {
    return scores() + batch * 2 * (rows + rows % 2);
  }
  /// q . q and q . k of a token.
  KDA_HOST_DEVICE_INLINE int32_t of_q() const { return squares() + (parts() * rows + 1) / 2 * 2; }
  KDA_HOST_DEVICE_INLINE int32_t beta() const { return of_q() + 2 * tokens; }
  KDA_HOST_DEVICE_INLINE int32_t before() const { return beta() + tokens; }
  KDA_HOST_DEVICE_INLINE int32_t floats() const { return before() + tokens; }
};

/// Shared memory of a block, in bytes, for at most so many rows in front of the tokens.
inline int64_t shared_bytes(int64_t sure, int64_t tokens, int64_t K, int64_t V,
                            bool products_apart = true) {
  return 4 * Layout::of(static_cast<int32_t>(sure), static_cast<int32_t>(tokens), channels_of(K),
                        static_cast<int32_t>(V), products_apart)
                 .floats();
}

// ---- kernels whose threads have a channel of all rows: step.cuh, ring.cuh

constexpr int kChannels = 128;  ///< K and V, and threads of a block
constexpr int kChannelWarps = kChannels / 32;
constexpr int kRingSide = 16;  // rows that are read side by side

/// Arrays of floats, one behind the other.
struct ChannelLayout {
  int32_t rows;
  int32_t groups;           ///< of rows that fold together
  int32_t raw_floats = 0;   ///< of rows of keys as they came in
  int32_t gate_floats = 0;  ///< likewise of gates

  KDA_HOST_DEVICE_INLINE int32_t v_new() const { return rows * kChannels; }
  KDA_HOST_DEVICE_INLINE int32_t vector(int i) const { return v_new() + (rows + i) * kChannels; }
  KDA_HOST_DEVICE_INLINE int32_t decays() const { return vector(6); }
  KDA_HOST_DEVICE_INLINE int32_t raw_keys() const { return vector(6 + groups); }
  KDA_HOST_DEVICE_INLINE int32_t raw_gates() const { return raw_keys() + raw_floats; }
  KDA_HOST_DEVICE_INLINE int32_t scores() const { return raw_gates() + gate_floats; }
  /// They normalise keys that lie there as they came in.
  KDA_HOST_DEVICE_INLINE int32_t factors() const { return scores() + 2 * rows; }
  KDA_HOST_DEVICE_INLINE int32_t own() const {
    return factors() + (raw_floats > 0 ? (rows + 3) / 4 * 4 : 0);
  }
  KDA_HOST_DEVICE_INLINE int32_t bytes() const { return 4 * (own() + 4); }
};

KDA_HOST_DEVICE_INLINE ChannelLayout ring_layout(int32_t rows) { return {rows, 1}; }

/// A tail of R rows; sizes are bytes of an element of k and g. One gate a head is a word a row.
/// Rows are of most groups where the oldest is alone in its own, in front of a boundary.
KDA_HOST_DEVICE_INLINE ChannelLayout step_layout(int32_t rows, int32_t key_size, int32_t gate_size,
                                                 bool head_gates) {
  return {rows, (rows - 2) / static_cast<int32_t>(kTailBoundary) + 2,
          rows * kChannels * key_size / 4,
          head_gates ? rows * kChannelWarps : rows * kChannels * gate_size / 4};
}

/// Verify has at most 16 rows in front of its tokens: a fold has no more, and leaves fewer.
inline int64_t verify_bytes(int64_t sure, int64_t tokens) {
  return shared_bytes(std::min(sure, kTailBoundary), tokens, kChannels, kChannels, false);
}

// ---- which kernel decodes

enum class Kernel { kTail, kStep, kVerify };

constexpr int64_t kMostStepRows = 32;   ///< R
constexpr int64_t kFewestOfVerify = 3;  ///< tokens of a sequence

/// `in_vectors`: K = V = 128, of states and rows without gaps. `rows`: R.
inline Kernel kernel_of(bool in_vectors, int64_t rows, int64_t tokens, bool tree) {
  if (!in_vectors) return Kernel::kTail;
  if (tokens <= 1 && rows <= kMostStepRows) return Kernel::kStep;
  return tokens < kFewestOfVerify || tree ? Kernel::kTail : Kernel::kVerify;
}

}  // namespace kda::cuda::tail
