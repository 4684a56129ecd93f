// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/rows.hpp"

#include <cmath>
#include <tuple>

#include "core/text.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/host/device.hpp"
#include "cuda/host/fused.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/tile/chunk.hpp"
#include "plan/ledger.hpp"
#include "plan/one_kernel.hpp"
#include "stage/segment.hpp"

namespace kda::cuda {
namespace {

namespace block = plan::block;

std::size_t no_scratch(const Problem&, int32_t) { return 0; }
std::string decline_nothing(const Problem&) { return {}; }

std::string decline_alignment(const char* name, const TensorDesc& desc, int64_t needed) {
  if (desc.alignment >= needed) return {};
  return cat(name, " is aligned to ", desc.alignment, " bytes, needs ", needed);
}

constexpr const char* kNoSm90a = "this build has no kernels of sm_90a";

const char* fused_unavailable() noexcept {
  if (const char* reason = unavailable()) return reason;
  return sm90::kBuilt ? nullptr : kNoSm90a;
}

std::string decline_fused_types(const Problem& p) {
  const bool fp16 = p.q.dtype == DType::kFloat16;
  if (!fp16 && p.q.dtype != DType::kBFloat16)
    return cat("q is ", dtype_name(p.q.dtype), "; needs bf16 or fp16");
  for (const auto& [name, desc] :
       {std::pair{"k", &p.k}, std::pair{"v", &p.v}, std::pair{"o", &p.o}, std::pair{"g", &p.g}})
    if (desc->dtype != p.q.dtype && (desc != &p.g || fp16 || desc->dtype != DType::kFloat32))
      return cat(name, " is ", dtype_name(desc->dtype), ", q ", dtype_name(p.q.dtype),
                 desc == &p.g && !fp16 ? "; needs the same, or fp32" : "; needs the same");
  if (fp16 && !fp16_operands(p))
    return "q is fp16, for which it needs gates and beta of the call and q, k normalised by it";
  return {};
}

std::string decline_fused(const Problem& p) {
  if (p.operation != Operation::kForward) return "decode is its own kernel";
  if (built() && !sm90::kBuilt) return kNoSm90a;  // a build without CUDA plans for any GPU
  if (std::string reason = decline_fused_types(p); !reason.empty()) return reason;
  if (p.key_dim != p.value_dim || (p.key_dim != 64 && p.key_dim != 128))
    return cat("K = ", p.key_dim, ", V = ", p.value_dim, "; needs 64 for both, or 128");
  if (p.checkpoints && p.checkpoint_every % sm90::kSubchunk != 0)
    return cat("checkpoint_every = ", p.checkpoint_every, " is not a multiple of ",
               sm90::kSubchunk);
  for (const auto& [name, desc] : {std::pair{"q", &p.q}, std::pair{"k", &p.k}, std::pair{"v", &p.v},
                                   std::pair{"g", &p.g}, std::pair{"o", &p.o}})
    if (std::string reason = decline_alignment(name, *desc, 16); !reason.empty()) return reason;
  return {};
}

std::string decline_one_pass(const Problem& p) {
  const double scale = effective_scale(p);
  if (fp16_operands(p) && !(std::abs(scale) >= 0x1p-24 && std::abs(scale) <= 0x1p24))
    return cat("scale = ", scale, " is not 2^-24 to 2^24 in size, as outputs in fp16 need");
  const auto& strides = p.o.strides;
  const int64_t row = p.num_value_heads * p.value_dim;
  const bool dense = strides[2] == p.value_dim && strides[1] == row &&
                     (p.batch == 1 || strides[0] == p.num_tokens * row);
  return dense ? "" : "o is not dense";
}

std::string yield_fused(const Plan& plan) {
  return plan::stages_preferred(
      plan, !plan.problem.checkpoints && decline_one_pass(plan.problem).empty());
}

std::string decline_staged(const Problem& p) {
  if (p.operation != Operation::kForward) return "decode is its own kernel";
  if (p.q.dtype == DType::kFloat32 || p.q.dtype != p.k.dtype || p.q.dtype != p.v.dtype)
    return cat("q, k, v are ", dtype_name(p.q.dtype), ", ", dtype_name(p.k.dtype), ", ",
               dtype_name(p.v.dtype), "; needs bf16 or fp16 for all three");
  if (p.key_dim > kMaxStagedK) return cat("K = ", p.key_dim, " is above ", kMaxStagedK);
  if (p.key_dim % 8 != 0) return cat("K = ", p.key_dim, " is not a multiple of 8");
  if (p.value_dim % 8 != 0) return cat("V = ", p.value_dim, " is not a multiple of 8");
  if (p.checkpoints && p.checkpoint_every % kChunk != 0)
    return cat("checkpoint_every = ", p.checkpoint_every, " is not a multiple of the chunk ",
               kChunk);
  for (const auto& [name, desc, needed] :
       {std::tuple{"q", &p.q, int64_t{16}}, std::tuple{"k", &p.k, int64_t{16}},
        std::tuple{"v", &p.v, int64_t{16}}, std::tuple{"g", &p.g, 2 * dtype_size(p.g.dtype)},
        std::tuple{"o", &p.o, int64_t{4}}})
    if (std::string reason = decline_alignment(name, *desc, needed); !reason.empty()) return reason;
  return {};
}

bool add_map(Plan& plan) {
  const Problem& p = plan.problem;
  const auto N = static_cast<std::size_t>(p.num_sequences);
  // Decode reads lengths that only the device knows without a map.
  const bool reads_lengths = p.operation == Operation::kDecode && !plan.lengths_known;
  std::size_t words = p.cu_seqlens && !reads_lengths ? 2 * (N + 1) : 0;
  if (plan.segmented) words += N + 1 + 3 * plan.segments.size();
  const bool indices = (p.initial_state && p.initial_state->indexed) ||
                       (p.final_state && p.final_state->indexed) ||
                       (p.checkpoints && p.checkpoints->indexed) || p.num_accepted_tokens;
  const bool flags = indices || (p.cu_seqlens && !plan.lengths_known);
  return plan::add_block(plan, block::kSequenceMap, words, sizeof(int64_t)) &&
         plan::add_block(plan, block::kDeviceFlags, flags ? 1 : 0, sizeof(int32_t));
}

/// What segments need: their units and, in one pass, outputs of transitions.
bool add_fused_segments(Plan& plan) {
  if (!plan.segmented) return true;
  const Problem& p = plan.problem;
  const auto N = static_cast<std::size_t>(p.num_sequences);
  const auto heads = static_cast<std::size_t>(p.num_value_heads);
  const auto rows = static_cast<std::size_t>(p.batch * p.num_tokens) * heads;
  const std::size_t words = N + 1 + (2 * plan.segments.size() + 1) * sm90::kWorkUnitWords;
  const bool one_pass = plan.options.segment_method == SegmentMethod::kOnePass;
  const std::size_t stop = plan.transitions_stop ? (plan.segments.size() - N) * heads : 0;
  const std::size_t runs = static_cast<std::size_t>(p.batch * p.num_tokens) / sm90::kSubchunk +
                           2 * (plan.segments.size() - N + 1);  // fused/output_residual.cuh
  const bool lack = fp16_operands(p) && p.o.dtype == DType::kBFloat16;
  const std::size_t rests = one_pass && lack ? runs * heads : 0;
  return plan::add_block(plan, block::kSegmentUnits, words, sizeof(int64_t)) &&
         plan::add_block(plan, block::kExitToken, stop, sizeof(int64_t)) &&
         plan::add_block(plan, block::kTransitionOutput, one_pass ? rows : 0,
                         sm90::fused_row_bytes(p.value_dim)) &&
         plan::add_block(plan, block::kOutputResidual, rests, sm90::residual_bytes(p.value_dim));
}

/// States between the shares of clusters, where there are more streams than clusters.
bool add_fused(Plan& plan) {
  const Problem& p = plan.problem;
  const auto units =
      plan.segmented ? 2 * static_cast<int64_t>(plan.segments.size()) : p.num_sequences;
  const int64_t streams = units * p.num_value_heads;
  const int64_t shares = sm90::fused_clusters(streams, plan.device.num_sms, p.key_dim);
  const auto handed = static_cast<std::size_t>(shares < streams ? shares : 0);
  return add_map(plan) && add_fused_segments(plan) &&
         plan::add_block(plan, block::kHandoffStates, handed,
                         sm90::handoff_state_bytes(p.key_dim)) &&
         plan::add_block(plan, block::kHandoffFlags, handed, sm90::handoff_flag_bytes(p.key_dim));
}

StageSizes sizes_of(const Plan& plan) {
  const Problem& p = plan.problem;
  constexpr std::size_t kSize = 2;  // bf16, fp16
  const std::size_t Kp = p.key_dim <= 64 ? 64 : 128;
  const auto v_tiles = static_cast<std::size_t>((p.value_dim + kVTile - 1) / kVTile);
  StageSizes sizes;
  sizes.tiles = static_cast<std::size_t>(most_chunks(plan) * p.num_value_heads);
  sizes.w = sizes.kg = sizes.qg = sizes.tiles * kChunk * Kp * kSize;
  sizes.u = sizes.vn = sizes.tiles * v_tiles * kChunk * kVTile * kSize;
  sizes.Aqk = sizes.T = sizes.tiles * kChunk * kChunk * kSize;
  sizes.gamma = sizes.tiles * Kp * sizeof(float);
  sizes.beta = sizes.diag = sizes.tiles * kChunk * sizeof(float);
  sizes.h = sizes.tiles * v_tiles * kVTile * Kp * kSize;
  return sizes;
}

bool add_staged(Plan& plan) {
  const StageSizes sizes = sizes_of(plan);
  return add_map(plan) && plan::add_block(plan, block::kFactorW, 1, sizes.w) &&
         plan::add_block(plan, block::kFactorU, 1, sizes.u) &&
         plan::add_block(plan, block::kFactorKg, 1, sizes.kg) &&
         plan::add_block(plan, block::kFactorQg, 1, sizes.qg) &&
         plan::add_block(plan, block::kFactorAqk, 1, sizes.Aqk) &&
         plan::add_block(plan, block::kFactorScalars, 1, sizes.gamma + sizes.beta + sizes.diag);
}

}  // namespace

bool fp16_operands(const Problem& p) {
  return stage::transition_norm_never_grows(p) && p.g.dtype == p.q.dtype;
}

int64_t most_chunks(const Plan& plan) {
  const Problem& p = plan.problem;
  if (!p.cu_seqlens) return p.num_sequences * ((p.num_tokens + kChunk - 1) / kChunk);
  if (!plan.lengths_known) return p.num_tokens / kChunk + p.num_sequences;
  int64_t chunks = 0;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
    chunks += (plan.cu_seqlens[n + 1] - plan.cu_seqlens[n] + kChunk - 1) / kChunk;
  return chunks;
}

const stage::Implementation kFused = {.name = "cuda.sm90.fused",
                                      .device = DeviceKind::kCuda,
                                      .chunk_size = kChunk,
                                      .unavailable = fused_unavailable,
                                      .decline = decline_fused,
                                      .scratch_bytes = no_scratch,
                                      .forward = fused::forward,
                                      .decode = recurrent::decode,
                                      .segment_scan = fused::segment_scan,
                                      .segment_merge = fused::segment_merge,
                                      .segment_correct = fused::segment_correct,
                                      .decline_one_pass = decline_one_pass,
                                      .norm_check_tokens = sm90::kNormCheckTokens,
                                      .add_blocks = add_fused,
                                      .min_compute_capability = 90,
                                      .max_compute_capability = 90,
                                      .yield = yield_fused};

const stage::Implementation kStaged = {.name = "cuda.sm80.staged",
                                       .device = DeviceKind::kCuda,
                                       .chunk_size = kChunk,
                                       .unavailable = unavailable,
                                       .decline = decline_staged,
                                       .scratch_bytes = no_scratch,
                                       .forward = staged::forward,
                                       .decode = recurrent::decode,
                                       .segment_scan = staged::segment_scan,
                                       .segment_merge = segment_merge,
                                       .segment_correct = nullptr,
                                       .add_blocks = add_staged,
                                       .min_compute_capability = 80,
                                       .chunk = staged::chunk,
                                       .stage_sizes = sizes_of};

const stage::Implementation kRecurrent = {.name = "cuda.smxx.recurrent",
                                          .device = DeviceKind::kCuda,
                                          .chunk_size = kChunk,
                                          .unavailable = unavailable,
                                          .decline = decline_nothing,
                                          .scratch_bytes = no_scratch,
                                          .forward = recurrent::forward,
                                          .decode = recurrent::decode,
                                          .segment_scan = recurrent::segment_scan,
                                          .segment_merge = segment_merge,
                                          .segment_correct = nullptr,
                                          .add_blocks = add_map,
                                          .min_compute_capability = 80};

}  // namespace kda::cuda
