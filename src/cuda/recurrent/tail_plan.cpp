// SPDX-License-Identifier: Apache-2.0
// How calls with a tail are planned: cuda/recurrent/tails.cpp launches them.
#include <algorithm>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/decode/tail/layout.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/recurrent/tails.hpp"
#include "plan/builder.hpp"

namespace kda::cuda::recurrent {
namespace {

/// Most rows of the tail in front of the tokens behind a boundary, and most such tokens.
constexpr int64_t kMostBehind = kTailBoundary - 1;

/// Whether the rows of a batch follow each other without gaps, as those of a pack do.
bool is_packed(const Problem& p) {
  const auto follows = [&](const TensorDesc& desc) {
    return p.num_tokens <= 1 || desc.strides[0] == p.num_tokens * desc.strides[1];
  };
  return p.batch <= 1 || (follows(p.q) && follows(p.k) && follows(p.v) && follows(p.g) &&
                          follows(p.beta) && follows(p.o));
}

/// A pack has all sequences where rows of the batch allow that, else one.
Problem inner_problem(const Problem& p) {
  const bool packed = is_packed(p);
  Problem inner = p;
  inner.tail.reset();
  inner.cu_seqlens = DType::kInt64;
  inner.batch = 1;
  inner.num_tokens = packed ? p.batch * p.num_tokens : p.num_tokens;
  inner.num_sequences = packed ? 2 * p.num_sequences : 2;
  for (TensorDesc* desc : {&inner.q, &inner.k, &inner.v, &inner.g, &inner.beta, &inner.o})
    if (packed && p.batch > 1 && p.num_tokens == 1) desc->strides[1] = desc->strides[0];
  inner.initial_state_mask = false;
  if (p.tail->split) {  // fp32 states of its own, [N], with all bits
    inner.initial_state = states(p, DType::kFloat32, p.num_sequences, true);
    inner.first_slot = 0;
  }
  inner.final_state = inner.initial_state;
  inner.zero_skipped = zeroes_skipped(p);
  return inner;
}

std::string too_large(const registry::Request& request, int64_t bytes, const std::string& what) {
  const int64_t most = block_shared_bytes(request.device.compute_capability);
  if (bytes <= most) return {};
  return cat("tail: R = ", request.problem.tail->rows, " rows", what, " take ", bytes,
             " bytes of shared memory, ", request.device.name, " has ", most);
}

/// Its kernel has one size, in the layout of the engine that keeps rings.
std::string decline_ring(const registry::Request& request) {
  const Problem& p = request.problem;
  const TensorDesc& states = p.initial_state->tensor;
  const auto& strides = states.strides;
  if (p.key_dim != tail::kChannels || p.value_dim != tail::kChannels)
    return cat("a ring is for K = V = ", tail::kChannels, " there, got K = ", p.key_dim,
               ", V = ", p.value_dim);
  if (p.state_layout != StateLayout::kVK) return "a ring is for states [V, K] there, got [K, V]";
  if (strides[2] != p.key_dim || strides[0] % 4 != 0 || strides[1] % 4 != 0 ||
      states.alignment < 4 * dtype_size(states.dtype))
    return "a ring is for states without gaps, at multiples of 4 numbers, there";
  return too_large(request, tail::ring_layout(static_cast<int32_t>(p.tail->rows)).bytes(),
                   " of a ring");
}

/// Which kernel decodes up to `tokens` tokens a sequence.
tail::Kernel kernel_of(const Problem& p, int64_t tokens) {
  const bool has_size = p.key_dim == tail::kChannels && p.value_dim == tail::kChannels;
  return tail::kernel_of(has_size && in_vectors(p), p.tail->rows, tokens, p.token_parents);
}
const char* name_of(tail::Kernel kernel) {
  return kernel == tail::Kernel::kStep     ? "step"
         : kernel == tail::Kernel::kVerify ? "verify"
                                           : "tail";
}
/// Shared memory of a block of it, with up to `sure` rows in front of the tokens.
int64_t shared_bytes(const Problem& p, int64_t sure, int64_t tokens) {
  switch (kernel_of(p, tokens)) {
    case tail::Kernel::kStep:
      return tail::step_layout(static_cast<int32_t>(p.tail->rows),
                               static_cast<int32_t>(dtype_size(p.tail->k.dtype)),
                               static_cast<int32_t>(dtype_size(p.tail->g.dtype)), has_head_gate(p))
          .bytes();
    case tail::Kernel::kVerify: return tail::verify_bytes(sure, tokens);
    case tail::Kernel::kTail: break;
  }
  return tail::shared_bytes(sure, tokens, p.key_dim, p.value_dim);
}

std::string decline_forward(const registry::Request& request) {
  const Problem& p = request.problem;
  return too_large(
      request,
      std::max(shared_bytes(p, p.tail->rows, 0), shared_bytes(p, kMostBehind, kMostBehind)), "");
}

void plan_forward(plan::PlanBuilder& builder, const Plan& inner) {
  const Problem& p = builder.problem();
  const int64_t heads = p.num_sequences * p.num_value_heads;
  const auto N = static_cast<std::size_t>(p.num_sequences);
  builder.stage("tail_fold", heads, "rows in front of the boundary where a sequence ends");
  plan_expand_bias(builder, "tail_fold");
  builder.kernel("tail_fold", "tail_ends");
  if (p.tail->split) builder.kernel("tail_fold", "fold_split");
  builder.kernel("tail_fold", name_of(kernel_of(p, 0)));
  if (p.tail->split) builder.kernel("tail_fold", "join_states");
  for (const StagePlan& stage : inner.stages)
    builder.stage(stage.name.c_str(), stage.num_tasks, stage.what);
  for (const KernelChoice& kernel : inner.kernels)
    builder.kernel(kernel.stage.c_str(), kernel.kernel.c_str(), kernel.why);
  builder.stage("tail_rows", heads, "tokens behind that boundary, at most 15");
  if (p.tail->split) builder.kernel("tail_rows", "split_states");
  builder.kernel("tail_rows", name_of(kernel_of(p, kMostBehind)));
  if (p.num_heads != p.num_value_heads) builder.kernel("tail_rows", "append_keys");
  book_maps(builder);
  builder.book(block::kTailEnds, block::kTailEndsOfSequence * N, sizeof(int32_t));
  if (p.tail->split)
    builder.book(block::kTailStates, N * static_cast<std::size_t>(p.num_value_heads),
                 static_cast<std::size_t>(p.key_dim * p.value_dim) * sizeof(float));
  builder.book(block::kTailPacks, 3 * N + 1, sizeof(int64_t));
  builder.book(block::kTailForward, inner.workspace_bytes, 1);
}

}  // namespace

bool in_vectors(const Problem& p) {
  const TensorDesc& states = p.initial_state->tensor;
  const TailDesc& tail = *p.tail;
  bool rows = true;
  for (const TensorDesc* desc : {&p.q, &p.k, &p.v, &tail.k, &tail.v_new})
    rows &= desc->alignment >= kDefaultAlignment;
  if (!has_head_gate(p)) rows &= std::min(p.g.alignment, tail.g.alignment) >= kDefaultAlignment;
  return rows && p.key_dim % 4 == 0 && p.key_dim == p.value_dim && states.strides[2] == p.key_dim &&
         states.strides[0] % 4 == 0 && states.strides[1] % 4 == 0 &&
         states.alignment >= 4 * dtype_size(states.dtype);
}

/// Accepted rows move before the decode; keys that value heads share follow behind it.
void plan_tail_decode(plan::PlanBuilder& builder) {
  const Problem& p = builder.problem();
  if (p.tail->ring) return builder.kernel("decode", "ring");
  if (p.tail->accepted_columns > 0) {
    builder.kernel("decode", "move_accepted");
    builder.book(block::kWrongAccepted, static_cast<std::size_t>(p.num_sequences), sizeof(int32_t));
  }
  if (p.tail->split) builder.kernel("decode", "fold_split");
  builder.kernel("decode", name_of(kernel_of(p, tail_tokens(p, builder.plan().cu_seqlens))));
  if (p.num_heads != p.num_value_heads) builder.kernel("decode", "append_keys");
}

std::string decline_tail_decode(const registry::Request& request) {
  const Problem& p = request.problem;
  if (p.tail->ring) return decline_ring(request);
  const int64_t tokens = tail_tokens(p, request.cu_seqlens);
  const bool unknown = p.cu_seqlens && request.cu_seqlens.empty();
  return too_large(request, shared_bytes(p, p.tail->rows, tokens),
                   cat(" and ", unknown ? "up to " : "", tokens, " tokens a sequence",
                       unknown ? ", whose lengths are unknown," : ""));
}

const registry::TailForward kTailForward = {.decline = decline_forward,
                                            .inner = inner_problem,
                                            .plan = plan_forward,
                                            .run = if_built<tail_forward>()};

}  // namespace kda::cuda::recurrent
