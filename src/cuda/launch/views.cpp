// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/views.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/sequence_map.hpp"
#include "cuda/tile/chunk.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda {
namespace {

Element element_of(DType dtype) { return static_cast<Element>(static_cast<int32_t>(dtype)); }
static_assert(static_cast<int>(Element::kBFloat16) == static_cast<int>(DType::kBFloat16));
static_assert(static_cast<int>(Element::kFloat16) == static_cast<int>(DType::kFloat16));
static_assert(sizeof(TokenRange) == sizeof(Segment) && sizeof(TokenRange) == 3 * sizeof(int64_t));

}  // namespace

RowView row_view(const TensorDesc& desc, const void* base) {
  return {const_cast<void*>(base), desc.strides[0],        desc.strides[1],
          desc.strides[2],         element_of(desc.dtype), desc.alignment >= 4};
}

StateView state_view(const Problem& p, const std::optional<StateDesc>& desc, void* base,
                     const int32_t* indices, const uint8_t* mask) {
  StateView view;
  if (!desc) return view;
  const auto& strides = desc->tensor.strides;
  view.base = base;
  view.stride_slot = strides[0];
  view.stride_head = strides[1];
  view.stride_row = strides[2];
  view.num_slots = desc->num_slots;
  view.indices = desc->indexed ? indices : nullptr;
  view.first_slot = desc->indexed ? static_cast<int32_t>(p.first_slot) : 0;
  view.mask = mask;
  view.bf16 = desc->tensor.dtype == DType::kBFloat16;
  view.vk = p.state_layout == StateLayout::kVK;
  const int64_t bytes = 4 * dtype_size(desc->tensor.dtype);
  view.vectors = p.key_dim % 4 == 0 && p.value_dim % 4 == 0 && strides[0] % 4 == 0 &&
                 strides[1] % 4 == 0 && strides[2] % 4 == 0 && desc->tensor.alignment >= bytes;
  return view;
}

StateView span_states(const Problem& p, const float* base, int64_t columns) {
  StateView view;
  view.base = const_cast<float*>(base);
  view.stride_row = columns;
  view.stride_head = p.key_dim * columns;
  view.stride_slot = p.num_value_heads * view.stride_head;
  view.num_slots = INT64_MAX;
  view.vectors = columns % 4 == 0;
  return view;
}

GateView gate_view(const Problem& p, const Tensors& t) {
  GateView gate;
  gate.gate_mode = p.gate_mode;
  gate.beta_mode = p.beta_mode;
  gate.l2norm = p.qk_l2norm;
  gate.lower_bound = static_cast<float>(p.lower_bound);
  gate.scale = static_cast<float>(effective_scale(p));
  if (p.A_log) gate.A_log = static_cast<const float*>(t.A_log), gate.stride_A = p.A_log->strides[0];
  if (p.dt_bias)
    gate.dt_bias = static_cast<const float*>(t.dt_bias), gate.stride_dt = p.dt_bias->strides[0];
  return gate;
}

Shape shape_of(const Problem& p) {
  return {p.num_heads,
          p.num_value_heads,
          static_cast<int32_t>(p.key_dim),
          static_cast<int32_t>(p.value_dim),
          Divisor(p.num_value_heads),
          Divisor(p.num_value_heads / p.num_heads)};
}

StateView initial_view(const Problem& p, const Tensors& t) {
  return state_view(p, p.initial_state, t.initial_state, t.initial_state_indices,
                    p.initial_state_mask ? t.initial_state_mask : nullptr);
}

namespace {

/// Blocks that zero rows of no sequence. Each reads the whole table: of a long one fewer do.
int32_t blocks_of_rest(const stage::Call& call) {
  constexpr int64_t kEntries = 4096;
  const int64_t sms = call.plan->device.num_sms;
  const int64_t blocks = sms * kEntries / (call.problem.num_sequences + 1);
  return static_cast<int32_t>(std::clamp<int64_t>(blocks, 1, sms));
}

}  // namespace

SequenceMapArgs sequence_map_args(const stage::Call& call, const SequenceMaps& maps,
                                  const WrittenTensor& rest) {
  return {call.tensors.cu_seqlens,
          call.problem.cu_seqlens == DType::kInt64,
          call.problem.num_sequences,
          call.problem.num_tokens,
          const_cast<int64_t*>(maps.map.cu_seqlens),
          const_cast<int64_t*>(maps.map.chunk_offsets),
          maps.flags,
          rest,
          rest.base ? blocks_of_rest(call) : 0};
}

Status make_sequence_maps(const stage::Call& call, std::span<const Segment> segments, bool prepared,
                          SequenceMaps* maps, const WrittenTensor& rest) {
  const Plan& plan = *call.plan;
  const Problem& p = call.problem;
  const Launch launch{call.stream};
  const int64_t N = p.num_sequences;
  maps->map.num_sequences = N;
  maps->map.num_tokens = p.num_tokens;
  maps->map.chunks = Divisor((p.num_tokens + kChunk - 1) / kChunk);
  maps->flags = static_cast<int32_t*>(plan::find_block(plan, call.workspace, block::kDeviceFlags));
  auto* words = static_cast<int64_t*>(plan::find_block(plan, call.workspace, block::kSequenceMap));
  if (p.cu_seqlens && !plan.lengths_known) {
    maps->map.cu_seqlens = words;
    maps->map.chunk_offsets = words + N + 1;
    maps->accumulate_flags = true;
    if (prepared) return {};
    maps->launched = true;
    return launch_sequence_map(sequence_map_args(call, *maps, rest), launch);
  }
  WordPieces pieces;
  int64_t at = 0;
  const auto piece = [&](const void* source, int64_t count) {
    pieces.add(static_cast<const int64_t*>(source), count);
    const int64_t* target = words + at;
    at += count;
    return target;
  };
  if (p.cu_seqlens) {
    maps->map.cu_seqlens = piece(plan.cu_seqlens.data(), N + 1);
    maps->map.chunk_offsets = piece(plan.chunk_offsets.data(), N + 1);
  }
  if (!segments.empty()) {
    maps->segment_offsets = piece(plan.segment_offsets.data(), N + 1);
    maps->map.num_segments = static_cast<int64_t>(segments.size());
    maps->map.segments =
        reinterpret_cast<const TokenRange*>(piece(segments.data(), 3 * maps->map.num_segments));
  }
  maps->launched = !prepared && pieces.pieces > 0;
  return prepared ? Status{} : launch_upload(words, pieces, launch);
}

Launch launch_after(const stage::Call& call, const SequenceMaps& maps) {
  return {call.stream, maps.launched && call.plan->device.compute_capability >= 90};
}

}  // namespace kda::cuda
