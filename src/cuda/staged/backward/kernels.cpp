// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/kernels.hpp"

#include <cmath>
#include <utility>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/staged/backward/sizes.hpp"

namespace kda::cuda::staged {
namespace {

/// Why chains have factors in bf16; empty if they are in fp16. Norms and sigmoids bound fp16
/// factors. (A log gate may be positive: such chains are made again.) Scores of a small scale would
/// lose bits, and X of a large one might not fit. Segments begin from the states of a scan, whose
/// factors are in bf16. With batch_invariant what a batch cuts does not change other sequences.
std::string decline_fp16(const Plan& plan, bool segments) {
  if (segments) return "segments begin from states of bf16 factors";
  if (plan.problem.batch_invariant && plan.lengths_known && plan::asks_for_segments(plan.requested))
    return "batch_invariant: segments of other sequences would need bf16 factors";
  return decline_fp16_factors(plan.problem);
}

/// Why chunk_grad is the portable kernel; empty if Hopper's serves.
std::string decline_hopper_grad(const Plan& plan, const Gradients& gradients) {
  const Problem& p = plan.problem;
  const int64_t of_each = p.num_value_heads / p.num_heads;
  if (!has_hopper_grad(p.key_dim, p.value_dim, of_each))
    return cat("K = ", p.key_dim, ", V = ", p.value_dim, ", HV / H = ", of_each,
               "; Hopper's needs 128, or 64 with one value head a q/k head");
  for (const auto& [name, desc] : {std::pair{"q", &p.q}, std::pair{"k", &p.k}})
    if (!has_whole_rows(*desc, DType::kBFloat16))
      return cat(name, " is not of bf16 rows aligned to 16 bytes");
  for (const auto& [name, desc] : {std::pair{"d_o", &gradients.d_o}, std::pair{"dq", &gradients.dq},
                                   std::pair{"dk", &gradients.dk}})
    if (!has_whole_rows(*desc, DType::kBFloat16))
      return cat(name, " is not of bf16 rows aligned to 16 bytes");
  const bool alone =  // what else is in the batch must not change the kernel
      p.batch_invariant || plan.requested.context_parallel == SegmentPolicy::kOff;
  if (!alone && !has_units_enough(most_chunks(plan) * p.num_heads, of_each, plan.device.num_sms))
    return cat(most_chunks(plan) * p.num_heads, " chunks of q/k heads are too few for ",
               plan.device.num_sms, " SMs");
  return {};
}

/// Why gates have no tiles in Hopper's chunk_grad; empty if they have.
std::string decline_gate_tiles(const Problem& p, const Gradients& gradients) {
  if (has_head_gate(p)) return "g has one gate a head";
  if (p.head_map != HeadMap::kGrouped) return "q/k heads are tiled";
  if (!has_whole_rows(p.g, DType::kBFloat16)) return "g is not of bf16 rows aligned to 16 bytes";
  if (!has_whole_rows(gradients.dg, DType::kBFloat16))
    return "dg is not of bf16 rows aligned to 16 bytes";
  return {};
}

GradGates grad_gates_of(const Problem& p, const Gradients& gradients) {
  if (has_head_gate(p) && (!gradients.dg || is_a_head(p, *gradients.dg))) return GradGates::kHead;
  return decline_gate_tiles(p, gradients).empty() ? GradGates::kTiles : GradGates::kRows;
}

/// The most value heads of a group whose chains of `columns` columns leave SMs idle in blocks
/// of 64.
int64_t most_narrow_heads(const Plan& plan, int64_t columns) {
  const auto chains =
      plan.segmented ? static_cast<int64_t>(plan.segments.size()) : plan.problem.num_sequences;
  const int64_t blocks = 2 * chains * ((columns + kVTile - 1) / kVTile);
  return blocks > 0 ? plan.device.num_sms / blocks : INT64_MAX;
}

}  // namespace

std::string decline_fp16_factors(const Problem& p) {
  const double scale = std::abs(static_cast<double>(static_cast<float>(effective_scale(p))));
  if (p.key_dim != 128 || p.value_dim != 128)
    return cat("K = ", p.key_dim, ", V = ", p.value_dim, "; fp16 needs 128");
  if (!p.qk_l2norm) return "q and k are not normalised by the call";
  if (p.beta_mode == BetaMode::kPlain) return "no sigmoid bounds beta";
  if (!(scale >= 0x1p-8 && scale <= 0x1p4))
    return cat("scale = ", effective_scale(p), " is not 2^-8 to 2^4 in size");
  return {};
}

bool has_whole_rows(const TensorDesc& desc, DType type) {
  const int64_t steps = desc.strides[0] | desc.strides[1] | desc.strides[2];
  return desc.dtype == type && steps % 8 == 0 && desc.alignment >= 16;
}
bool has_whole_rows(const std::optional<TensorDesc>& desc, DType type) {
  return !desc || has_whole_rows(*desc, type);
}

BackwardKernels kernels_of(const Plan& plan, const Gradients& gradients) {
  using Chains = BackwardKernels::Chains;
  using Grad = BackwardKernels::Grad;
  const Problem& p = plan.problem;
  const bool hopper = has_hopper_kernels(plan.device), tokens = wants_tokens(gradients);
  BackwardKernels kernels;
  if (hopper)
    kernels.chains =
        decline_fp16(plan, plan.segmented).empty() ? Chains::kWgmmaFp16 : Chains::kWgmma;
  kernels.fp16_rows = p.q.dtype == DType::kFloat16;
  if (kernels.fp16_rows && tokens)
    kernels.grad = Grad::kHopper;
  else if (tokens)
    kernels.grad =
        hopper && decline_hopper_grad(plan, gradients).empty() ? Grad::kHopper : Grad::kPortable;
  kernels.grad_gates = kernels.fp16_rows ? GradGates::kRows : grad_gates_of(p, gradients);
  kernels.errors = tokens || has_device_flags(plan);
  // dZ in fp16 has lost digits where a column of V is small beside others: dv has none of it.
  kernels.grad_stores_dv = kernels.grad == Grad::kHopper && !kernels.fp16_rows && gradients.dv &&
                           has_whole_rows(gradients.dv, p.q.dtype);
  kernels.parameters = gradients.dA_log || gradients.ddt_bias;
  kernels.may_fall_back =
      kernels.chains == Chains::kWgmmaFp16 && !kernels.fp16_rows &&
      (gradients.d_initial_state || p.gate_mode == GateMode::kLog || plan.requested.spans);
  kernels.merge_hopper = merges_on_hopper(plan.device, p.key_dim);
  kernels.one_merge = kernels.merge_hopper && !plan.requested.spans;
  kernels.scan = {.hopper = hopper, .num_sms = plan.device.num_sms};
  if (!hopper) {
    kernels.narrow_heads = most_narrow_heads(plan, p.value_dim);
    kernels.narrow_scan_heads = most_narrow_heads(plan, p.value_dim + p.key_dim);
  }
  return kernels;
}

BackwardKernels kernels_of_cut(const BackwardKernels& whole) {
  BackwardKernels kernels = whole;
  if (whole.on_hopper()) kernels.chains = BackwardKernels::Chains::kWgmma;
  kernels.may_fall_back = false;
  kernels.narrow_heads = kernels.narrow_scan_heads = 0;
  return kernels;
}

namespace {

/// Blocks of 64 columns of V.
int64_t chains_of(const Problem& p, int64_t sequences) {
  return sequences * p.num_value_heads * ((p.value_dim + kVTile - 1) / kVTile);
}

void list_segments(plan::PlanBuilder& builder, const BackwardKernels& kernels, int64_t segments) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t HV = p.num_value_heads, chains = chains_of(p, segments);
  builder.stage("segment_scan", 2 * segments * HV, "of each group: B and M of every segment");
  builder.stage("chunk_reverse", chains, "of each group: D of every segment, from dS = 0");
  builder.stage("segment_merge", p.num_sequences * HV,
                "of each group: states before segments, in order");
  builder.stage("reverse_merge", p.num_sequences * HV,
                "of each group: dS behind segments, right to left");
  if (plan.segmented)
    builder.kernel("segment_scan", "segment_sequences", "each segment as a sequence, once a call");
  builder.kernel("segment_scan", kernels.scan.hopper ? "segment_scan_sm90" : "segment_scan");
  if (kernels.one_merge) {
    builder.kernel("chunk_reverse", "d_chains", "nothing but D is stored");
    builder.kernel("segment_merge", "both_merges", "K = 64 or 128 on Hopper, in one phase");
    builder.kernel("reverse_merge", "both_merges");
    return;
  }
  if (kernels.on_hopper()) {
    if (!plan.requested.spans || !kernels.errors)
      builder.kernel("chunk_reverse", "d_chains", "nothing but D is stored");
  } else {
    builder.kernel("chunk_reverse", "chunk_reverse");
  }
  builder.kernel("segment_merge", merge_kernel(plan.device, p.key_dim));
  builder.kernel("reverse_merge", "reverse_merge");
}

void list_chains(plan::PlanBuilder& builder, const BackwardKernels& kernels, int64_t sequences,
                 bool of_segments) {
  const Plan& plan = builder.plan();
  const int64_t chains = chains_of(plan.problem, sequences);
  const bool kept = plan.requested.keep == KeepPolicy::kChunks;
  const bool makes_errors = kernels.grad != BackwardKernels::Grad::kNone && !kept;
  if (makes_errors)
    builder.stage("chunk_delta_h", chains, "of each group: states before chunks and their errors");
  builder.stage("chunk_reverse", chains,
                kernels.grad_stores_dv ? "of each group: dS behind chunks, dZ, right to left"
                                       : "of each group: dS behind chunks, dv, right to left");
  const char* stage = makes_errors ? "chunk_delta_h" : "chunk_reverse";
  switch (kernels.chains) {
    case BackwardKernels::Chains::kPortable:
      if (kernels.errors)
        builder.kernel(stage, "chunk_delta_h", makes_errors ? "" : "flags bad metadata alone");
      builder.kernel("chunk_reverse", "chunk_reverse");
      return;
    case BackwardKernels::Chains::kWgmma:
      builder.kernel(stage, "backward_chains", cat("bf16: ", decline_fp16(plan, of_segments)));
      break;
    case BackwardKernels::Chains::kWgmmaFp16:
      builder.kernel(stage, "backward_chains_fp16", "norms and sigmoids bound its factors");
      break;
  }
  if (makes_errors)
    builder.kernel("chunk_reverse", plan.kernels.back().kernel.c_str(), "both directions at once");
  if (!kernels.may_fall_back) return;
  builder.kernel("chunk_reverse", "chunk_intra, fallback", "chains that fp16 could not finish");
  builder.kernel("chunk_reverse", "backward_chains, fallback", "those again, with factors in bf16");
}

void list_grad(plan::PlanBuilder& builder, const BackwardKernels& kernels) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t tiles = most_chunks(plan) * p.num_value_heads;
  if (kernels.grad == BackwardKernels::Grad::kHopper) {
    builder.stage("chunk_grad", tiles,
                  cat("of each group: dq, dk, dg, dbeta", kernels.grad_stores_dv ? ", dv" : "",
                      " of a chunk, with norms, gates, steps"));
    if (kernels.fp16_rows) {
      builder.kernel("chunk_grad", grad_kernel(kernels.grad_gates, true),
                     "Hopper's, which finishes them; sums over tokens in tf32");
      return;
    }
    const std::string gates = decline_gate_tiles(p, *builder.gradients());
    builder.kernel("chunk_grad", grad_kernel(kernels.grad_gates, false),
                   cat("Hopper's, which finishes them", gates.empty() ? "" : "; ", gates));
    builder.kernel("chunk_grad", "chunk_grad_sm90, fallback",
                   "chunks with decays beyond its anchors or betas near 0");
  } else {
    builder.stage("chunk_grad", tiles, "of each group: dq, dk, dg, dbeta of a chunk");
    builder.stage("backward_gradients", pieces_of(p) * p.num_value_heads,
                  "of each group: sums over value heads; norms, gates, steps");
    builder.kernel("chunk_grad", "chunk_grad",
                   has_hopper_kernels(plan.device)
                       ? cat("portable: ", decline_hopper_grad(plan, *builder.gradients()))
                       : "");
    builder.kernel("backward_gradients", "backward_gradients");
  }
}

}  // namespace

void list_backward(plan::PlanBuilder& builder, const BackwardKernels& kernels) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t HV = p.num_value_heads, N = p.num_sequences;
  const bool fp16 = kernels.chains == BackwardKernels::Chains::kWgmmaFp16;
  if (plan.device_cut.on) {
    builder.stage("segment_cut", 1, "segments by lengths on the device, once a call");
    builder.kernel("segment_cut", "backward_cut", "cuts, or leaves one family no work");
  }
  builder.stage("chunk_intra", most_chunks(plan) * HV,
                "of each group: factors of one (chunk, value head) a task");
  plan_expand_bias(builder, "chunk_intra");
  builder.kernel("chunk_intra", fp16 ? "chunk_intra_fp16" : "chunk_intra",
                 fp16 ? "factors in fp16, for the chains" : "factors in bf16, for the chains");
  if (plan.device_cut.on && fp16)
    builder.kernel("chunk_intra", "chunk_intra", "factors in bf16, for chains of segments");
  const auto segments = static_cast<int64_t>(plan.segments.size());
  if (plan.segmented) list_segments(builder, kernels, segments);
  list_chains(builder, kernels, plan.segmented ? segments : N, plan.segmented);
  if (plan.device_cut.on) {
    const BackwardKernels cut = kernels_of_cut(kernels);
    list_segments(builder, cut, N + plan.device_cut.most_behind);
    list_chains(builder, cut, N + plan.device_cut.most_behind, true);
  }
  if (kernels.grad != BackwardKernels::Grad::kNone) list_grad(builder, kernels);
  if (!kernels.parameters) return;
  builder.stage("backward_parameters", HV, "of each group: sums for A_log and dt_bias, in order");
  builder.kernel("backward_parameters", "backward_parameters");
  list_sum_bias(builder, "backward_parameters");
}

}  // namespace kda::cuda::staged
