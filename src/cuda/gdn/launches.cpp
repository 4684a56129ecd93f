// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm90.gdn: factors of all chunks, then the chains.
#include "cuda/gdn/launches.hpp"

#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/gdn/chain_sm90.hpp"
#include "cuda/gdn/cost.hpp"
#include "cuda/gdn/intra_sm90.hpp"
#include "cuda/gdn/merge_sm90.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/segments/launches.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::gdn {

Factors factors_of(const stage::Call& call) {
  const auto find = [&](const char* name) {
    return plan::find_block(*call.plan, call.workspace, name);
  };
  return {find(block::kGdnQ), find(block::kGdnK), find(block::kGdnInverse), find(block::kGdnScores),
          static_cast<Numbers*>(static_cast<void*>(find(block::kGdnNumbers)))};
}

HeadGates<IntraArgs> intra_args(const stage::Call& call, const SequenceMaps& maps) {
  IntraArgs args;
  set_inputs(call, maps, &args);
  args.num_chunks = most_chunks(*call.plan);
  args.q_heads = Divisor(call.problem.num_heads);
  args.made = factors_of(call);
  return with_head_gates(call.problem, args);
}

CutMaps cut_maps_of(const stage::Call& call) {
  const Plan& plan = *call.plan;
  if (!plan.device_cut.on) return {};
  auto* words = static_cast<int64_t*>(plan::find_block(plan, call.workspace, block::kDeviceCut));
  const int64_t N = plan.problem.num_sequences;
  return cut_maps(words, N, N + plan.device_cut.most_behind);
}

Status make_maps(const stage::Call& call, std::span<const Segment> segments, bool prepared,
                 SequenceMaps* maps) {
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, segments, prepared, maps));
  const CutMaps made = cut_maps_of(call);
  if (made.places == 0) return {};
  maps->segment_offsets = made.segment_offsets;
  maps->map.segments = made.segments;
  maps->map.num_segments = made.places;
  return {};
}

namespace {

int32_t* forgotten_of(const stage::Call& call) {
  return static_cast<int32_t*>(
      static_cast<void*>(plan::find_block(*call.plan, call.workspace, block::kGdnForgotten)));
}

HeadGates<ChainArgs> chain_args(const stage::Call& call, const SequenceMaps& maps) {
  const Problem& p = call.problem;
  ChainArgs args;
  args.shape = shape_of(p);
  args.map = maps.map;
  args.v = row_view(p.v, call.tensors.v);
  args.made = factors_of(call);
  set_outputs(call, maps, &args);
  args.num_sms = call.plan->device.num_sms;
  if (call.plan->device_cut.on) {
    args.made_segments = maps.segment_offsets + p.num_sequences;
    args.made_followed = cut_maps_of(call).followed;
  }
  return with_head_gates(p, args);
}

}  // namespace

Status forward(const stage::Forward& f) {
  if constexpr (sm90::kBuilt) {
    const stage::Call& call = f.call;
    SequenceMaps maps;
    KDA_RETURN_IF_ERROR(make_maps(call, f.segments, f.prepared, &maps));
    if (!f.prepared)
      KDA_RETURN_IF_ERROR(launch_intra(intra_args(call, maps), launch_after(call, maps)));
    HeadGates<ChainArgs> args = chain_args(call, maps);
    (args.made_segments ? args.made_states_in : args.states_in) = f.states_in;
    return launch_chain(args, {call.stream, true});
  }
  return Status(StatusCode::kUnavailable, kNoSm90a);
}

Status segment_scan(const stage::SegmentScan& scan) {
  if constexpr (sm90::kBuilt) {
    const stage::Call& call = scan.call;
    SequenceMaps maps;
    KDA_RETURN_IF_ERROR(make_maps(call, scan.segments, false, &maps));
    KDA_RETURN_IF_ERROR(launch_factors(call, maps, intra_args(call, maps),
                                       model_from_bounds(call.problem, call.plan->device),
                                       launch_after(call, maps)));
    HeadGates<ChainArgs> args = chain_args(call, maps);
    args.M = scan.M;
    args.B = scan.B;
    args.skip_last = scan.skip_last;
    args.forgotten = forgotten_of(call);
    args.may_forget = args.forgotten != nullptr;
    return launch_scan(args, {call.stream, true});
  }
  return Status(StatusCode::kUnavailable, kNoSm90a);
}

Status segment_merge(const stage::SegmentMerge& merge) {
  const stage::Call& call = merge.call;
  if constexpr (sm90::kBuilt) {
    SequenceMaps maps;
    KDA_RETURN_IF_ERROR(make_maps(call, merge.segments, merge.prepared, &maps));
    MergeArgs args;
    static_cast<SegmentMergeArgs&>(args) = merge_args(merge, maps);
    if (!merges_on_hopper(call.plan->device, call.problem.key_dim))
      return cuda::launch_merge(args, /*hopper=*/false, {call.stream});
    // After segment_scan of the same call the workspace says what is forgotten.
    if (merge.prepared) args.forgotten = forgotten_of(call);
    return launch_merge(args, call.plan->device.num_sms, {call.stream, true});
  }
  return Status(StatusCode::kUnavailable, kNoSm90a);
}

}  // namespace kda::cuda::gdn
