// SPDX-License-Identifier: Apache-2.0
// Workspace of Gated DeltaNet's backward, and the groups of heads that bound it, from a plan.
#pragma once

#include "cuda/gdn/factors.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::gdn {

/// Bytes that a group of heads may take, where one q/k head does not take more: twice what those of
/// the staged backward may. Half as many heads leave the card idle: chains of 65,536 tokens and 16
/// value heads take as long as those of 32.
inline constexpr double kBackwardGroupBytes = 2 * staged::kGroupBytes;

/// Bytes of a chunk: of q or k of a q/k head, of the rest a value head, of tiles a block of V.
inline constexpr std::size_t kRowBytes = kChunk * kMostK * sizeof(uint16_t);
inline constexpr std::size_t kSquareBytes = kSquare * sizeof(uint16_t);
inline constexpr std::size_t kStateBytes = kVTile * kMostK * sizeof(uint16_t);
inline constexpr std::size_t kValueBytes = kChunk * kVTile * sizeof(uint16_t);

/// Bytes of a q/k head with its value heads, but for what is small. Chunks are counted by bounds,
/// so that a plan from bounds has the groups of one from lengths.
inline double bytes_of_head(const Problem& p) {
  const double value_head =
      2 * kSquareBytes + sizeof(Numbers) + sizeof(BackwardNumbers) +
      static_cast<double>(tiles_of(p.value_dim)) * 2 * (kStateBytes + kValueBytes);
  return static_cast<double>(bound_of_chunks(p)) *
         (2 * kRowBytes +
          static_cast<double>(p.num_value_heads) / static_cast<double>(p.num_heads) * value_head);
}
inline HeadGroups backward_groups(const Problem& p, double bytes = kBackwardGroupBytes) {
  return staged::groups_within(p, bytes_of_head(p), bytes);
}

/// Groups that the plan has booked blocks for.
inline HeadGroups booked_groups(const Plan& plan) {
  const Problem& p = plan.problem;
  HeadGroups groups{p.num_heads, 1};
  const auto chunks = static_cast<std::size_t>(most_chunks(plan));
  for (const WorkspaceBlock& block : plan.workspace)
    if (block.name == block::kGdnQ && block.bytes > 0)
      groups.heads = static_cast<int64_t>(block.bytes / (chunks * kRowBytes));
  groups.count = (p.num_heads + groups.heads - 1) / groups.heads;
  return groups;
}

/// Value heads of the largest group.
inline int64_t value_heads_of(const Problem& p, const HeadGroups& groups) {
  return groups.heads * (p.num_value_heads / p.num_heads);
}

}  // namespace kda::cuda::gdn
