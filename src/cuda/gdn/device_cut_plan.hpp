// SPDX-License-Identifier: Apache-2.0
// How forward and backward of cuda.sm90.gdn plan a cut that a kernel makes (device_cut.hpp).
#pragma once

#include <algorithm>

#include "core/text.hpp"
#include "cuda/gdn/cost.hpp"
#include "cuda/gdn/device_cut.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/tile/chunk.hpp"
#include "plan/builder.hpp"

namespace kda::cuda::gdn {

/// Segments behind first ones that the kernel may make: `segments` of each sequence at most.
inline int64_t most_behind_of(const Problem& p, int64_t segments) {
  return std::min(p.num_sequences * (segments - 1), p.num_tokens / kChunk);
}
/// By predicted times.
template <class Model>
int64_t most_behind_of(const Problem& p, const Model& model) {
  return std::min(model.most_behind, most_behind_of(p, plan::kAutoMaxSegments));
}
template <class Model>
int64_t most_behind_of(const Plan& plan, const Model& model) {
  const int64_t fixed = staged::fixed_segments(plan);
  return fixed > 0 ? most_behind_of(plan.problem, fixed) : most_behind_of(plan.problem, model);
}

/// Segments, or places for those that the kernel may make.
inline int64_t places_of(const Plan& plan) {
  return plan.device_cut.on ? plan.problem.num_sequences + plan.device_cut.most_behind
                            : static_cast<int64_t>(plan.segments.size());
}

/// Why the kernel does not cut; empty: it cuts where that is predicted to gain. By bounds alone, so
/// that lengths never change what is launched. `segment_bytes`: of a segment, of all heads or of a
/// group of them.
template <class Model>
std::string decline_device_cut(const Plan& plan, const Model& model, std::size_t segment_bytes) {
  const Problem& p = plan.problem;
  const int64_t fixed = staged::fixed_segments(plan), chunks = p.num_tokens / kChunk + 1;
  if (plan.requested.context_parallel == SegmentPolicy::kOff) return "off: asked for";
  if (plan::asks_for_segments(plan.requested) && fixed == 0)
    return "segments of this policy need lengths on the host";
  if (p.batch_invariant) return "batch_invariant: not cut where only the device knows the lengths";
  if (p.num_tokens > kMostCutTokens || chunks * std::min(fixed, chunks) > INT32_MAX)
    return cat(p.num_tokens, " tokens are more than a kernel counts");
  if (fixed == 1 || p.num_tokens == 0 || p.num_sequences == 0) return "no sequence can be cut";
  if (fixed == 0 && !may_cut(model, p.num_tokens, p.num_sequences))
    return cat("auto: no table of ", p.num_tokens, " tokens gains by a cut");
  const int64_t behind = most_behind_of(plan, model);
  if (behind == 0) return "no sequence can be cut";
  const int64_t places = p.num_sequences + behind;
  const std::size_t bytes = static_cast<std::size_t>(places) * segment_bytes;
  const auto most = static_cast<std::size_t>(plan.requested.most_cut_bytes);
  if (bytes > most)
    return cat("a cut on the device takes ", bytes, " bytes, more than most_cut_bytes = ", most);
  return {};
}

/// Lets the kernel cut, with room for all that it may cut.
template <class Model>
void cut_on_device(plan::PlanBuilder& builder, const Model& model, std::size_t segment_bytes) {
  const Plan& plan = builder.plan();
  std::string declined = decline_device_cut(plan, model, segment_bytes);
  if (!declined.empty()) return builder.reason(std::move(declined));
  const int64_t behind = most_behind_of(plan, model), fixed = staged::fixed_segments(plan);
  builder.cut_on_device(behind);
  builder.set_segment_method(SegmentMethod::kScanMergeForward);
  builder.set_early_exit(true);
  builder.reason(cat(fixed > 0 ? cat(fixed,
                                     " segments a sequence asked for (fewer where it has "
                                     "fewer chunks)")
                               : "auto: a kernel cuts where that is predicted to gain",
                     ", at most ", behind, " segments behind first ones"));
}

/// The stage of that kernel, which runs beside the end of gdn_intra, and its memory.
inline void list_device_cut(plan::PlanBuilder& builder) {
  if (!builder.plan().device_cut.on) return;
  builder.stage("segment_cut", 1, "segments by lengths on the device");
  builder.kernel("segment_cut", "gdn_cut");
}
inline void book_device_cut(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  if (!plan.device_cut.on) return;
  builder.book(
      block::kDeviceCut,
      static_cast<std::size_t>(cut_maps_words(plan.problem.num_sequences, places_of(plan))),
      sizeof(int64_t));
}

}  // namespace kda::cuda::gdn
