// SPDX-License-Identifier: Apache-2.0
// Workspace of the staged backward, and the groups of heads that bound it, from a plan.
#pragma once

#include <algorithm>

#include "cuda/common/common.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/recurrent/backward/sizes.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/cut_model.hpp"
#include "stage/buffers.hpp"

namespace kda::cuda::staged {

/// Bytes that a group of heads may take, where one q/k head does not take more. Chosen, not
/// measured.
inline constexpr double kGroupBytes = 2.4e9;
/// Bytes that all heads may take in a backward in two phases, which cannot have groups.
inline constexpr double kTwoPhaseBytes = 16e9;

/// Bytes of one value head in each block.
struct HeadBytes {
  StageSizes buffers;  ///< of chunk_intra, h, and E as vn
  std::size_t factors = 0, rows = 0, fallback = 0, sums = 0;
  std::size_t scales = 0;  ///< of fp16 operands of chunk_grad

  /// The rows lie over the factors: chunk_grad writes them when the chains are done.
  std::size_t before_fallback() const { return std::max(factors, rows); }
  /// Behind them is what says which chains, then which chunks, fall back to another launch; in two
  /// phases also which chains of the second one do.
  std::size_t factors_then_rows() const { return before_fallback() + fallback; }
  std::size_t all() const {
    return factors_then_rows() + 2 * (buffers.h + buffers.vn) + sums + scales;
  }
};

/// The buffers of chunk_intra, in their order in the block of the factors.
inline constexpr std::size_t kNumFactors = 9;
static_assert(stage::kChunkBuffers[kNumFactors].bytes == &StageSizes::h);

inline int64_t pieces_of(const Problem& p) { return cuda::pieces_of(p.batch * p.num_tokens); }

inline HeadBytes head_bytes(const Plan& plan, int64_t chunks) {
  const Problem& p = plan.problem;
  HeadBytes bytes;
  bytes.buffers = stage::chunk_sizes(p, static_cast<std::size_t>(chunks));
  for (std::size_t i = 0; i < kNumFactors; ++i)
    bytes.factors += bytes.buffers.*stage::kChunkBuffers[i].bytes;
  const auto row = static_cast<std::size_t>(backward_row(backward_tile(p.key_dim).rows));
  bytes.rows = static_cast<std::size_t>(p.batch * p.num_tokens) * row * sizeof(float);
  bytes.fallback = static_cast<std::size_t>(chunks) * kFallbackWords * sizeof(uint32_t);
  if (plan.requested.spans) bytes.fallback *= 2;  // of each phase
  if (p.q.dtype == DType::kFloat16)
    bytes.scales =
        static_cast<std::size_t>(chunks * kOperandKinds * kScaledColumns) * sizeof(float);
  if (has_parameters(p)) {  // of pieces, or of chunks
    const int64_t parts = std::max({pieces_of(p), chunks, int64_t{1}});
    bytes.sums = static_cast<std::size_t>(parts * (p.key_dim + 1)) * sizeof(double);
  }
  return bytes;
}
inline HeadBytes head_bytes(const Plan& plan) { return head_bytes(plan, most_chunks(plan)); }

/// Segments a sequence that are asked for; 0: none are, or another policy is.
inline int64_t fixed_segments(const Plan& plan) {
  return plan.requested.context_parallel == SegmentPolicy::kFixed ? plan.requested.num_segments : 0;
}

/// Are gradients wanted that tokens have from states and errors? Without them the chain from right
/// to left is all of a backward: it makes dv and the gradient of the initial states.
inline bool wants_tokens(const Gradients& g) {
  return g.dq || g.dk || g.dg || g.dbeta || g.dA_log || g.ddt_bias;
}

/// As few groups as `bytes` allow, of as even sizes as there are, where a q/k head and its value
/// heads take `head`. Value heads of tiled q/k heads are no neighbours: they are one group.
inline HeadGroups groups_within(const Problem& p, double head, double bytes) {
  if (p.head_map == HeadMap::kTiled) return {p.num_heads, 1};
  const auto fit = static_cast<int64_t>(
      std::clamp(bytes / std::max(head, 1.0), 1.0, static_cast<double>(p.num_heads)));
  HeadGroups groups;
  groups.count = (p.num_heads + fit - 1) / fit;
  groups.heads = (p.num_heads + groups.count - 1) / groups.count;
  groups.count = (p.num_heads + groups.heads - 1) / groups.heads;
  return groups;
}
/// Chunks are counted by bounds, so that a plan from bounds has the groups of one from lengths.
inline HeadGroups groups_within(const Plan& plan, double bytes) {
  const Problem& p = plan.problem;
  return groups_within(p,
                       static_cast<double>(head_bytes(plan, bound_of_chunks(p)).all()) *
                           static_cast<double>(p.num_value_heads) /
                           static_cast<double>(p.num_heads),
                       bytes);
}

/// Groups that the plan has booked blocks for.
inline HeadGroups groups_of(const Plan& plan) {
  const Problem& p = plan.problem;
  HeadGroups groups{p.num_heads, 1};
  for (const WorkspaceBlock& block : plan.workspace)
    if (block.name == block::kChunkDStates)
      groups.heads = static_cast<int64_t>(block.bytes / head_bytes(plan).buffers.h) * p.num_heads /
                     p.num_value_heads;
  groups.count = (p.num_heads + groups.heads - 1) / groups.heads;
  return groups;
}

}  // namespace kda::cuda::staged
