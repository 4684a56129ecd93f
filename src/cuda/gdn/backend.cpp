// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm90.gdn: what it serves and how it plans. Its launches: cuda/gdn/launches.cpp.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/fused/cost.hpp"
#include "cuda/gdn/chain_sm90.hpp"
#include "cuda/gdn/cost.hpp"
#include "cuda/gdn/device_cut_plan.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/gdn/launches.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/checkpoint_places.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/rows.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda::gdn {
namespace {

std::string decline_gates(const Problem& p) {
  if (!has_head_gate(p)) return "g has a gate a channel; needs one gate a head";
  if (p.dt_bias && !has_head_bias(p))
    return "dt_bias has a bias a channel; needs one gate a head, with its bias";
  return decline_alignment("g", p.g, dtype_size(p.g.dtype));
}

std::string decline_sizes(const Problem& p) {
  if (p.key_dim > kMostK) return cat("K = ", p.key_dim, " is above ", kMostK);
  for (const auto& [name, size] : {std::pair{"K", p.key_dim}, std::pair{"V", p.value_dim}})
    if (size % 8 != 0) return cat(name, " = ", size, " is not a multiple of 8");
  if (p.checkpoints && p.checkpoint_every % kChunk != 0)
    return cat("checkpoint_every = ", p.checkpoint_every, " is not a multiple of the chunk ",
               kChunk);
  return {};
}

std::string decline(const Problem& p) {
  if (built() && !sm90::kBuilt) return kNoSm90a;  // a build without CUDA plans for any GPU
  if (std::string reason = decline_gates(p); !reason.empty()) return reason;
  for (const auto& [name, desc] :
       {std::pair{"q", &p.q}, std::pair{"k", &p.k}, std::pair{"v", &p.v}})
    if (desc->dtype != DType::kBFloat16)
      return cat(name, " is ", dtype_name(desc->dtype), "; needs bf16");
  if (std::string reason = decline_sizes(p); !reason.empty()) return reason;
  for (const auto& [name, desc, needed] : {std::tuple{"q", &p.q, 16}, std::tuple{"k", &p.k, 16},
                                           std::tuple{"v", &p.v, 16}, std::tuple{"o", &p.o, 4}})
    if (std::string reason = decline_alignment(name, *desc, needed); !reason.empty()) return reason;
  return {};
}

std::string decline_options(const PlanOptions& options) {
  if (options.intra_form != IntraForm::kAuto) return "intra_form asks for a form; it has one";
  return {};
}

/// The fused backend is the next one. Lengths decide between the two, so it serves where they may
/// not, or are unknown, or where it is predicted to be faster.
std::string defer(const registry::Request& request) {
  const Problem& p = request.problem;
  const PlanOptions& options = request.options;
  if (!fused::kForward.head.decline(p).empty()) return {};
  if (options.spans) return "spans are of cuda.sm90.fused";
  if (!fused::kForward.head.defer(request).empty()) return {};
  if (p.batch_invariant) return "batch_invariant: lengths must not change the kernel";
  if (options.context_parallel == SegmentPolicy::kOff)
    return "context_parallel is off: lengths must not change the kernel";
  if (request.cu_seqlens.empty()) return "lengths are not known, and cuda.sm90.fused cuts there";
  const plan::Workload work = plan::workload_of(p, request.cu_seqlens, request.device);
  const double own = time_to_beat_us(work, request.device);
  const double other = fused::predicted_us(work, request.device);
  if (own <= other) return {};
  return cat("predicted: ", std::llround(own),
             " us, between heads that forget and heads that do not; cuda.sm90.fused ",
             std::llround(other), " us");
}

constexpr const char* kDropsM = "M is dropped where the gates bound it by 2^-20";

void cut_on_device(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const auto bytes =
      static_cast<std::size_t>(p.num_value_heads * p.key_dim * (p.key_dim + 2 * p.value_dim)) *
      sizeof(float);
  gdn::cut_on_device(builder, model_from_bounds(p, plan.device), bytes);
  if (plan.early_exit) builder.reason(kDropsM);
}

/// With batch_invariant M is kept to the end, as in every backend.
void cut(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  if (!plan.lengths_known) return cut_on_device(builder);
  const bool may_forget = !plan.problem.batch_invariant;
  builder.cut({.automatic =
                   [&](const plan::Workload& work, CostEstimate* cost) {
                     return auto_partition(work, plan.device, may_forget, cost);
                   },
               .unit = kChunk});
  builder.join(cat(builder.name(), " has no correction stage"));
  builder.set_early_exit(plan.segmented && may_forget);
  if (plan.early_exit) builder.reason(kDropsM);
}

void list_segments(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  if (plan.device_cut.on) {
    const int64_t places = places_of(plan) * p.num_value_heads;
    builder.stage("segment_scan", 2 * plan.device_cut.most_behind * p.num_value_heads,
                  "at most: B and M of every segment but the last of its sequence");
    builder.stage("segment_merge", p.num_sequences * p.num_value_heads, "start states, in order");
    builder.stage("forward", places * plan.num_v_splits,
                  "at most: whole sequences where nothing is cut, else every segment");
  } else {
    list_scan_merge_forward(builder);
  }
  builder.kernel("segment_scan", "gdn_scan_sm90");
  builder.kernel("segment_merge", merges_on_hopper(plan.device, p.key_dim)
                                      ? "gdn_merge_sm90"
                                      : merge_kernel(plan.device, p.key_dim));
  if (plan.device_cut.on && has_both_widths(p.num_sequences, places_of(plan), p.num_value_heads,
                                            p.value_dim, plan.device.num_sms))
    builder.kernel("forward", "gdn_chain_sm90", "64 columns a block, where SMs are enough for it");
}

void book_cut(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t places = places_of(plan);
  book_segments(builder, static_cast<std::size_t>(places));
  builder.book(block::kGdnForgotten,
               plan.early_exit ? static_cast<std::size_t>(places * p.num_value_heads) : 0,
               sizeof(int32_t));
  book_device_cut(builder);
}

void plan_forward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t chunks = most_chunks(plan);
  const auto tiles = static_cast<std::size_t>(chunks * p.num_value_heads);
  cut(builder);
  builder.set_v_splits(tiles_of(p.value_dim));
  builder.stage("chunk_intra", chunks * p.num_heads,
                "factors of one chunk and all value heads of a q/k head a task");
  builder.kernel("chunk_intra", "gdn_intra_sm90");
  list_device_cut(builder);
  if (plan.segmented || plan.device_cut.on) {
    list_segments(builder);
    book_cut(builder);
  } else {
    list_forward(builder);
  }
  builder.kernel("forward", "gdn_chain_sm90");
  book_maps(builder);
  const auto rows = static_cast<std::size_t>(chunks * p.num_heads);
  const std::size_t row_bytes = kChunk * padded_k(static_cast<int>(p.key_dim)) * sizeof(uint16_t);
  builder.book(block::kGdnQ, rows, row_bytes);
  builder.book(block::kGdnK, rows, row_bytes);
  builder.book(block::kGdnInverse, tiles, kSquare * sizeof(uint16_t));
  builder.book(block::kGdnScores, tiles, kSquare * sizeof(uint16_t));
  builder.book(block::kGdnNumbers, tiles, sizeof(Numbers));
}

}  // namespace

const registry::ForwardRow kForward = {
    .head = {.name = "cuda.sm90.gdn",
             .device = DeviceKind::kCuda,
             .chunk_size = kChunk,
             .unavailable = sm90::unavailable,
             .plan = plan_forward,
             .decline = decline,
             .decline_options = decline_options,
             .defer = defer,
             .min_compute_capability = 90,
             .max_compute_capability = 90,
             .device_checks = &kDeviceChecks},
    .forward = if_built<forward>(),
    .segments = registry::SegmentStages{.scan = if_built<segment_scan>(),
                                        .merge = if_built<segment_merge>()},
    .chunk_stages = {},
    .spans = {},
    .place_checkpoints = if_built<cuda::place_checkpoints>()};

}  // namespace kda::cuda::gdn
