// SPDX-License-Identifier: Apache-2.0
// The backward pass in fp32 for every problem (equations: cpu/blocked/backward_kernels.hpp), in
// chunks of 16 tokens, counted from the start of their sequence. The tokens of the batch are cut
// into windows, worked off from right to left; a chunk belongs to the window of its first token, so
// that at most one sequence goes on in the next one. No result depends on the windows.
//   backward_starts     states before the first chunk of windows, if there are several
//   and of each window
//   backward_states     S0 before its chunks, and their errors E
//   backward_reverse    from right to left: dS behind its chunks, dZ (which is dv), dbeta
//   backward_chunk_grad dq, dk and dg of a chunk and value head, chunks beside each other
//   backward_gradients  sums over the value heads of a q/k head; norms, gates and steps; sums for
//                       A_log and dt_bias over some 64 tokens
//   backward_parameters at last the sums of these sums
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda {

inline constexpr int kBackwardTokens = 16;  ///< of a chunk
inline constexpr int kPieceTokens = 64;     ///< whose chunks one block of backward_gradients has

/// Pieces of so many tokens.
constexpr int64_t pieces_of(int64_t tokens) { return (tokens + kPieceTokens - 1) / kPieceTokens; }

inline constexpr int kBackwardTiles = 8;  ///< of a state, at most

/// The part of a state that a block has: all channels, rounded up, and some columns.
struct BackwardTile {
  int rows, columns;
};
constexpr BackwardTile backward_tile(int64_t key_dim) {
  return key_dim <= 64    ? BackwardTile{64, 64}
         : key_dim <= 128 ? BackwardTile{128, 64}
                          : BackwardTile{256, 32};
}

/// Floats of a token and value head in `rows`: dq, dk, dg, and dbeta of each tile.
constexpr int backward_row(int rows) { return 3 * rows + kBackwardTiles; }

/// Sizes of the workspace.
struct BackwardSizes {
  int64_t tiles = 0;    ///< of a state
  int64_t window = 0;   ///< tokens, a multiple of kPieceTokens
  int64_t windows = 0;  ///< at least 1
  int64_t pieces = 0;   ///< of the batch
  int64_t state = 0;    ///< floats of a state in tiles, of one head

  int64_t states(int64_t HV) const { return window / kBackwardTokens * HV * state; }
  /// One more: the chunk behind a state may be in the next window.
  int64_t d_states(int64_t HV) const { return states(HV) + HV * state; }
  int64_t starts(int64_t HV) const { return (windows - 1) * HV * state; }
  int64_t carry(int64_t HV) const { return windows > 1 ? 2 * HV * state : 0; }
  /// A window may end with the first token of a chunk.
  int64_t tokens() const { return window + kBackwardTokens - 1; }
};

struct BackwardArgs {
  Shape shape;
  SequenceMap map;
  RowView q, k, v, g, beta;
  GateView gate;
  StateView initial;

  RowView d_o;        ///< no base: zero
  StateView d_final;  ///< the same; slot: sequence
  // No base: not wanted.
  RowView dq, dk, dv, dg, dbeta;
  StateView d_initial;  ///< slot: sequence
  float* dA_log = nullptr;
  float* ddt_bias = nullptr;
  int64_t stride_dA = 0, stride_ddt = 0;

  BackwardSizes sizes;
  int64_t num_tokens = 0;  ///< of the batch
  int64_t index = 0;       ///< of the window
  bool starts_only = false;

  // Workspace. States are [slot, HV, tiles, tile]; a chunk that is not the first one of its
  // sequence has the slot of its first token in the window / 16.
  float* states = nullptr;    ///< S0
  float* d_states = nullptr;  ///< dS between the chunk before and this one
  float* starts = nullptr;    ///< slot: window - 1
  float* carry = nullptr;     ///< dS that goes on into the window before; slot: window % 2
  float* errors = nullptr;    ///< E: [token of the window, HV, tiles, columns]
  float* dz = nullptr;        ///< dZ: the same
  float* rows = nullptr;      ///< [token of the window, HV, backward_row()]
  double* sums = nullptr;     ///< [piece, HV, K + 1] ddt_bias, dA_log; null: not wanted

  int32_t* flags = nullptr;  ///< MetadataFlag bits, or null
  bool accumulate_flags = false;
};

/// The last one alone: `sums` are there.
Status launch_parameters(const BackwardArgs& args, const Launch& launch);

/// All launches of a backward pass.
Status launch_backward(const BackwardArgs& args, const Launch& launch);

}  // namespace kda::cuda
