// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.staged: what it serves and how it plans. Its launches:
// cuda/staged/launches.cpp.
#include <tuple>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/checkpoint_places.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/rows.hpp"
#include "cuda/segments/launches.hpp"
#include "cuda/staged/backend.hpp"
#include "cuda/staged/cost.hpp"
#include "cuda/staged/kernels.hpp"
#include "cuda/staged/launches.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::staged {

std::string decline_inputs(const Problem& p) {
  if (p.q.dtype == DType::kFloat32 || p.q.dtype != p.k.dtype || p.q.dtype != p.v.dtype)
    return cat("q, k, v are ", dtype_name(p.q.dtype), ", ", dtype_name(p.k.dtype), ", ",
               dtype_name(p.v.dtype), "; needs bf16 or fp16 for all three");
  if (p.key_dim > kMaxStagedK) return cat("K = ", p.key_dim, " is above ", kMaxStagedK);
  if (p.key_dim % 8 != 0) return cat("K = ", p.key_dim, " is not a multiple of 8");
  if (p.value_dim % 8 != 0) return cat("V = ", p.value_dim, " is not a multiple of 8");
  const int64_t gates = (has_head_gate(p) ? 1 : 2) * dtype_size(p.g.dtype);
  for (const auto& [name, desc, needed] :
       {std::tuple{"q", &p.q, int64_t{16}}, std::tuple{"k", &p.k, int64_t{16}},
        std::tuple{"v", &p.v, int64_t{16}}, std::tuple{"g", &p.g, gates}})
    if (std::string reason = decline_alignment(name, *desc, needed); !reason.empty()) return reason;
  return {};
}

namespace {

std::string decline(const Problem& p) {
  if (std::string reason = decline_inputs(p); !reason.empty()) return reason;
  if (p.checkpoints && p.checkpoint_every % kChunk != 0)
    return cat("checkpoint_every = ", p.checkpoint_every, " is not a multiple of the chunk ",
               kChunk);
  return decline_alignment("o", p.o, 4);
}

std::size_t num_tiles(const Plan& plan) {
  return static_cast<std::size_t>(most_chunks(plan) * plan.problem.num_value_heads);
}

StageSizes sizes_of(const Plan& plan) { return stage::chunk_sizes(plan.problem, num_tiles(plan)); }

/// One block a tensor; those of the scalars share one.
void book_factors(plan::PlanBuilder& builder) {
  const StageSizes sizes = sizes_of(builder.plan());
  const auto& buffers = stage::kChunkBuffers;
  for (std::size_t i = 0; i < buffers.size();) {
    const std::string_view block = buffers[i].block;
    std::size_t bytes = 0, next = i;
    while (next < buffers.size() && buffers[next].block == block)
      bytes += sizes.*buffers[next++].bytes;
    if (!block.empty()) builder.book(block, 1, bytes);
    i = next;
  }
}

void plan_forward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const bool by_tokens = builder.requested().intra_form == IntraForm::kToken;
  builder.set_intra_form(by_tokens ? IntraForm::kToken : IntraForm::kTensor);
  builder.cut(
      {.automatic = [&](const plan::Workload& work,
                        CostEstimate* cost) { return auto_partition(work, plan.device, cost); },
       .unit = kChunk});
  builder.join(cat(builder.name(), " has no correction stage"));
  if (plan.lengths_known) builder.set_v_splits(v_splits(plan));
  builder.stage("chunk_intra", static_cast<int64_t>(num_tiles(plan)),
                by_tokens ? "factors of one (chunk, value head) a task, by tokens"
                          : "factors of one (chunk, value head) a task");
  plan.segmented ? list_scan_merge_forward(builder) : list_forward(builder);
  list_kernels(builder);
  book_maps(builder);
  book_factors(builder);
  if (plan.segmented) book_segments(builder, plan.segments.size());
}

}  // namespace

const registry::ForwardRow kForward = {
    .head = {.name = "cuda.sm80.staged",
             .device = DeviceKind::kCuda,
             .chunk_size = kChunk,
             .unavailable = unavailable,
             .plan = plan_forward,
             .decline = decline,
             .min_compute_capability = 80,
             .device_checks = &kDeviceChecks},
    .forward = if_built<forward>(),
    .segments = registry::SegmentStages{.scan = if_built<segment_scan>(),
                                        .merge = if_built<cuda::segment_merge>()},
    .chunk_stages = registry::ChunkStages{.chunk_intra = if_built<chunk_intra>(),
                                          .recompute_w_u = if_built<recompute_w_u>(),
                                          .chunk_delta_h = if_built<chunk_delta_h>(),
                                          .chunk_o = if_built<chunk_o>(),
                                          .sizes = sizes_of},
    .spans = {},
    .place_checkpoints = if_built<cuda::place_checkpoints>()};

}  // namespace kda::cuda::staged
