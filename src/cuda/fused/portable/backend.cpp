// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.fused: what it serves and how it plans. Its launch:
// cuda/fused/portable/launches.cpp.
#include "cuda/fused/backend.hpp"

#include <cmath>

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

double margin_of(const DeviceFacts& device) { return is_measured(device) ? 1 : kUnmeasuredMargin; }
std::string margin_text(const DeviceFacts& device) {
  if (is_measured(device)) return "";
  return cat("no card of compute capability ", device.compute_capability, " has timed it, so ",
             kUnmeasuredMargin, " times that counts");
}

/// It has no segments, so stages serve few heads. It serves where they do not.
std::string defer(const registry::Request& request) {
  const Problem& p = request.problem;
  const DeviceFacts& device = request.device;
  if (!staged::kForward.head.decline(p).empty()) return {};
  const plan::Workload typical = typical_work(p, device);
  CostEstimate in_stages;
  staged::auto_partition(typical, device, &in_stages);
  const double stages = in_stages.segmented_us > 0 ? in_stages.segmented_us : in_stages.serial_us;
  const double fused = predict(typical, kind_of(p), device).fused_us;
  if (margin_of(device) * fused <= stages) return {};
  const std::string margin = margin_text(device);
  return cat(typical_times(typical, fused, stages), margin.empty() ? "" : "; ", margin);
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
    builder.predict(predict(builder.workload(), kind_of(plan.problem), plan.device));
    builder.reason(cat("predicted: ", std::llround(plan.cost.fused_us),
                       " us, by the cycles of an H200 at ", gigahertz_of(plan.device), " GHz",
                       is_measured(plan.device) ? "" : "; ", margin_text(plan.device)));
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
                                                .defer = defer,
                                                .min_compute_capability = 80,
                                                .decline_device = decline_device,
                                                .device_checks = &kDeviceChecks},
                                       .forward = if_built<forward>(),
                                       .segments = {},
                                       .chunk_stages = {},
                                       .spans = {},
                                       .place_checkpoints = if_built<cuda::place_checkpoints>()};

}  // namespace kda::cuda::fused::portable
