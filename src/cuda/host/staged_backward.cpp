// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm80.staged: all launches of a group of heads, then those of the next one.
#include "core/text.hpp"
#include "cuda/backward/backward.hpp"
#include "cuda/host/backends.hpp"
#include "cuda/host/blocks.hpp"
#include "cuda/host/gradients.hpp"
#include "cuda/host/segments.hpp"
#include "cuda/host/staged.hpp"
#include "cuda/host/views.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/staged/backward/chains_sm90.hpp"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/finish.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/staged/backward/reverse_merge.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::staged {
namespace {

/// Some q/k heads with their value heads. They are a problem of their own, whose tensors begin
/// further on.
struct Group {
  int64_t first_head, first_value_head;
  Shape shape;

  static RowView rows(RowView view, int64_t head) {
    if (view.base)
      view.base = static_cast<char*>(view.base) +
                  head * view.stride_h * (view.type == Element::kFloat32 ? 4 : 2);
    return view;
  }
  RowView qk(const RowView& view) const { return rows(view, first_head); }
  RowView values(const RowView& view) const { return rows(view, first_value_head); }
  StateView states(StateView view) const {
    if (view.base)
      view.base =
          static_cast<char*>(view.base) + first_value_head * view.stride_head * (view.bf16 ? 2 : 4);
    return view;
  }
  /// A tensor with one number or row a value head.
  template <class T>
  T* parameter(T* base, int64_t stride) const {
    return base ? base + first_value_head * stride : nullptr;
  }
  GateView gate(GateView view) const {
    view.A_log = parameter(view.A_log, view.stride_A);
    view.dt_bias = parameter(view.dt_bias, view.stride_dt);
    return view;
  }

  BackwardArgs of(BackwardArgs args) const {
    args.shape = shape;
    for (RowView* view : {&args.q, &args.k, &args.dq, &args.dk}) *view = qk(*view);
    for (RowView* view : {&args.v, &args.g, &args.beta, &args.d_o, &args.dv, &args.dg, &args.dbeta})
      *view = values(*view);
    for (StateView* view : {&args.initial, &args.d_final, &args.d_initial}) *view = states(*view);
    args.gate = gate(args.gate);
    args.dA_log = parameter(args.dA_log, args.stride_dA);
    args.ddt_bias = parameter(args.ddt_bias, args.stride_ddt);
    return args;
  }
};

Group group_at(const Shape& all, int64_t first, int64_t heads) {
  const int64_t of_each = all.HV / all.H;
  Group group{first, first * of_each, all};
  group.shape.H = std::min(heads, all.H - first);
  group.shape.HV = group.shape.H * of_each;
  group.shape.heads = Divisor(group.shape.HV);
  return group;
}

/// The workspace of a group.
struct Blocks {
  Factors factors;
  void *h, *dh, *errors, *dz;
};

Blocks blocks_of(const stage::Call& call, const BackwardArgs& args) {
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
  return {factors_at(at), block(block::kChunkStates), block(block::kChunkDStates),
          block(block::kBackwardErrors), block(block::kBackwardDz)};
}

/// Where Hopper's chunk_grad has the rows of the group: behind what says which chunks are left to
/// them.
float* rows_behind_left(const Plan& plan, const BackwardArgs& args) {
  const auto heads = static_cast<std::size_t>(args.shape.HV);
  return args.rows + heads * head_bytes(plan).left / sizeof(float);
}

/// What segments add; without any `spans` is 0.
struct Segments {
  int64_t spans = 0;
  const int64_t* offsets = nullptr;  ///< [N + 1] segments before each sequence
  SequenceMap sequences;             ///< each segment a sequence
  int32_t *initial_slots = nullptr, *sequence_slots = nullptr;  ///< [spans]
  /// These are a group's. D lies over B, and dS behind segments over the states before them.
  float *M = nullptr, *B = nullptr, *states = nullptr;
};

Segments segments_of(const stage::Call& call, const Maps& maps) {
  Segments segments;
  if (!call.plan->segmented) return segments;
  const auto block = [&](std::string_view name) {
    return plan::find_block(*call.plan, call.workspace, name);
  };
  segments.spans = maps.map.num_spans;
  segments.offsets = maps.segment_offsets;
  auto* words = static_cast<int64_t*>(block(block::kSegmentSequences));
  segments.sequences = maps.map;
  segments.sequences.num_sequences = segments.spans;
  segments.sequences.cu_seqlens = words;
  segments.sequences.chunk_offsets = words + segments.spans + 1;
  segments.sequences.segments = nullptr;
  segments.initial_slots = reinterpret_cast<int32_t*>(words + 2 * (segments.spans + 1));
  segments.sequence_slots = segments.initial_slots + segments.spans;
  segments.M = static_cast<float*>(block(stage::kSegmentM.name));
  segments.B = static_cast<float*>(block(stage::kSegmentB.name));
  segments.states = static_cast<float*>(block(stage::kSegmentStates.name));
  return segments;
}

/// The launches of a group, whose arguments `args` are.
struct GroupLaunches {
  const Plan& plan;
  const BackwardArgs& args;
  const Blocks& blocks;
  const Segments& segments;
  const Launch where;

  /// What chains run over: sequences or segments.
  int64_t spans() const { return segments.spans > 0 ? segments.spans : args.map.num_sequences; }
  bool narrow() const {
    return narrow_tiles(plan.device.num_sms, spans() * args.shape.HV, args.shape.V);
  }
  StateView span_states(float* base) const {
    StateView view;
    view.base = base;
    view.stride_row = args.shape.V;
    view.stride_head = args.shape.K * view.stride_row;
    view.stride_slot = args.shape.HV * view.stride_head;
    view.num_slots = segments.spans;
    return view;
  }

  Status intra() const {
    ChunkIntraArgs intra;
    intra.shape = args.shape, intra.map = args.map, intra.num_chunks = most_chunks(plan);
    intra.q = args.q, intra.k = args.k, intra.v = args.v, intra.g = args.g, intra.beta = args.beta;
    intra.gate = args.gate;
    intra.factors = blocks.factors;
    return launch_chunk_intra(intra, /*half=*/false, /*tokens=*/false, where);
  }

  ChainArgs chain_args() const {
    ChainArgs chain;
    chain.shape = args.shape, chain.map = args.map, chain.num_chunks = most_chunks(plan);
    chain.factors = blocks.factors;
    return chain;
  }

  SegmentMergeArgs merge_args(const StateView& initial) const {
    SegmentMergeArgs merge;
    merge.shape = args.shape, merge.map = args.map;
    merge.segment_offsets = segments.offsets;
    merge.initial = initial;
    merge.M = segments.M, merge.B = segments.B, merge.states_in = segments.states;
    return merge;
  }

  /// States before segments.
  Status scan_and_merge() const {
    ChainArgs chain = chain_args();
    chain.M = segments.M, chain.B = segments.B;
    KDA_RETURN_IF_ERROR(launch_chain(chain, ChainUse::kScan, /*fp16=*/false, plan.device, spans(),
                                     args.shape.V + args.shape.K, where));
    return launch_merge(merge_args(args.initial), plan.device, where);
  }

  ChainArgs errors_args() const {
    ChainArgs chain = chain_args();
    chain.initial = args.initial;
    if (segments.spans > 0) chain.states_in = segments.states;
    chain.h = blocks.h, chain.vn = blocks.errors;
    chain.flags = args.flags, chain.accumulate_flags = args.accumulate_flags;
    return chain;
  }

  ReverseArgs reverse_args(const SequenceMap& map) const {
    ReverseArgs reverse;
    reverse.shape = args.shape, reverse.map = map;
    reverse.factors = blocks.factors;
    reverse.d_o = args.d_o;
    reverse.dh = blocks.dh, reverse.dz = blocks.dz;
    return reverse;
  }

  /// Chains of segments from zero, for dS behind them. What they leave in dh and dz is written
  /// again.
  ReverseArgs scan_args() const {
    ReverseArgs reverse = reverse_args(segments.sequences);
    reverse.d_initial = reverse.initial = span_states(segments.B);
    return reverse;
  }

  ReverseArgs last_args() const {
    ReverseArgs reverse = reverse_args(segments.spans > 0 ? segments.sequences : args.map);
    reverse.dv = args.dv;
    reverse.d_final = args.d_final;
    reverse.d_initial = args.d_initial, reverse.initial = args.initial;
    if (segments.spans > 0) {
      reverse.d_final = span_states(segments.states);
      reverse.d_initial.indices = segments.sequence_slots;
      reverse.initial.indices = segments.initial_slots;
      reverse.initial.mask = nullptr;
    }
    return reverse;
  }

  /// Two chains that need nothing of each other; null: not wanted.
  Status chains(const ChainArgs* errors, const ReverseArgs& reverse) const {
    if (sm90::kBuilt && plan.device.compute_capability == 90)
      return sm90::launch_chains(errors, &reverse, where);
    if (errors)
      KDA_RETURN_IF_ERROR(
          launch_chunk_delta_h(*errors, ChainUse::kErrors, /*fp16=*/false, narrow(), where));
    return launch_chunk_reverse(reverse, narrow(), where);
  }

  bool by_hopper(const FinishedGradArgs& grad) const {
    const Problem& p = plan.problem;  // not the group's: no value depends on that
    return sm90::kBuilt && plan.device.compute_capability == 90 && sm90::serves_chunk_grad(grad) &&
           sm90::has_units_enough(grad.num_chunks * p.num_heads, p.num_value_heads / p.num_heads,
                                  plan.device.num_sms);
  }

  Status gradients() const {
    FinishedGradArgs grad;
    grad.shape = args.shape, grad.map = args.map, grad.num_chunks = most_chunks(plan);
    grad.q = args.q, grad.k = args.k, grad.g = args.g, grad.beta = args.beta;
    grad.gate = args.gate;
    grad.d_o = args.d_o;
    grad.h = blocks.h, grad.dh = blocks.dh, grad.errors = blocks.errors, grad.dz = blocks.dz;
    grad.rows = args.rows;
    grad.dq = args.dq, grad.dk = args.dk, grad.dg = args.dg, grad.dbeta = args.dbeta;
    grad.sums = args.sums;
    if (by_hopper(grad)) {
      grad.left = reinterpret_cast<uint32_t*>(args.rows);
      grad.rows = rows_behind_left(plan, args);
      KDA_RETURN_IF_ERROR(sm90::launch_chunk_grad(grad, plan.device.num_sms, where));
      BackwardArgs by_chunks = args;
      by_chunks.sizes.pieces = grad.num_chunks;
      return args.sums ? launch_parameters(by_chunks, where) : Status{};
    }
    KDA_RETURN_IF_ERROR(launch_chunk_grad(grad, where));
    KDA_RETURN_IF_ERROR(launch_finish_gradients(args, where));
    return args.sums ? launch_parameters(args, where) : Status{};
  }

  /// `tokens`: wants_tokens(). States and errors also say what is wrong with the sequences.
  Status all(bool tokens) const {
    KDA_RETURN_IF_ERROR(intra());
    if (segments.spans > 0) KDA_RETURN_IF_ERROR(scan_and_merge());
    const ChainArgs errors = errors_args();
    const ChainArgs* wanted = tokens || args.flags ? &errors : nullptr;
    if (segments.spans > 0) {
      KDA_RETURN_IF_ERROR(chains(wanted, scan_args()));
      KDA_RETURN_IF_ERROR(launch_reverse_merge(merge_args(args.d_final), where));
      wanted = nullptr;
    }
    KDA_RETURN_IF_ERROR(chains(wanted, last_args()));
    return tokens ? gradients() : Status{};
  }
};

Status launch_group(const stage::Backward& b, const BackwardArgs& args, const Segments& segments) {
  const Blocks blocks = blocks_of(b.call, args);
  return GroupLaunches{*b.call.plan, args, blocks, segments, {b.call.stream}}.all(
      wants_tokens(b.gradients));
}

}  // namespace

Status backward(const stage::Backward& b) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(b.call, b.call.plan->segments, false, &maps));
  BackwardArgs all;
  set_gradients(b, maps, &all);
  const Segments segments = segments_of(b.call, maps);
  if (segments.spans > 0) {
    SegmentSequencesArgs made;
    made.map = maps.map;
    made.initial = all.initial;
    made.cu_seqlens = const_cast<int64_t*>(segments.sequences.cu_seqlens);
    made.chunk_offsets = const_cast<int64_t*>(segments.sequences.chunk_offsets);
    made.initial_slots = segments.initial_slots;
    made.sequence_slots = segments.sequence_slots;
    KDA_RETURN_IF_ERROR(launch_segment_sequences(made, {b.call.stream}));
  }
  all.sizes.pieces = pieces_of(b.call.problem);
  all.rows = static_cast<float*>(
      plan::find_block(*b.call.plan, b.call.workspace, block::kFactorsThenRows));
  const HeadGroups groups = groups_of(*b.call.plan);
  for (int64_t first = 0; first < all.shape.H; first += groups.heads) {
    KDA_RETURN_IF_ERROR(
        launch_group(b, group_at(all.shape, first, groups.heads).of(all), segments));
    all.flags = nullptr;  // the first group has set them
  }
  return {};
}

}  // namespace kda::cuda::staged
