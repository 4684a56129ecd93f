// SPDX-License-Identifier: Apache-2.0
// The CUDA backends: their rows in the registry (backend.cpp of each) and the functions that launch
// their kernels. What they serve, how they plan and the memory they need is known in every build; a
// build without CUDA has no launch functions, and rows that say so.
#pragma once

#include "plan/builder.hpp"
#include "registry/rows.hpp"

namespace kda::cuda {

/// One kernel for Hopper (sm_90a), bf16 or fp16, K = V = 64 or 128.
namespace fused {
extern const registry::ForwardRow kForward;
Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status segment_merge(const stage::SegmentMerge& args);
Status segment_correct(const stage::SegmentCorrect& args);
Status span_begin(const stage::SpanMapsCall& args);
Status span_finish(const stage::SpanFinish& args);
/// Are operands fp16? No factor and no decay is above 1 then.
bool has_fp16_operands(const Problem& problem);
}  // namespace fused

/// Chunked, tensor cores, 16-bit q, k, v (the backward: bf16); K <= 128.
namespace staged {
extern const registry::ForwardRow kForward;
extern const registry::BackwardRow kBackward;
/// Empty if it serves inputs such as these: types, sizes, alignment.
std::string decline_inputs(const Problem& problem);
Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status chunk_intra(const stage::ChunkIntra& args);
Status recompute_w_u(const stage::RecomputeWU& args);
Status chunk_delta_h(const stage::ChunkDeltaH& args);
Status chunk_o(const stage::ChunkO& args);
Status backward(const stage::Backward& args);
Status span_backward_begin(const stage::SpanBackwardBegin& args);
Status span_backward_finish(const stage::Backward& args);
/// Plans the backward in groups of heads of so many bytes, or of one q/k head. The row's own plans
/// have kGroupBytes (staged/backward/sizes.hpp).
void plan_backward_within(plan::PlanBuilder& builder, double group_bytes);
/// What KeepPolicy::kKeep keeps, in `saved`: states before chunks and errors, of all value heads.
void save_chunks(plan::PlanBuilder& builder);
/// Value heads of a group of the backward, whose tiles lie together in these blocks.
int64_t kept_group_heads(const Plan& plan);
}  // namespace staged

/// In fp32, token by token (the backward in chunks of 16): every problem; the only one for decode.
namespace recurrent {
extern const registry::ForwardRow kForward;
extern const registry::DecodeRow kDecode;
extern const registry::BackwardRow kBackward;
Status forward(const stage::Forward& args);
Status decode(const stage::Decode& args);
Status segment_scan(const stage::SegmentScan& args);
Status backward(const stage::Backward& args);
}  // namespace recurrent

/// The operations around KDA (src/cuda/layer).
namespace layer {
extern const registry::LayerRow kLayer;
Status short_conv(const ShortConv& call);
Status short_conv_backward(const ShortConv& call, const ShortConvGradients& gradients);
Status gated_rms_norm(const GatedRmsNorm& call);
Status gated_rms_norm_backward(const GatedRmsNorm& call, const GatedRmsNormGradients& gradients);
Status fused_decode(const FusedDecode& call);
}  // namespace layer

/// The merge that staged and recurrent share.
Status segment_merge(const stage::SegmentMerge& args);

/// kda::fold_states() (include/kda/span.hpp), of checked arguments.
Status fold_states(const StateFold& fold);

// -- What backends plan alike

/// Empty if `desc` is aligned to `needed` bytes.
std::string decline_alignment(const char* name, const TensorDesc& desc, int64_t needed);

/// Books the maps of sequences and segments, and the flags of bad metadata.
void book_maps(plan::PlanBuilder& builder);

/// Parts of V: halves go to two SMs while that fills idle ones.
int64_t v_splits(const Plan& plan);

/// Chunks of 64 tokens in the batch: exact with known lengths, else at most.
int64_t most_chunks(const Plan& plan);

/// ForwardRow::place_checkpoints of all rows.
Status place_checkpoints(const stage::Call& call, int32_t* places);

extern const registry::DeviceChecks kDeviceChecks;

/// `function` where this build has CUDA kernels, else null: rows of a build without CUDA are never
/// run, and link to nothing.
template <auto kFunction>
constexpr auto if_built() {
#ifdef KDA_NO_CUDA
  return decltype(kFunction){nullptr};
#else
  return kFunction;
#endif
}

}  // namespace kda::cuda
