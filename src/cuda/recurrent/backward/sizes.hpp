// SPDX-License-Identifier: Apache-2.0
// Sizes of a backward's workspace, from its plan.
#pragma once

#include <algorithm>

#include "cuda/recurrent/backward/backward.hpp"
#include "kda/plan.hpp"

namespace kda::cuda {

/// A window takes no more than this, or so many bytes a token and value head of the batch,
/// whichever is more. Where that is fewer than kLeastWindow tokens, it takes kLeastWindow. The
/// numbers are chosen, not measured.
inline constexpr double kWindowBytes = 640e6;
inline constexpr double kWindowBytesAToken = 300;
inline constexpr int64_t kLeastWindow = 256;

/// Whether the problem has inputs whose gradients are sums over all tokens.
inline bool has_parameters(const Problem& p) { return p.A_log || p.dt_bias; }

/// kept_state_every bounds a window too, even below kLeastWindow.
inline BackwardSizes backward_sizes(const Plan& plan) {
  const Problem& p = plan.problem;
  const BackwardTile tile = backward_tile(p.key_dim);
  BackwardSizes sizes;
  sizes.tiles = (p.value_dim + tile.columns - 1) / tile.columns;
  sizes.state = sizes.tiles * tile.rows * tile.columns;
  const int64_t tokens = p.batch * p.num_tokens;
  sizes.pieces = pieces_of(tokens);
  const auto HV = static_cast<double>(p.num_value_heads);
  const int64_t floats =
      2 * sizes.state / kBackwardTokens + 2 * sizes.tiles * tile.columns + backward_row(tile.rows);
  const double token_bytes = 4 * HV * static_cast<double>(floats);
  const double bytes =
      std::max(kWindowBytes, kWindowBytesAToken * HV * static_cast<double>(tokens));
  const auto fit = static_cast<int64_t>(bytes / token_bytes) / kPieceTokens * kPieceTokens;
  sizes.window =
      std::max<int64_t>(std::min({std::max(fit, kLeastWindow), plan.resolved.kept_state_every,
                                  sizes.pieces * kPieceTokens}),
                        kPieceTokens);
  sizes.windows = std::max<int64_t>((tokens + sizes.window - 1) / sizes.window, 1);
  return sizes;
}

}  // namespace kda::cuda
