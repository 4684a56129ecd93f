// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.fused: what it serves and how it plans. Its launch:
// cuda/fused/portable/launches.cpp.
#include "cuda/fused/backend.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/fused/kernels.hpp"
#include "cuda/fused/portable/cost.hpp"
#include "cuda/fused/portable/launches.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/checkpoint_places.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/rows.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::fused::portable {
namespace {

std::string decline_device(const DeviceFacts& device) {
  if (!has_hopper_kernels(device)) return {};
  return "a build with kernels of sm_90a has none of it for Hopper";
}

std::string decline(const Problem& p) {
  if (has_head_gate(p)) return "g has one gate a head; needs a gate a channel";
  return decline_problem(p);
}

std::string decline_options(const PlanOptions& options) {
  if (plan::asks_for_segments(options)) return "context_parallel asks for segments; it has none";
  if (options.spans) return "spans ask for segments; it has none";
  if (options.intra_form != IntraForm::kAuto) return "intra_form asks for a form of stages";
  return {};
}

/// States that one block hands to the next, where there are more chains than blocks.
void book_handoffs(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t chains = chains_of(p), blocks = blocks_of(p, plan.device);
  const auto handoffs = static_cast<std::size_t>(blocks < chains ? blocks : 0);
  const auto tiles = static_cast<std::size_t>(sm90::fused_blocks(p.key_dim));
  builder.book(block::kHandoffStates, handoffs, sm90::handoff_state_bytes(p.key_dim) / tiles);
  builder.book(block::kHandoffFlags, handoffs, sm90::handoff_flag_bytes(p.key_dim) / tiles);
}

void plan_forward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  if (plan.lengths_known) {
    builder.predict(predict(builder.workload(), plan.device));
    builder.reason("fused: by the cycles of an H200 and a published clock");
  }
  builder.reason("off: it has no segments");
  builder.set_v_splits(tiles_of(plan.problem.value_dim));
  list_forward(builder);
  const bool fp16 = has_fp16_operands(plan.problem);
  builder.kernel("forward", fp16 ? "portable_prefill_fp16" : "portable_prefill",
                 why_operands(plan.problem));
  book_maps(builder);
  book_handoffs(builder);
}

}  // namespace

const registry::ForwardRow kForward = {.head = {.name = "cuda.sm80.fused",
                                                .device = DeviceKind::kCuda,
                                                .chunk_size = kChunk,
                                                .unavailable = unavailable,
                                                .plan = plan_forward,
                                                .decline = decline,
                                                .decline_options = decline_options,
                                                .only_by_name = true,  // a card of 8.x must run it
                                                .min_compute_capability = 80,
                                                .decline_device = decline_device,
                                                .device_checks = &kDeviceChecks},
                                       .forward = if_built<forward>(),
                                       .segments = {},
                                       .chunk_stages = {},
                                       .spans = {},
                                       .place_checkpoints = if_built<cuda::place_checkpoints>()};

}  // namespace kda::cuda::fused::portable
