// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm90.gdn: factors of all chunks, both chains, gradients of all chunks, sums
// for parameters. docs/design/gdn_backward.md has the bytes that each launch reads and writes.
// Segments have a scan and a merge between the first two, each of both directions. Groups of heads
// have all launches one after the other, but for the one that cuts.
#include "cuda/gdn/backward/launches.hpp"

#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/gdn/backward/chains_sm90.hpp"
#include "cuda/gdn/backward/cost.hpp"
#include "cuda/gdn/backward/grad_sm90.hpp"
#include "cuda/gdn/backward/sizes.hpp"
#include "cuda/gdn/device_cut_plan.hpp"
#include "cuda/gdn/intra_sm90.hpp"
#include "cuda/gdn/launches.hpp"
#include "cuda/gdn/merge_sm90.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/recurrent/backward/gradients.hpp"
#include "cuda/segments/kernels.hpp"
#include "cuda/segments/launches.hpp"
#include "cuda/staged/backward/heads.hpp"
#include "cuda/staged/backward/reverse_merge.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::gdn {
namespace {

/// The workspace between the launches of a group of heads, and what all of them are given.
struct Parts {
  const stage::Backward& b;
  const SequenceMaps& maps;
  staged::Heads heads;
  BackwardArgs given;  ///< as if the group were all heads
  Factors made;
  BackwardNumbers* numbers = nullptr;
  void *h = nullptr, *errors = nullptr, *dh = nullptr, *dz = nullptr;
  bool tokens = false;  ///< gradients are wanted that tokens have from states

  // Segments have these; null without any.
  float *M = nullptr, *B = nullptr, *states = nullptr;  ///< states before segments
  float *D = nullptr, *d_states = nullptr;              ///< dS behind segments
  int32_t *forgets_before = nullptr, *forgets_behind = nullptr;

  Parts(const stage::Backward& call, const SequenceMaps& made_maps, const BackwardArgs& all,
        const staged::Heads& group)
      : b(call), maps(made_maps), heads(group), given(group.of(all)), made(factors_of(call.call)) {
    numbers = static_cast<BackwardNumbers*>(find(block::kGdnBackwardNumbers));
    h = find(block::kChunkStates), errors = find(block::kBackwardErrors);
    dh = find(block::kChunkDStates), dz = find(block::kBackwardDz);
    tokens = staged::wants_tokens(call.gradients);
    if (!segmented()) return;
    M = floats(stage::kSegmentM.name), B = floats(stage::kSegmentB.name);
    states = floats(stage::kSegmentStates.name);
    D = floats(block::kSegmentD), d_states = floats(block::kSegmentDStates);
    auto* flags = static_cast<int32_t*>(find(block::kGdnForgotten));
    if (!flags) return;
    forgets_before = flags;
    // Where nothing but final states has a gradient, all is left of it.
    if (call.gradients.d_o) forgets_behind = flags + places_of(*b.call.plan) * given.shape.HV;
  }
  bool cut_on_device() const { return b.call.plan->device_cut.on; }
  bool segmented() const { return b.call.plan->segmented || cut_on_device(); }

 private:
  float* floats(std::string_view name) const { return static_cast<float*>(find(name)); }
  void* find(std::string_view name) const {
    return plan::find_block(*b.call.plan, b.call.workspace, name);
  }
};

BackwardIntraArgs backward_intra_args(const Parts& parts) {
  BackwardIntraArgs args;
  static_cast<HeadGates<IntraArgs>&>(args) =
      parts.heads.inputs_of(intra_args(parts.b.call, parts.maps));
  args.q_heads = Divisor(args.shape.H);
  args.numbers = parts.numbers;
  return args;
}

HeadGates<BackwardChainsArgs> chains_args(const Parts& parts) {
  const BackwardArgs& given = parts.given;
  BackwardChainsArgs args;
  args.shape = args.errors.shape = args.reverse.shape = given.shape;
  args.errors.map = args.reverse.map = given.map;
  args.errors.initial = args.reverse.initial = given.initial;
  if (parts.tokens) {
    args.errors.h = parts.h, args.errors.vn = parts.errors;
    args.reverse.dh = parts.dh, args.reverse.dz = parts.dz;
  }
  args.errors.flags = given.flags, args.errors.accumulate_flags = given.accumulate_flags;
  args.reverse.d_o = given.d_o, args.reverse.d_final = given.d_final;
  args.reverse.dv = given.dv, args.reverse.d_initial = given.d_initial;
  args.v = given.v;
  args.made = parts.made;
  if (parts.cut_on_device())
    args.made_segments = parts.maps.segment_offsets + parts.b.call.problem.num_sequences;
  args.errors.M = parts.M, args.errors.B = parts.B;
  args.D = parts.D;
  args.forgets_before = parts.forgets_before, args.forgets_behind = parts.forgets_behind;
  return with_head_gates(parts.b.call.problem, args);
}
/// From states before segments and dS behind them.
HeadGates<BackwardChainsArgs> segment_chains_args(const Parts& parts) {
  HeadGates<BackwardChainsArgs> args = chains_args(parts);
  args.errors.states_in = parts.states;
  args.d_states = parts.d_states;
  return args;
}

MergeArgs merge_args(const Parts& parts, const StateView& initial, const float* B, float* states,
                     const int32_t* forgotten) {
  MergeArgs args;
  args.shape = parts.given.shape, args.map = parts.maps.map;
  args.segment_offsets = parts.maps.segment_offsets;
  args.initial = initial;
  args.M = parts.M, args.B = B, args.states_in = states;
  args.forgotten = forgotten;
  return args;
}

Status merge(const Parts& parts, const Launch& where) {
  const Problem& p = parts.b.call.problem;
  const MergeArgs states =
      merge_args(parts, parts.given.initial, parts.B, parts.states, parts.forgets_before);
  const MergeArgs gradients =
      merge_args(parts, parts.given.d_final, parts.D, parts.d_states, parts.forgets_behind);
  const DeviceFacts& device = parts.b.call.plan->device;
  if (merges_on_hopper(device, p.key_dim))
    return launch_both_merges(parts.tokens ? &states : nullptr, gradients, device.num_sms, where);
  if (parts.tokens)
    KDA_RETURN_IF_ERROR(cuda::launch_merge(states, /*hopper=*/false, {where.stream}));
  return launch_reverse_merge(gradients, {where.stream});
}

/// Where a kernel may have cut nothing: whole sequences.
HeadGates<BackwardChainsArgs> whole_chains_args(const Parts& parts) {
  HeadGates<BackwardChainsArgs> args = chains_args(parts);
  for (SequenceMap* map : {&args.errors.map, &args.reverse.map})
    map->segments = nullptr, map->num_segments = 0;
  return args;
}

Status run_chains(const Parts& parts, const Launch& early) {
  if (!parts.segmented()) return launch_backward_chains(chains_args(parts), early);
  if (parts.cut_on_device())
    KDA_RETURN_IF_ERROR(launch_backward_chains(whole_chains_args(parts), early));
  KDA_RETURN_IF_ERROR(launch_backward_scan(chains_args(parts), early));
  KDA_RETURN_IF_ERROR(merge(parts, early));
  return launch_backward_chains(segment_chains_args(parts), early);
}

HeadGates<GradArgs> grad_args(const Parts& parts) {
  const BackwardArgs& given = parts.given;
  GradArgs args;
  args.shape = given.shape, args.map = given.map;
  args.num_chunks = most_chunks(*parts.b.call.plan);
  args.q_heads = Divisor(given.shape.H);
  args.gate = given.gate;
  args.d_o = given.d_o;
  args.dq = given.dq, args.dk = given.dk, args.dg = given.dg, args.dbeta = given.dbeta;
  args.made = parts.made, args.numbers = parts.numbers;
  args.h = parts.h, args.errors = parts.errors, args.dh = parts.dh, args.dz = parts.dz;
  args.sums = given.sums;
  return with_head_gates(parts.b.call.problem, args);
}

/// A chunk has two sums: of its one bias, and of A_log.
BackwardArgs parameter_args(const Parts& parts) {
  BackwardArgs args = parts.given;
  args.shape.K = 1;
  args.sizes.pieces = most_chunks(*parts.b.call.plan);
  return args;
}

/// Behind the factors of the first group the cut is made, for all of them.
Status run_factors(const Parts& parts, const Launch& first) {
  const stage::Call& call = parts.b.call;
  const BackwardIntraArgs args = backward_intra_args(parts);
  if (parts.heads.first_head > 0) return launch_intra(args, first);
  const Plan& plan = *call.plan;
  return launch_factors(call, parts.maps, args,
                        backward_model_from_bounds(plan.problem, plan.device, booked_groups(plan)),
                        first);
}

/// The launches of a group, in order.
Status run_group(const Parts& parts, const Launch& first) {
  const Launch early{first.stream, true};
  KDA_RETURN_IF_ERROR(run_factors(parts, first));
  KDA_RETURN_IF_ERROR(run_chains(parts, early));
  if (!parts.tokens) return {};
  KDA_RETURN_IF_ERROR(
      launch_chunk_grad(grad_args(parts), parts.b.call.plan->device.num_sms, early));
  return parts.given.sums ? launch_parameters(parameter_args(parts), early) : Status{};
}

}  // namespace

Status backward(const stage::Backward& b) {
  if constexpr (sm90::kBuilt) {
    const stage::Call& call = b.call;
    const HeadGroups groups = booked_groups(*call.plan);
    SequenceMaps maps;
    KDA_RETURN_IF_ERROR(make_maps(call, call.plan->segments, false, &maps));
    BackwardArgs all;
    set_gradient_views(b, maps, &all);
    Launch first = launch_after(call, maps);
    for (int64_t head = 0; head < all.shape.H; head += groups.heads) {
      const staged::Heads heads = staged::heads_at(all.shape, head, groups.heads);
      KDA_RETURN_IF_ERROR(run_group(Parts(b, maps, all, heads), first));
      all.flags = nullptr;  // the first group has set them
      first = {call.stream, true};
    }
    return {};
  }
  return Status(StatusCode::kUnavailable, kNoSm90a);
}

}  // namespace kda::cuda::gdn
