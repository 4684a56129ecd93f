// SPDX-License-Identifier: Apache-2.0
// The sizes of a backward and the memory of its threads, from its plan.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/blocked/backward_kernels.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "kda/plan.hpp"

namespace kda::cpu::blocked {

/// Chunks whose states and factors are in the cache together.
inline constexpr int64_t kSpanChunks = 4;
inline constexpr int64_t kSpanTokens = kSpanChunks * kBackwardChunk;
inline constexpr int64_t kTileFloats = kBackwardChunk * kBlockV;
/// Tokens of a window where the forward has kept no states.
inline constexpr int64_t kWindowTokens = 4096;

/// Cache lines around a chunk: q, k, g and d_o that come next, dq, dk, dv and dg.
inline constexpr int64_t kMaxLines = 8 * kBackwardChunk * (kMaxHeadDim * 4 / 64 + 1);

static_assert(kMaxRows == kMaxHeadDim);
static_assert(kKeptStateMultiple % kSpanTokens == 0 && kWindowTokens % kSpanTokens == 0);

inline std::size_t floats(int64_t count) { return align_up(static_cast<std::size_t>(count) * 4); }

/// Tokens of the longest sequence, as far as the plan knows.
inline int64_t longest_sequence(const Plan& plan) {
  if (!plan.lengths_known) return plan.problem.num_tokens;
  int64_t longest = 0;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
    longest = std::max(longest, plan.cu_seqlens[n + 1] - plan.cu_seqlens[n]);
  return longest;
}

/// Sizes that follow from a plan.
struct BackwardSizes {
  int64_t padded;         ///< rows of K
  int64_t blocks;         ///< of value columns
  int64_t state;          ///< floats of a state: blocks of [padded, kBlockV]
  int64_t group;          ///< value heads of a q/k head
  int64_t window;         ///< tokens
  int64_t inner_windows;  ///< starts of windows to be made; 0 where the forward has kept them
  int64_t runs;           ///< of sequences

  BackwardSizes(const Plan& plan, int64_t kept_every) {
    const Problem& p = plan.problem;
    padded = (p.key_dim + kRowsPadded - 1) / kRowsPadded * kRowsPadded;
    blocks = num_blocks(p.value_dim);
    state = blocks * padded * kBlockV;
    group = group_size(p);
    runs = std::min(p.num_sequences, kMaxRuns);
    const int64_t longest = std::max<int64_t>(longest_sequence(plan), 1);
    window = std::min(kept_every > 0 ? kept_every : kWindowTokens,
                      (longest + kSpanTokens - 1) / kSpanTokens * kSpanTokens);
    inner_windows = kept_every > 0 ? 0 : (longest - 1) / window;
  }

  std::size_t sums_bytes(const Problem& p) const {
    if (p.gate_mode == GateMode::kLog) return 0;  // it has no parameters
    return align_up(static_cast<std::size_t>(runs * p.num_value_heads * 2 * p.key_dim) *
                    sizeof(double));
  }
};

/// Memory of one thread, carved from the call's scratch.
struct BackwardScratch {
  BackwardChunk* chunks;  ///< [kSpanChunks]
  BackwardSums* sums;
  BackwardRows* rows;
  float* tiles;        ///< [blocks, 16, kBlockV] v, later d_o
  float* dv;           ///< [blocks, 16, kBlockV]
  float* row;          ///< [kRowStride]
  float* ddt_bias;     ///< [kRowStride] of a chunk
  float* dA_log;       ///< [kRowStride] of a chunk, by channel
  float* states;       ///< [kSpanChunks] the first is the one that runs forward
  float* d_states;     ///< [group]
  float* span_states;  ///< [window / kSpanTokens]
  float* starts;       ///< [group, inner_windows]
  float* errors;       ///< [window / 16, blocks, 16, kBlockV]
  float* dq;           ///< [window, padded] of the heads of the group so far; empty for one head
  float* dk;
  const char** lines;  ///< what prefetches ask for

  /// Takes everything from `at` on; returns the bytes taken.
  std::size_t carve(const BackwardSizes& s, char* at) {
    std::size_t taken = 0;
    const auto take = [&](std::size_t bytes) {
      char* place = at ? at + taken : nullptr;
      taken += align_up(bytes);
      return place;
    };
    const auto take_floats = [&](int64_t count) {
      return reinterpret_cast<float*>(take(floats(count)));
    };
    chunks = reinterpret_cast<BackwardChunk*>(take(kSpanChunks * sizeof(BackwardChunk)));
    sums = reinterpret_cast<BackwardSums*>(take(sizeof(BackwardSums)));
    rows = reinterpret_cast<BackwardRows*>(take(sizeof(BackwardRows)));
    tiles = take_floats(s.blocks * kTileFloats);
    dv = take_floats(s.blocks * kTileFloats);
    row = take_floats(kRowStride);
    ddt_bias = take_floats(kRowStride);
    dA_log = take_floats(kRowStride);
    states = take_floats(kSpanChunks * s.state);
    d_states = take_floats(s.group * s.state);
    span_states = take_floats(s.window / kSpanTokens * s.state);
    starts = take_floats(s.group * s.inner_windows * s.state);
    errors = take_floats(s.window * s.blocks * kBlockV);
    const int64_t group_rows = s.group > 1 ? s.window * s.padded : 0;
    dq = take_floats(group_rows);
    dk = take_floats(group_rows);
    lines = reinterpret_cast<const char**>(take(kMaxLines * sizeof(const char*)));
    return taken;
  }
};

inline std::size_t per_thread_bytes(const BackwardSizes& sizes) {
  return BackwardScratch().carve(sizes, nullptr);
}

}  // namespace kda::cpu::blocked
