// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.staged: chunk_intra for all chunks at once, then chunk_delta_h.
#include "cuda/staged/launches.hpp"
#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/rows.hpp"
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_delta_h_sm90.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "plan/ledger.hpp"
#include "stage/buffers.hpp"

namespace kda::cuda::staged {
namespace {

/// Those of run(), in the workspace.
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

bool by_tokens(const stage::Call& call) {
  return call.plan->resolved.intra_form == IntraForm::kToken;
}

bool is_half(const Problem& p) { return p.q.dtype == DType::kFloat16; }

HeadGates<ChunkIntraArgs> intra_args(const stage::Call& call, const Maps& maps,
                                     const Factors& factors) {
  ChunkIntraArgs args;
  set_inputs(call, maps, &args);
  args.num_chunks = most_chunks(*call.plan);
  args.factors = factors;
  return with_head_gates(call.problem, args);
}

Status launch_intra(const stage::Call& call, const Maps& maps) {
  return launch_chunk_intra(intra_args(call, maps, factors_of(call)), is_half(call.problem),
                            by_tokens(call), {call.stream});
}

ChainArgs delta_args(const stage::Call& call, const Maps& maps) {
  ChainArgs args;
  args.shape = shape_of(call.problem);
  args.map = maps.map;
  args.factors = factors_of(call);
  set_outputs(call, maps, &args);
  return args;
}

}  // namespace

Status launch_chain(const ChainArgs& args, ChainUse use, bool fp16, const DeviceFacts& device,
                    int64_t spans, int64_t columns, const Launch& where) {
  if (sm90::kBuilt && device.compute_capability == 90)
    return sm90::launch_chunk_delta_h(args, use, fp16, device.num_sms, where);
  const bool narrow = narrow_tiles(device.num_sms, spans * args.shape.HV, columns);
  return launch_chunk_delta_h(args, use, fp16, narrow, where);
}

Status forward(const stage::Forward& f) {
  const stage::Call& call = f.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, f.segments, f.prepared, &maps));
  if (!f.prepared) KDA_RETURN_IF_ERROR(launch_intra(call, maps));
  ChainArgs args = delta_args(call, maps);
  args.states_in = f.states_in;
  const int64_t spans = f.segments.empty() ? call.problem.num_sequences : maps.map.num_spans;
  return launch_chain(args, ChainUse::kForward, is_half(call.problem), call.plan->device, spans,
                      call.problem.value_dim, {call.stream});
}

Status segment_scan(const stage::SegmentScan& scan) {
  const stage::Call& call = scan.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, scan.segments, false, &maps));
  KDA_RETURN_IF_ERROR(launch_intra(call, maps));
  ChainArgs args = delta_args(call, maps);
  args.M = scan.M;
  args.B = scan.B;
  args.skip_last = scan.skip_last;
  const Problem& p = call.problem;
  return launch_chain(args, ChainUse::kScan, is_half(p), call.plan->device, maps.map.num_spans,
                      p.value_dim + p.key_dim, {call.stream});
}

// Single stages, on buffers of the caller. Segments of the plan are of no concern here.

namespace {

/// chunk_intra and recompute_w_u: `launch` gets the arguments.
template <class Stage, class LaunchIntra>
Status run_intra(const Stage& stage, LaunchIntra&& launch) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(stage.call, {}, false, &maps));
  return launch(intra_args(stage.call, maps, factors_at(stage::chunk_pointers(stage.buffers))));
}

/// chunk_delta_h and chunk_o.
template <class Stage>
Status run_delta(const Stage& stage, ChainUse use) {
  const stage::Call& call = stage.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, {}, false, &maps));
  ChainArgs args = delta_args(call, maps);
  args.factors = factors_at(stage::chunk_pointers(stage.buffers));
  args.h = stage.buffers.h;
  args.vn = stage.buffers.vn;
  args.num_chunks = most_chunks(*call.plan);
  const Problem& p = call.problem;
  const bool narrow =
      narrow_tiles(call.plan->device.num_sms, p.num_sequences * p.num_value_heads, p.value_dim);
  return launch_chunk_delta_h(args, use, is_half(p), narrow, {call.stream});
}

}  // namespace

Status chunk_intra(const stage::ChunkIntra& stage) {
  const stage::Call& call = stage.call;
  return run_intra(stage, [&](const HeadGates<ChunkIntraArgs>& args) {
    return launch_chunk_intra(args, is_half(call.problem), by_tokens(call), {call.stream});
  });
}

Status recompute_w_u(const stage::RecomputeWU& stage) {
  return run_intra(stage, [&](const HeadGates<ChunkIntraArgs>& args) {
    return launch_recompute_w_u(args, is_half(stage.call.problem), {stage.call.stream});
  });
}

Status chunk_delta_h(const stage::ChunkDeltaH& stage) {
  return run_delta(stage, ChainUse::kStates);
}

Status chunk_o(const stage::ChunkO& stage) { return run_delta(stage, ChainUse::kOutputs); }

}  // namespace kda::cuda::staged
