// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm90.gdn: what it serves and how it plans. Its launches:
// cuda/gdn/backward/launches.cpp.
#include <algorithm>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/common/cost_model.hpp"
#include "cuda/gdn/backward/launches.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/rows.hpp"
#include "cuda/staged/backward/kernels.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::gdn {
namespace {

/// Its kernels have tiles of 128 channels, whatever K is.
std::string decline(const Problem& p) { return kForward.head.decline(p); }

std::string decline_gradients(const Gradients& g) {
  for (const auto& [name, desc] :
       {std::pair{"d_o", &g.d_o}, std::pair{"dq", &g.dq}, std::pair{"dk", &g.dk}})
    if (!staged::has_whole_rows(*desc, DType::kBFloat16))
      return cat(name, " is not of bf16 rows aligned to 16 bytes");
  if (g.dg && g.dg->strides[3] != 0) return "dg has a gradient a channel; g has one gate a head";
  if (g.ddt_bias && g.ddt_bias->strides[1] != 0)
    return "ddt_bias has a gradient a channel; dt_bias has one bias a head";
  return {};
}

void list(plan::PlanBuilder& builder, int64_t chunks, bool tokens) {
  const Problem& p = builder.plan().problem;
  const int64_t HV = p.num_value_heads, chains = p.num_sequences * HV * tiles_of(p.value_dim);
  builder.stage("chunk_intra", chunks * p.num_heads,
                "factors of one chunk and all value heads of a q/k head a task");
  builder.kernel("chunk_intra", "gdn_intra_sm90, backward");
  if (tokens) builder.stage("chunk_delta_h", chains, "states before chunks and their errors");
  builder.stage("chunk_reverse", chains, "dS behind chunks, dv, right to left");
  builder.kernel(tokens ? "chunk_delta_h" : "chunk_reverse", "gdn_backward_chains_sm90");
  if (!tokens) return;
  builder.kernel("chunk_reverse", "gdn_backward_chains_sm90", "both directions at once");
  builder.stage("chunk_grad", chunks * HV,
                "dq, dk, dg, dbeta of a chunk, with norms, gates, steps");
  builder.kernel("chunk_grad", "gdn_chunk_grad_sm90");
  const Gradients& wanted = *builder.gradients();
  if (!wanted.dA_log && !wanted.ddt_bias) return;
  builder.stage("backward_parameters", HV, "sums for A_log and dt_bias, in order");
  builder.kernel("backward_parameters", "backward_parameters");
}

void plan_backward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t chunks = most_chunks(plan);
  const auto tiles = static_cast<std::size_t>(chunks * p.num_value_heads);
  const auto rows = static_cast<std::size_t>(chunks * p.num_heads);
  const auto values = tiles * static_cast<std::size_t>(tiles_of(p.value_dim));
  constexpr std::size_t kRowBytes = kChunk * kMostK * sizeof(uint16_t);
  constexpr std::size_t kStateBytes = kVTile * kMostK * sizeof(uint16_t);
  constexpr std::size_t kValueBytes = kChunk * kVTile * sizeof(uint16_t);
  const bool tokens = staged::wants_tokens(*builder.gradients());
  builder.reason("segments declined: its backward has none");
  list(builder, chunks, tokens);
  book_maps(builder);
  builder.book(block::kGdnQ, rows, kRowBytes);
  builder.book(block::kGdnK, rows, kRowBytes);
  builder.book(block::kGdnInverse, tiles, kSquare * sizeof(uint16_t));
  builder.book(block::kGdnScores, tiles, kSquare * sizeof(uint16_t));
  builder.book(block::kGdnNumbers, tiles, sizeof(Numbers));
  builder.book(block::kGdnBackwardNumbers, tiles, sizeof(BackwardNumbers));
  if (!tokens) return;
  builder.book(block::kChunkStates, values, kStateBytes);
  builder.book(block::kChunkDStates, values, kStateBytes);
  builder.book(block::kBackwardErrors, values, kValueBytes);
  builder.book(block::kBackwardDz, values, kValueBytes);
  // Without a chunk too: the sums of none are written as zeros.
  if (has_parameters(p))
    builder.book(block::kParameterSums, std::max<std::size_t>(tiles, 1), 2 * sizeof(double));
}

}  // namespace

const registry::BackwardRow kBackward = {.head = {.name = "cuda.sm90.gdn",
                                                  .device = DeviceKind::kCuda,
                                                  .chunk_size = kChunk,
                                                  .unavailable = sm90::unavailable,
                                                  .plan = plan_backward,
                                                  .decline = decline,
                                                  .only_by_name = true,
                                                  .decline_gradients = decline_gradients,
                                                  .min_compute_capability = 90,
                                                  .max_compute_capability = 90,
                                                  .device_checks = &kDeviceChecks},
                                         .backward = if_built<backward>()};

}  // namespace kda::cuda::gdn
