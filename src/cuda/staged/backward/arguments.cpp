// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/arguments.hpp"

#include "cuda/launch/blocks.hpp"
#include "cuda/staged/backward/cost.hpp"
#include "cuda/staged/backward/heads.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/launches.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::staged {
namespace {

/// `first_value_head`: of the group.
Blocks blocks_of(const stage::Call& call, const BackwardArgs& args, int64_t first_value_head) {
  const auto block = [&](const char* name) {
    return plan::find_block(*call.plan, call.workspace, name);
  };
  const HeadBytes bytes = head_bytes(*call.plan);
  stage::ChunkPointers at = {};
  auto* next = static_cast<char*>(block(block::kFactorsThenRows));
  for (std::size_t i = 0; i < kNumFactors; ++i) {
    at[i] = next;
    next += static_cast<std::size_t>(args.shape.HV) * bytes.buffers.*stage::kChunkBuffers[i].bytes;
  }
  auto* fallback = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(args.rows) +
                                               static_cast<std::size_t>(args.shape.HV) *
                                                   bytes.before_fallback());
  const auto kept_or = [&](const char* saved, const char* made, std::size_t head) -> void* {
    char* kept =
        call.tensors.saved
            ? static_cast<char*>(plan::find_block(call.plan->saved, call.tensors.saved, saved))
            : nullptr;
    return kept ? kept + static_cast<std::size_t>(first_value_head) * head : block(made);
  };
  return {
      factors_at(at),
      kept_or(block::kKeptChunkStates, block::kChunkStates, bytes.buffers.h),
      block(block::kChunkDStates),
      kept_or(block::kKeptErrors, block::kBackwardErrors, bytes.buffers.vn),
      block(block::kBackwardDz),
      call.plan->problem.q.dtype == DType::kFloat16
          ? static_cast<float*>(block(block::kOperandScales))
          : nullptr,
      call.plan->resolved.keep == KeepPolicy::kChunks,
      fallback,
      fallback + static_cast<std::size_t>(args.shape.HV) * bytes.fallback / (2 * sizeof(uint32_t))};
}

StateView segment_states(const Group& group, float* base) {
  const Shape& shape = group.args.shape;
  StateView view;
  view.base = base;
  view.stride_row = shape.V;
  view.stride_head = shape.K * view.stride_row;
  view.stride_slot = shape.HV * view.stride_head;
  view.num_slots = group.segments.count;
  return view;
}

ChainArgs chain_arguments(const Group& group) {
  ChainArgs chain;
  chain.shape = group.args.shape, chain.map = group.args.map;
  chain.num_chunks = most_chunks(group.plan);
  chain.factors = group.blocks.factors;
  return chain;
}

SegmentMergeArgs merge_arguments(const Group& group, const StateView& initial, const float* B,
                                 float* states) {
  SegmentMergeArgs merge;
  merge.shape = group.args.shape, merge.map = group.args.map;
  merge.segment_offsets = group.segments.offsets;
  merge.initial = initial;
  merge.M = group.segments.M, merge.B = B, merge.states_in = states;
  return merge;
}

ReverseArgs reverse_over(const Group& group, const SequenceMap& map) {
  ReverseArgs reverse;
  reverse.shape = group.args.shape, reverse.map = map;
  reverse.factors = group.blocks.factors;
  reverse.d_o = group.args.d_o;
  reverse.dh = group.blocks.dh, reverse.dz = group.blocks.dz;
  return reverse;
}

ReverseArgs d_over(const Group& group, const SequenceMap& map) {
  ReverseArgs reverse = reverse_over(group, map);
  if (group.kernels.on_hopper()) reverse.dh = reverse.dz = nullptr;
  return reverse;
}

}  // namespace

CutMaps cut_maps_of(const stage::Call& call) {
  const Plan& plan = *call.plan;
  if (!plan.device_cut.on) return {};
  const int64_t N = plan.problem.num_sequences;
  return cut_maps(
      static_cast<int64_t*>(plan::find_block(plan, call.workspace, block::kSegmentSequences)), N,
      N + plan.device_cut.most_behind);
}

BackwardCutArgs cut_arguments(const stage::Call& call, const SequenceMap& map,
                              const StateView& initial) {
  const Plan& plan = *call.plan;
  return {map, initial, model_from_bounds(plan, groups_of(plan)), fixed_segments(plan),
          cut_maps_of(call)};
}

SegmentBlocks segments_of(const stage::Call& call, const SequenceMaps& maps) {
  SegmentBlocks segments;
  if (!call.plan->segmented && !call.plan->device_cut.on) return segments;
  const auto block = [&](std::string_view name) {
    return plan::find_block(*call.plan, call.workspace, name);
  };
  segments.sequences = maps.map;
  if (call.plan->device_cut.on) {
    const CutMaps cut = cut_maps_of(call);
    segments.count = cut.units;
    segments.offsets = cut.segment_offsets;
    segments.sequences.cu_seqlens = cut.cu_seqlens;
    segments.sequences.chunk_offsets = cut.chunk_offsets;
    segments.initial_slots = cut.initial_slots;
    segments.sequence_slots = cut.sequence_slots;
    segments.own_slots = cut.own_slots;
  } else {
    segments.count = maps.map.num_segments;
    segments.offsets = maps.segment_offsets;
    auto* words = static_cast<int64_t*>(block(block::kSegmentSequences));
    segments.sequences.cu_seqlens = words;
    segments.sequences.chunk_offsets = words + segments.count + 1;
    segments.initial_slots = reinterpret_cast<int32_t*>(words + 2 * (segments.count + 1));
    segments.sequence_slots = segments.initial_slots + segments.count;
  }
  segments.sequences.num_sequences = segments.count;
  segments.sequences.segments = nullptr;
  segments.M = static_cast<float*>(block(stage::kSegmentM.name));
  segments.B = static_cast<float*>(block(stage::kSegmentB.name));
  segments.states = static_cast<float*>(block(stage::kSegmentStates.name));
  segments.D = static_cast<float*>(block(block::kSegmentD));
  segments.d_states = static_cast<float*>(block(block::kSegmentDStates));
  return segments;
}

Group group_at(const stage::Call& call, const HeadGates<BackwardArgs>& all,
               const BackwardKernels& kernels, const SegmentBlocks& segments, int64_t first,
               int64_t heads) {
  const Heads group = heads_at(all.shape, first, heads);
  const HeadGates<BackwardArgs> args = group.of(all);
  return {*call.plan, kernels, segments, args, blocks_of(call, args, group.first_value_head)};
}

CutFamilies::CutFamilies(const Group& group, const CutMaps& maps)
    : kernels(kernels_of_cut(group.kernels)),
      whole{group.plan, group.kernels, none, group.args, group.blocks},
      cut{group.plan, kernels, group.segments, group.args, group.blocks} {
  whole.args.map.cu_seqlens = maps.whole_cu_seqlens;
  whole.args.map.chunk_offsets = maps.whole_chunk_offsets;
  whole.args.d_initial.indices = maps.whole_slots;
  cut.args.map.chunk_offsets = maps.cut_chunk_offsets;
  cut.args.map.segments = maps.segments;
  cut.args.map.num_segments = maps.units;
}

HeadGates<ChunkIntraArgs> intra_arguments(const Group& group) {
  const HeadGates<BackwardArgs>& args = group.args;
  HeadGates<ChunkIntraArgs> intra;
  intra.shape = args.shape, intra.map = args.map, intra.num_chunks = most_chunks(group.plan);
  intra.q = args.q, intra.k = args.k, intra.v = args.v, intra.g = args.g, intra.beta = args.beta;
  intra.gate = args.gate;
  intra.factors = group.blocks.factors;
  intra.gate_step = args.gate_step, intra.tiled = args.tiled;
  return intra;
}

ChainArgs scan_arguments(const Group& group) {
  ChainArgs chain = chain_arguments(group);
  chain.M = group.segments.M, chain.B = group.segments.B;
  chain.skip_empty = group.segments.own_slots != nullptr;
  return chain;
}

SegmentMergeArgs states_arguments(const Group& group) {
  return merge_arguments(group, group.args.initial, group.segments.B, group.segments.states);
}

SegmentMergeArgs d_states_arguments(const Group& group, const StateView& d_final) {
  return merge_arguments(group, d_final, group.segments.D, group.segments.d_states);
}

SegmentSequencesArgs sequences_arguments(const SequenceMap& map, const StateView& initial,
                                         const SegmentBlocks& segments) {
  SegmentSequencesArgs made;
  made.map = map;
  made.initial = initial;
  made.cu_seqlens = const_cast<int64_t*>(segments.sequences.cu_seqlens);
  made.chunk_offsets = const_cast<int64_t*>(segments.sequences.chunk_offsets);
  made.initial_slots = segments.initial_slots;
  made.sequence_slots = segments.sequence_slots;
  return made;
}

ChainArgs errors_arguments(const Group& group) {
  ChainArgs chain = chain_arguments(group);
  chain.initial = group.args.initial;
  if (group.segments.count > 0) chain.states_in = group.segments.states;
  if (!group.blocks.kept) chain.h = group.blocks.h, chain.vn = group.blocks.errors;
  chain.flags = group.args.flags, chain.accumulate_flags = group.args.accumulate_flags;
  return chain;
}

ReverseArgs reverse_arguments(const Group& group) {
  const HeadGates<BackwardArgs>& args = group.args;
  const SegmentBlocks& segments = group.segments;
  ReverseArgs reverse = reverse_over(group, segments.count > 0 ? segments.sequences : args.map);
  if (!group.kernels.grad_stores_dv) reverse.dv = args.dv;
  reverse.d_final = args.d_final;
  reverse.d_initial = args.d_initial, reverse.initial = args.initial;
  if (segments.count > 0) {
    reverse.d_final = segment_states(group, segments.d_states);
    reverse.d_initial.indices = segments.sequence_slots;
    reverse.initial.indices = segments.initial_slots;
    reverse.initial.mask = nullptr;
  }
  return reverse;
}

ReverseArgs segments_d_arguments(const Group& group) {
  ReverseArgs reverse = d_over(group, group.segments.sequences);
  reverse.d_initial = reverse.initial = segment_states(group, group.segments.D);
  reverse.d_initial.indices = reverse.initial.indices = group.segments.own_slots;
  return reverse;
}

ReverseArgs sequences_d_arguments(const Group& group, const SpanGradients& spans) {
  ReverseArgs reverse = d_over(group, group.args.map);
  if (spans.from_final) reverse.d_final = group.args.d_final;
  StateView D = segment_states(group, spans.D);
  D.num_slots = group.args.map.num_sequences;
  reverse.d_initial = reverse.initial = D;
  return reverse;
}

HeadGates<FinishedGradArgs> grad_arguments(const Group& group) {
  const HeadGates<BackwardArgs>& args = group.args;
  const Blocks& blocks = group.blocks;
  HeadGates<FinishedGradArgs> grad;
  grad.shape = args.shape, grad.map = args.map, grad.num_chunks = most_chunks(group.plan);
  grad.q = args.q, grad.k = args.k, grad.g = args.g, grad.beta = args.beta;
  grad.gate = args.gate;
  grad.d_o = args.d_o;
  grad.h = blocks.h, grad.dh = blocks.dh, grad.errors = blocks.errors, grad.dz = blocks.dz;
  grad.rows = args.rows;
  grad.dq = args.dq, grad.dk = args.dk, grad.dg = args.dg, grad.dbeta = args.dbeta;
  if (group.kernels.grad_stores_dv) grad.dv = args.dv;
  grad.sums = args.sums;
  grad.fallback = blocks.fallback;
  grad.scales = blocks.scales;
  grad.gate_step = args.gate_step, grad.dgate_step = args.dgate_step, grad.tiled = args.tiled;
  return grad;
}

HeadGates<ChunkGradArgs> portable_grad_arguments(const Group& group) {
  HeadGates<ChunkGradArgs> grad{grad_arguments(group)};
  grad.gate_step = group.args.gate_step, grad.tiled = group.args.tiled;
  return grad;
}

BackwardArgs parameter_arguments(const Group& group) {
  BackwardArgs sums = group.args;
  if (group.kernels.grad == BackwardKernels::Grad::kHopper)
    sums.sizes.pieces = most_chunks(group.plan);
  return sums;
}

}  // namespace kda::cuda::staged
