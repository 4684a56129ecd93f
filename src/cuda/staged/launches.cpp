// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.staged: chunk_intra for all chunks at once, then chunk_delta_h.
#include "cuda/staged/launches.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/head_bias.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/rows.hpp"
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_delta_h_sm90.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "plan/ledger.hpp"
#include "stage/buffers.hpp"

namespace kda::cuda::staged {
namespace {

/// Factors of run(), in the workspace.
Factors factors_of(const stage::Call& call) {
  const StageSizes sizes = kForward.chunk_stages->sizes(*call.plan);
  stage::ChunkPointers at = {};
  for (std::size_t i = 0; i < at.size(); ++i) {
    const stage::ChunkBuffer& buffer = stage::kChunkBuffers[i];
    const stage::ChunkBuffer* before = i > 0 ? &stage::kChunkBuffers[i - 1] : nullptr;
    if (buffer.block.empty()) continue;
    if (before && before->block == buffer.block)
      at[i] = static_cast<char*>(at[i - 1]) + sizes.*before->bytes;
    else
      at[i] = plan::find_block(*call.plan, call.workspace, buffer.block);
  }
  return factors_at(at);
}

Status make_intra_args(const stage::Call& call, const SequenceMaps& maps, const Factors& factors,
                       HeadGates<ChunkIntraArgs>* args) {
  *args = with_head_gates(call.problem, ChunkIntraArgs());
  set_inputs(call, maps, args);
  args->num_chunks = most_chunks(*call.plan);
  args->factors = factors;
  return expand_bias(call, &args->gate);
}

Status launch_intra(const stage::Call& call, const SequenceMaps& maps,
                    const ForwardKernels& kernels) {
  HeadGates<ChunkIntraArgs> args;
  KDA_RETURN_IF_ERROR(make_intra_args(call, maps, factors_of(call), &args));
  return launch_chunk_intra(args, kernels.fp16, kernels.tokens, {call.stream});
}

ChainArgs delta_args(const stage::Call& call, const SequenceMaps& maps) {
  ChainArgs args;
  args.shape = shape_of(call.problem);
  args.map = maps.map;
  args.factors = factors_of(call);
  set_outputs(call, maps, &args);
  return args;
}

}  // namespace

Status launch_chain(const ChainArgs& args, ChainUse use, const ChainKernel& kernel,
                    const Launch& where) {
  if constexpr (sm90::kBuilt)
    if (kernel.hopper)
      return sm90::launch_chunk_delta_h(args, use, kernel.fp16, kernel.num_sms, where);
  return launch_chunk_delta_h(args, use, kernel.fp16, kernel.narrow, where);
}

Status forward(const stage::Forward& f) {
  const stage::Call& call = f.call;
  const ForwardKernels kernels = kernels_of(*call.plan);
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, f.segments, f.prepared, &maps));
  if (!f.prepared) KDA_RETURN_IF_ERROR(launch_intra(call, maps, kernels));
  ChainArgs args = delta_args(call, maps);
  args.states_in = f.states_in;
  return launch_chain(args, ChainUse::kForward, kernels.chains, {call.stream});
}

Status segment_scan(const stage::SegmentScan& scan) {
  const stage::Call& call = scan.call;
  const ForwardKernels kernels = kernels_of(*call.plan);
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, scan.segments, false, &maps));
  KDA_RETURN_IF_ERROR(launch_intra(call, maps, kernels));
  ChainArgs args = delta_args(call, maps);
  args.M = scan.M;
  args.B = scan.B;
  args.skip_last = scan.skip_last;
  return launch_chain(args, ChainUse::kScan, kernels.scan, {call.stream});
}

// Single stages, on buffers of the caller. Segments of the plan are of no concern here.

namespace {

/// chunk_intra and recompute_w_u: `launch` gets the arguments.
template <class Stage, class LaunchIntra>
Status run_intra(const Stage& stage, LaunchIntra&& launch) {
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(stage.call, {}, false, &maps));
  HeadGates<ChunkIntraArgs> args;
  KDA_RETURN_IF_ERROR(
      make_intra_args(stage.call, maps, factors_at(stage::chunk_pointers(stage.buffers)), &args));
  return launch(args);
}

/// chunk_delta_h and chunk_o: `launch` gets the arguments.
template <class Stage, class LaunchDelta>
Status run_delta(const Stage& stage, LaunchDelta&& launch) {
  const stage::Call& call = stage.call;
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, false, &maps));
  ChainArgs args = delta_args(call, maps);
  args.factors = factors_at(stage::chunk_pointers(stage.buffers));
  args.h = stage.buffers.h;
  args.vn = stage.buffers.vn;
  args.num_chunks = most_chunks(*call.plan);
  return launch(args, kernels_of(*call.plan).fp16);
}

}  // namespace

Status chunk_intra(const stage::ChunkIntra& stage) {
  const stage::Call& call = stage.call;
  const ForwardKernels kernels = kernels_of(*call.plan);
  return run_intra(stage, [&](const HeadGates<ChunkIntraArgs>& args) {
    return launch_chunk_intra(args, kernels.fp16, kernels.tokens, {call.stream});
  });
}

Status recompute_w_u(const stage::RecomputeWU& stage) {
  return run_intra(stage, [&](const HeadGates<ChunkIntraArgs>& args) {
    return launch_recompute_w_u(args, kernels_of(*stage.call.plan).fp16, {stage.call.stream});
  });
}

Status chunk_delta_h(const stage::ChunkDeltaH& stage) {
  return run_delta(stage, [&](const ChainArgs& args, bool fp16) {
    const Problem& p = stage.call.problem;
    const bool narrow = narrow_tiles(stage.call.plan->device.num_sms,
                                     p.num_sequences * p.num_value_heads, p.value_dim);
    return launch_chunk_states(args, fp16, narrow, {stage.call.stream});
  });
}

Status chunk_o(const stage::ChunkO& stage) {
  return run_delta(stage, [&](const ChainArgs& args, bool fp16) {
    return launch_chunk_outputs(args, fp16, {stage.call.stream});
  });
}

}  // namespace kda::cuda::staged
