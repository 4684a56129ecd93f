// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm80.staged: all launches of a group of heads, then those of the next one.
#include "cuda/staged/backward/launches.hpp"

#include <cuda_runtime_api.h>

#include <cmath>

#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/recurrent/backward/gradients.hpp"
#include "cuda/segments/launches.hpp"
#include "cuda/staged/backward/both_merges_sm90.hpp"
#include "cuda/staged/backward/chains_sm90.hpp"
#include "cuda/staged/backward/chunk_delta_h_errors.hpp"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/chunk_intra_half_sm90.hpp"
#include "cuda/staged/backward/finish.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/staged/backward/reverse_merge.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "cuda/staged/launches.hpp"
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

  HeadGates<BackwardArgs> of(HeadGates<BackwardArgs> args) const {
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
  bool kept;  ///< h and errors are the forward's, in `saved`
};

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
  const auto kept_or = [&](const char* saved, const char* made, std::size_t head) -> void* {
    char* kept =
        call.tensors.saved
            ? static_cast<char*>(plan::find_block(call.plan->saved, call.tensors.saved, saved))
            : nullptr;
    return kept ? kept + static_cast<std::size_t>(first_value_head) * head : block(made);
  };
  return {factors_at(at),
          kept_or(block::kKeptChunkStates, block::kChunkStates, bytes.buffers.h),
          block(block::kChunkDStates),
          kept_or(block::kKeptErrors, block::kBackwardErrors, bytes.buffers.vn),
          block(block::kBackwardDz),
          call.plan->resolved.keep == KeepPolicy::kKeep};
}

/// Behind the factors and the rows of the group.
uint32_t* left_words(const Plan& plan, const BackwardArgs& args) {
  const auto heads = static_cast<std::size_t>(args.shape.HV);
  return reinterpret_cast<uint32_t*>(args.rows) +
         heads * head_bytes(plan).before_left() / sizeof(float);
}

/// What segments add; without any `spans` is 0.
struct Segments {
  int64_t spans = 0;
  const int64_t* offsets = nullptr;  ///< [N + 1] segments before each sequence
  SequenceMap sequences;             ///< each segment a sequence
  int32_t *initial_slots = nullptr, *sequence_slots = nullptr;  ///< [spans]
  /// These are a group's.
  float *M = nullptr, *B = nullptr, *states = nullptr;  ///< states before segments
  float *D = nullptr, *d_states = nullptr;              ///< dS behind segments
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
  segments.D = static_cast<float*>(block(block::kSegmentD));
  segments.d_states = static_cast<float*>(block(block::kSegmentDStates));
  return segments;
}

/// Whether the chains of this backward have operands in fp16: on Hopper, at K = V = 128, where
/// norms and sigmoids bound the factors. (A log gate may be positive: such chains are left.) Scores
/// of a small scale would lose bits, and X of a large one might not fit. Segments begin from the
/// states of a scan, whose factors are in bf16.
bool has_half_chains(const Plan& plan, const BackwardArgs& args) {
  const float scale = std::abs(args.gate.scale);
  return sm90::kBuilt && plan.device.compute_capability == 90 && !plan.segmented &&
         args.shape.K == 128 && args.shape.V == 128 && args.gate.l2norm &&
         args.gate.beta_mode != BetaMode::kPlain && scale >= 0x1p-8f && scale <= 0x1p4f;
}

/// The launches of a group, whose arguments `args` are.
struct GroupLaunches {
  const Plan& plan;
  const HeadGates<BackwardArgs>& args;
  const Blocks& blocks;
  const Segments& segments;
  const Launch where;
  const bool half = has_half_chains(plan, args);

  /// For kernels that wait for those before them (ptx/pdl.cuh).
  Launch early() const { return {where.stream, on_hopper()}; }
  bool on_hopper() const { return sm90::kBuilt && plan.device.compute_capability == 90; }
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

  HeadGates<ChunkIntraArgs> intra_args() const {
    HeadGates<ChunkIntraArgs> intra;
    intra.shape = args.shape, intra.map = args.map, intra.num_chunks = most_chunks(plan);
    intra.q = args.q, intra.k = args.k, intra.v = args.v, intra.g = args.g, intra.beta = args.beta;
    intra.gate = args.gate;
    intra.factors = blocks.factors;
    intra.gate_step = args.gate_step, intra.tiled = args.tiled;
    return intra;
  }

  Status intra() const {
    if (half) return sm90::launch_chunk_intra_half(intra_args(), where);
    return launch_chunk_intra(intra_args(), /*half=*/false, /*tokens=*/false, where);
  }

  ChainArgs chain_args() const {
    ChainArgs chain;
    chain.shape = args.shape, chain.map = args.map, chain.num_chunks = most_chunks(plan);
    chain.factors = blocks.factors;
    return chain;
  }

  SegmentMergeArgs merge_args(const StateView& initial, const float* B, float* states) const {
    SegmentMergeArgs merge;
    merge.shape = args.shape, merge.map = args.map;
    merge.segment_offsets = segments.offsets;
    merge.initial = initial;
    merge.M = segments.M, merge.B = B, merge.states_in = states;
    return merge;
  }
  /// For states before segments.
  SegmentMergeArgs states_args() const {
    return merge_args(args.initial, segments.B, segments.states);
  }
  /// For dS behind segments; behind an empty first one it is the gradient before the sequence.
  SegmentMergeArgs d_states_args(const StateView& d_final) const {
    return merge_args(d_final, segments.D, segments.d_states);
  }

  /// M and B of segments.
  Status scan() const {
    ChainArgs chain = chain_args();
    chain.M = segments.M, chain.B = segments.B;
    return launch_chain(chain, ChainUse::kScan, /*fp16=*/false, plan.device, spans(),
                        args.shape.V + args.shape.K, where);
  }

  Status both_merges() const {
    const int64_t K = args.shape.K;
    if (on_hopper() && (K == 64 || K == 128))
      return sm90::launch_both_merges(states_args(), d_states_args(args.d_final), early());
    KDA_RETURN_IF_ERROR(launch_merge(states_args(), plan.device, where));
    return launch_reverse_merge(d_states_args(args.d_final), where);
  }

  /// Where the forward has kept states and errors, flags alone are to be written.
  ChainArgs errors_args() const {
    ChainArgs chain = chain_args();
    chain.initial = args.initial;
    if (segments.spans > 0) chain.states_in = segments.states;
    if (!blocks.kept) chain.h = blocks.h, chain.vn = blocks.errors;
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

  /// Chains for D alone. Hopper's leave nothing else; what others leave in dh and dz is written
  /// again.
  ReverseArgs d_args(const SequenceMap& map) const {
    ReverseArgs reverse = reverse_args(map);
    if (on_hopper()) reverse.dh = reverse.dz = nullptr;
    return reverse;
  }

  /// Chains of segments from zero, for dS behind them.
  ReverseArgs scan_args() const {
    ReverseArgs reverse = d_args(segments.sequences);
    reverse.d_initial = reverse.initial = span_states(segments.D);
    return reverse;
  }

  ReverseArgs last_args(bool tokens) const {
    ReverseArgs reverse = reverse_args(segments.spans > 0 ? segments.sequences : args.map);
    if (!tokens || !grad_args().dv.base) reverse.dv = args.dv;
    reverse.d_final = args.d_final;
    reverse.d_initial = args.d_initial, reverse.initial = args.initial;
    if (segments.spans > 0) {
      reverse.d_final = span_states(segments.d_states);
      reverse.d_initial.indices = segments.sequence_slots;
      reverse.initial.indices = segments.initial_slots;
      reverse.initial.mask = nullptr;
    }
    return reverse;
  }

  /// What they may have to leave: chains with positive log gates, and d_initial_state, or D, where
  /// next to nothing reached it.
  Status half_chains(const ChainArgs* errors, const ReverseArgs& reverse) const {
    const bool leaves =
        args.d_initial.base || args.gate.gate_mode == GateMode::kLog || plan.requested.spans;
    uint32_t* left = leaves ? left_words(plan, args) : nullptr;
    KDA_RETURN_IF_ERROR(sm90::launch_half_chains(errors, reverse, args.v, left, early()));
    if (!leaves) return {};
    KDA_RETURN_IF_ERROR(sm90::launch_left_chunk_intra(intra_args(), left, where));
    return sm90::launch_left_chains(errors, reverse, left, where);
  }

  /// The chain from right to left once more, with the factors of a first half, which are bf16 where
  /// that one has left chains: what those give here is made again, whatever it is. Chains that are
  /// left now had their states and errors from other factors.
  Status half_chains_again(const ReverseArgs& reverse) const {
    uint32_t* before = left_words(plan, args);
    uint32_t* left = before + static_cast<std::size_t>(args.shape.HV) * head_bytes(plan).left /
                                  (2 * sizeof(uint32_t));
    KDA_RETURN_IF_ERROR(sm90::launch_half_chains(nullptr, reverse, args.v, left, where));
    KDA_RETURN_IF_ERROR(sm90::launch_left_chunk_intra(intra_args(), left, where));
    const ChainArgs errors = errors_args();
    KDA_RETURN_IF_ERROR(sm90::launch_left_chains(&errors, reverse, left, where));
    return sm90::launch_left_chains(nullptr, reverse, before, where);
  }

  /// Two chains that need nothing of each other; null: not wanted.
  Status chains(const ChainArgs* errors, const ReverseArgs& reverse) const {
    if (on_hopper())
      return half ? half_chains(errors, reverse) : sm90::launch_chains(errors, &reverse, early());
    if (errors) KDA_RETURN_IF_ERROR(launch_chunk_delta_h_errors(*errors, narrow(), where));
    return launch_chunk_reverse(reverse, narrow(), where);
  }

  bool by_hopper(const FinishedGradArgs& grad) const {
    const Problem& p = plan.problem;  // not the group's: no value depends on that
    return on_hopper() && !needs_head_gates(p) && sm90::serves_chunk_grad(grad) &&
           sm90::has_units_enough(grad.num_chunks * p.num_heads, p.num_value_heads / p.num_heads,
                                  plan.device.num_sms);
  }

  /// Hopper's kernel stores dv too where it is dZ: the chains have more to write than it has.
  FinishedGradArgs grad_args() const {
    FinishedGradArgs grad;
    grad.shape = args.shape, grad.map = args.map, grad.num_chunks = most_chunks(plan);
    grad.q = args.q, grad.k = args.k, grad.g = args.g, grad.beta = args.beta;
    grad.gate = args.gate;
    grad.d_o = args.d_o;
    grad.h = blocks.h, grad.dh = blocks.dh, grad.errors = blocks.errors, grad.dz = blocks.dz;
    grad.rows = args.rows;
    grad.dq = args.dq, grad.dk = args.dk, grad.dg = args.dg, grad.dbeta = args.dbeta;
    grad.sums = args.sums;
    if (by_hopper(grad) && sm90::has_whole_pieces(args.dv)) grad.dv = args.dv;
    return grad;
  }

  Status gradients() const {
    FinishedGradArgs grad = grad_args();
    if (by_hopper(grad)) {
      grad.left = left_words(plan, args);
      KDA_RETURN_IF_ERROR(sm90::launch_chunk_grad(grad, plan.device.num_sms, early()));
      BackwardArgs by_chunks = args;
      by_chunks.sizes.pieces = grad.num_chunks;
      return args.sums ? launch_parameters(by_chunks, early()) : Status{};
    }
    HeadGates<ChunkGradArgs> portable{grad};
    portable.gate_step = args.gate_step, portable.tiled = args.tiled;
    KDA_RETURN_IF_ERROR(launch_chunk_grad(portable, where));
    KDA_RETURN_IF_ERROR(launch_finish_gradients(args, where));
    return args.sums ? launch_parameters(args, early()) : Status{};
  }

  /// The chains of whole sequences, for D alone.
  ReverseArgs whole_args(const SpanGradients& spans) const {
    ReverseArgs reverse = d_args(args.map);
    if (spans.from_final) reverse.d_final = args.d_final;
    StateView D = span_states(spans.D);
    D.num_slots = args.map.num_sequences;
    reverse.d_initial = reverse.initial = D;
    return reverse;
  }

  Status reverse_merge(const StateView& d_final) const {
    return launch_reverse_merge(d_states_args(d_final), where);
  }

  /// What does not wait for dS behind the sequences. `halves`: there is something to wait for;
  /// null: not, and states and errors are left to finish(). `tokens`: wants_tokens(). States and
  /// errors also say what is wrong with the sequences.
  Status begin(bool tokens, const SpanGradients* halves) const {
    KDA_RETURN_IF_ERROR(intra());
    if (segments.spans > 0) KDA_RETURN_IF_ERROR(scan());
    if (!halves) return segments.spans > 0 ? chains(nullptr, scan_args()) : Status{};
    if (segments.spans > 0) KDA_RETURN_IF_ERROR(launch_merge(states_args(), plan.device, where));
    const ChainArgs errors = errors_args();
    return chains(tokens || args.flags ? &errors : nullptr,
                  segments.spans > 0 ? scan_args() : whole_args(*halves));
  }

  Status finish(bool tokens, bool halves) const {
    const ChainArgs errors = errors_args();
    const bool wanted = !halves && (tokens || args.flags);
    if (segments.spans > 0)
      KDA_RETURN_IF_ERROR(halves ? reverse_merge(args.d_final) : both_merges());
    const ReverseArgs reverse = last_args(tokens);
    KDA_RETURN_IF_ERROR(half && halves ? half_chains_again(reverse)
                                       : chains(wanted ? &errors : nullptr, reverse));
    return tokens ? gradients() : Status{};
  }
};

/// Calls body(launches, tokens) for each group. `prepared`: an earlier call has made the maps.
template <class Body>
Status for_groups(const stage::Backward& b, bool prepared, Body&& body) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(b.call, b.call.plan->segments, prepared, &maps));
  BackwardArgs given;
  set_gradients(b, maps, &given);
  HeadGates<BackwardArgs> all = with_head_gates(b, given);
  const Segments segments = segments_of(b.call, maps);
  if (segments.spans > 0 && !prepared) {
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
    const Group group = group_at(all.shape, first, groups.heads);
    const HeadGates<BackwardArgs> args = group.of(all);
    const Blocks blocks = blocks_of(b.call, args, group.first_value_head);
    KDA_RETURN_IF_ERROR(body(GroupLaunches{*b.call.plan, args, blocks, segments, {b.call.stream}},
                             wants_tokens(b.gradients)));
    all.flags = nullptr;  // the first group has set them
  }
  return {};
}

}  // namespace

Status backward(const stage::Backward& b) {
  return for_groups(b, false, [](const GroupLaunches& group, bool tokens) {
    KDA_RETURN_IF_ERROR(group.begin(tokens, nullptr));
    return group.finish(tokens, false);
  });
}

Status span_backward_begin(const stage::SpanBackwardBegin& begin) {
  const stage::Call& call = begin.backward.call;
  return for_groups(begin.backward, false, [&](const GroupLaunches& group, bool tokens) {
    KDA_RETURN_IF_ERROR(group.begin(tokens, &begin.spans));
    if (!begin.spans.D || group.segments.spans == 0) return Status{};
    KDA_RETURN_IF_ERROR(
        group.reverse_merge(begin.spans.from_final ? group.args.d_final : StateView{}));
    const Shape& shape = group.args.shape;
    const int64_t floats = int64_t{shape.HV} * shape.K * shape.V;
    for (int64_t n = 0; n < call.problem.num_sequences; ++n) {
      const int64_t first = call.plan->segment_offsets[static_cast<std::size_t>(n)];
      KDA_RETURN_IF_ERROR(call_status(
          cudaMemcpyAsync(begin.spans.D + n * floats, group.segments.d_states + first * floats,
                          static_cast<std::size_t>(floats) * sizeof(float),
                          cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(call.stream)),
          "cudaMemcpyAsync"));
    }
    return Status{};
  });
}

Status span_backward_finish(const stage::Backward& b) {
  return for_groups(
      b, true, [](const GroupLaunches& group, bool tokens) { return group.finish(tokens, true); });
}

}  // namespace kda::cuda::staged
