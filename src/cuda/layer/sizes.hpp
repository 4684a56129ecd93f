// SPDX-License-Identifier: Apache-2.0
// How the work around KDA is cut, by sizes alone: a call's bits do not depend on the device.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kda/gated_rms_norm.hpp"
#include "stage/short_conv.hpp"

namespace kda::cuda::layer {

/// Tokens of a run of the convolution: as many as leave `threads` threads something to do, a thread
/// having `vector` channels. No more than a sequence has, or at least `shortest`.
inline int64_t run_of(const ShortConv& call, int64_t vector, int64_t shortest, int64_t longest,
                      int64_t threads) {
  const int64_t N = std::max<int64_t>(stage::num_sequences(call), 1);
  const int64_t rows = call.cu_seqlens ? 1 : N;
  const int64_t tokens = call.cu_seqlens ? call.num_tokens / N : call.num_tokens;
  const int64_t vectors = (call.channels + vector - 1) / vector;
  int64_t run = longest;
  while (run > shortest && rows * ((call.num_tokens + run - 1) / run) * vectors < threads) run /= 2;
  while (run > 1 && run > tokens) run /= 2;
  return run;
}
/// Runs of a row of the batch, one at least: for states of empty sequences.
inline int64_t runs_of(const ShortConv& call, int64_t run) {
  return std::max<int64_t>(1, (call.num_tokens + run - 1) / run);
}

inline int64_t forward_run(const ShortConv& call, int64_t vector) {
  return run_of(call, vector, 8, 64, 1 << 16);
}
/// It does not ask how many channels a thread has: that depends on addresses. Each run has sums for
/// the weights in memory, so that shorter ones cost more than they bring.
inline int64_t backward_run(const ShortConv& call) {
  return std::max<int64_t>(16, run_of(call, 4, 16, 128, 1 << 16));
}

inline std::size_t short_conv_workspace(const ShortConv& call) noexcept {
  if (call.batch < 0 || call.num_tokens < 0 || call.channels < 0) return 0;
  const int64_t rows = call.cu_seqlens ? 1 : call.batch;
  return static_cast<std::size_t>(rows * runs_of(call, backward_run(call)) * (call.width + 1) *
                                  call.channels) *
         sizeof(float);
}

/// Groups of rows of the norm: of many rows a group has several.
inline int64_t forward_groups(int64_t rows) { return rows < (1 << 15) ? rows : (rows + 3) / 4; }
/// Groups of its backward, each with sums of its own.
inline int64_t norm_groups(const GatedRmsNorm& call) {
  const int64_t rows = call.rows[0] * call.rows[1] * call.rows[2];
  return std::clamp<int64_t>((int64_t{1} << 21) / std::max<int64_t>(call.channels, 1), 64,
                             std::clamp<int64_t>(rows, 64, 8192));
}
inline std::size_t gated_rms_norm_workspace(const GatedRmsNorm& call) noexcept {
  if (call.channels < 0) return 0;
  return static_cast<std::size_t>(norm_groups(call) * call.channels) * sizeof(float);
}

}  // namespace kda::cuda::layer
