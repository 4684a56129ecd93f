// SPDX-License-Identifier: Apache-2.0
// Backend cuda.smxx.recurrent: how it plans; it serves everything. Its launches:
// cuda/recurrent/launches.cpp.
#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/checkpoint_places.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/recurrent/launches.hpp"
#include "cuda/recurrent/tails.hpp"
#include "cuda/rows.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/segments/launches.hpp"
#include "cuda/staged/cost.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::recurrent {
namespace {

/// Cut like the staged backend: what serves fewer problems is not worth constants of its own.
void plan_forward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  builder.cut({.automatic =
                   [&](const plan::Workload& work, CostEstimate* cost) {
                     return staged::auto_partition(work, plan.device, cost);
                   },
               .unit = kChunk});
  builder.join(cat(builder.name(), " has no correction stage"));
  note_one_intra_form(builder);
  if (plan.lengths_known) builder.set_v_splits(v_splits(plan));
  plan.segmented ? list_scan_merge_forward(builder) : list_forward(builder);
  if (plan.segmented) {
    builder.kernel("segment_scan", "recurrent");
    builder.kernel("segment_merge", merge_kernel(plan.device, plan.problem.key_dim));
  }
  builder.kernel("forward", "recurrent");
  book_maps(builder);
  if (plan.segmented) book_segments(builder, plan.segments.size());
}

void plan_decode(plan::PlanBuilder& builder) {
  list_decode(builder);
  if (builder.problem().tail || decodes_drafts(builder.plan().problem))
    plan_expand_bias(builder, "decode");
  builder.problem().tail ? plan_tail_decode(builder) : builder.kernel("decode", "decode");
  book_maps(builder);
}

constexpr registry::Head head_of(void (*plan)(plan::PlanBuilder&)) {
  return {.name = "cuda.smxx.recurrent",
          .device = DeviceKind::kCuda,
          .chunk_size = kChunk,
          .unavailable = unavailable,
          .plan = plan,
          .min_compute_capability = 80,
          .device_checks = &kDeviceChecks};
}

constexpr registry::Head decode_head() {
  registry::Head head = head_of(plan_decode);
  head.decline_tail = decline_tail_decode;
  return head;
}

}  // namespace

const registry::ForwardRow kForward = {
    .head = head_of(plan_forward),
    .forward = if_built<forward>(),
    .segments = registry::SegmentStages{.scan = if_built<segment_scan>(),
                                        .merge = if_built<cuda::segment_merge>()},
    .chunk_stages = {},
    .spans = registry::SpanStages{.fold = if_built<cuda::fold_states>()},
    .place_checkpoints = if_built<cuda::place_checkpoints>()};

const registry::DecodeRow kDecode = {
    .head = decode_head(), .decode = if_built<decode>(), .tail_forward = &kTailForward};

}  // namespace kda::cuda::recurrent
