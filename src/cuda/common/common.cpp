// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/common.hpp"

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/zero_rows.hpp"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda {

std::string decline_alignment(const char* name, const TensorDesc& desc, int64_t needed) {
  if (desc.alignment >= needed) return {};
  return cat(name, " is aligned to ", desc.alignment, " bytes, needs ", needed);
}

const char* sm90::unavailable() noexcept {
  if (const char* reason = cuda::unavailable()) return reason;
  return kBuilt ? nullptr : kNoSm90a;
}

bool has_hopper_kernels(const DeviceFacts& device) {
  return device.compute_capability == 90 && (sm90::kBuilt || !built());
}

bool has_device_flags(const Plan& plan) {
  const Problem& p = plan.problem;
  const bool indices =
      (p.initial_state && p.initial_state->indexed) || (p.final_state && p.final_state->indexed) ||
      (p.checkpoints && p.checkpoints->indexed) || p.num_accepted_tokens || p.token_parents;
  return indices || (p.cu_seqlens && !plan.lengths_known);
}

void book_maps(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const auto N = static_cast<std::size_t>(p.num_sequences);
  // Decode reads lengths that only the device knows without a map.
  const bool reads_lengths = p.operation == Operation::kDecode && !plan.lengths_known;
  std::size_t words = p.cu_seqlens && !reads_lengths ? 2 * (N + 1) : 0;
  if (plan.segmented) words += N + 1 + 3 * plan.segments.size();
  builder.book(block::kSequenceMap, words, sizeof(int64_t));
  builder.book(block::kDeviceFlags, has_device_flags(plan) ? 1 : 0, sizeof(int32_t));
}

void plan_expand_bias(plan::PlanBuilder& builder, const char* stage) {
  const Problem& p = builder.plan().problem;
  if (!has_head_bias(p)) return;
  builder.kernel(stage, "expand_bias", "dt_bias has one bias a head, they read one a channel");
  builder.book(block::kHeadBias, static_cast<std::size_t>(p.num_value_heads),
               static_cast<std::size_t>(p.key_dim) * sizeof(float));
}

void list_sum_bias(plan::PlanBuilder& builder, const char* stage) {
  const Gradients* wanted = builder.gradients();
  if (wanted && wanted->ddt_bias && is_bias_a_head(builder.plan().problem, *wanted->ddt_bias))
    builder.kernel(stage, "sum_bias", "ddt_bias is the sum over channels");
}

int64_t v_splits(const Plan& plan) {
  const auto units =
      static_cast<int64_t>(plan.segmented ? plan.segments.size() : plan.cu_seqlens.size() - 1) *
      plan.problem.num_value_heads;
  return plan.problem.value_dim >= 128 && 2 * units <= plan.device.num_sms ? 2 : 1;
}

int64_t bound_of_chunks(const Problem& p) {
  if (!p.cu_seqlens) return p.num_sequences * ((p.num_tokens + kChunk - 1) / kChunk);
  return p.num_tokens / kChunk + p.num_sequences;
}

int64_t most_chunks(const Plan& plan) {
  const Problem& p = plan.problem;
  if (!p.cu_seqlens || !plan.lengths_known) return bound_of_chunks(p);
  int64_t chunks = 0;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
    chunks += (plan.cu_seqlens[n + 1] - plan.cu_seqlens[n] + kChunk - 1) / kChunk;
  return chunks;
}

const registry::DeviceChecks kDeviceChecks = {.call = if_built<check_device>(),
                                              .pointer = if_built<check_pointer>(),
                                              .zero_rows = if_built<zero_rows>()};

}  // namespace kda::cuda
