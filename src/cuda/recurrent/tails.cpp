// SPDX-License-Identifier: Apache-2.0
#include "cuda/recurrent/tails.hpp"

#include <utility>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/decode/tail/ring.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/head_bias.hpp"
#include "cuda/launch/views.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::recurrent {
namespace {

template <class T>
T* block_of(const stage::Call& call, const char* name) {
  return static_cast<T*>(plan::find_block(*call.plan, call.workspace, name));
}

/// Rows of a tail [slots, heads, R, size], as [slots, R, heads, size].
RowView tail_view(const TensorDesc& desc, void* base) {
  RowView view = row_view(desc, base);
  std::swap(view.stride_t, view.stride_h);
  return view;
}

tail::TailArgs tail_args(const stage::Call& call, const DecodeArgs& base) {
  const Problem& p = call.problem;
  const TailDesc& desc = *p.tail;
  const TailTensors& t = call.tensors.tail;
  tail::TailArgs args{with_head_gates(p, base)};
  args.index_columns = 1;
  args.tail_k = tail_view(desc.k, t.k);
  args.tail_g = tail_view(desc.g, t.g);
  args.tail_v_new = tail_view(desc.v_new, t.v_new);
  if (desc.split) {
    args.rest =
        state_view(p, StateDesc{desc.split->rest, desc.num_slots, true}, t.rest, nullptr, nullptr);
    args.rest.bf16 = true;  // as many bits
    args.tail_v = tail_view(desc.split->v, t.v);
    args.tail_beta = tail_view(desc.split->beta, t.beta);
  }
  args.folded = t.folded;
  args.stride_folded_slot = desc.folded.strides[0];
  args.stride_folded_head = desc.folded.strides[1];
  args.rows = args.most_sure = static_cast<int32_t>(desc.rows);
  args.most_tokens = static_cast<int32_t>(tail_tokens(p, call.plan->cu_seqlens));
  args.vectors = in_vectors(p);
  args.settle = desc.settle;
  args.positions = t.positions;
  if (desc.sources) args.sources = t.sources;
  if (desc.accepted_columns > 0) args.accepted = t.accepted_rows;
  args.accepted_columns = desc.accepted_columns;
  if (p.token_parents) args.parents = call.tensors.token_parents;
  args.parent_columns = p.state_index_columns;
  args.wrong_accepted = block_of<int32_t>(call, block::kWrongAccepted);
  return args;
}

/// The decode, and the keys that value heads share.
Status launch_rows(const tail::TailArgs& args, const Launch& where) {
  KDA_RETURN_IF_ERROR(launch_tail_decode(args, where));
  return args.shape.H == args.shape.HV ? Status{} : launch_append_keys(args, where);
}

// ---- a forward: tail.hpp says of which calls it is made ----------------------------------------

tail::EndsArgs ends_args(const stage::Call& call, const DecodeArgs& base, int64_t packs) {
  const int64_t N = call.problem.num_sequences;
  tail::EndsArgs ends{tail_args(call, base)};
  ends.packed = packs == 1;
  ends.cu_seqlens = block_of<int64_t>(call, block::kTailPacks);
  int32_t* at = block_of<int32_t>(call, block::kTailEnds);
  const auto take = [&](int64_t count) { return std::exchange(at, at ? at + count : at); };
  ends.found = take(N);
  ends.fold_slots = take(N), ends.boundaries = take(N);
  ends.forward_slots = take(2 * N);
  ends.row_slots = take(2 * N), ends.row_positions = take(2 * N);
  return ends;
}

Status fold(const tail::EndsArgs& ends, const Launch& where) {
  tail::TailArgs args = ends.tail;
  args.initial.indices = ends.fold_slots;
  args.boundaries = ends.boundaries;
  args.settle = true;
  args.lengths = nullptr;
  args.map = {.num_sequences = ends.tail.map.num_sequences};
  args.most_tokens = 0;
  args.zero_skipped = false;
  args.flags = nullptr;
  return launch_tail_decode(args, where);
}

/// Tensors of the forward inside, those of pack `pack`.
Tensors inner_tensors(const stage::Call& call, const tail::EndsArgs& ends, int64_t pack) {
  const Problem& p = call.problem;
  Tensors t = call.tensors;
  const auto behind = [&](const TensorDesc& desc, auto* base) {
    return pack == 0 ? base : at_bytes(base, desc, pack * desc.strides[0]);
  };
  t.q = behind(p.q, t.q), t.k = behind(p.k, t.k), t.v = behind(p.v, t.v), t.g = behind(p.g, t.g);
  t.beta = behind(p.beta, t.beta), t.o = behind(p.o, t.o);
  t.cu_seqlens = ends.cu_seqlens + 3 * pack;
  t.initial_state_mask = nullptr;
  t.initial_state_indices = t.final_state_indices = ends.forward_slots + 2 * pack;
  if (ends.tail.rest.base) t.initial_state = block_of<float>(call, block::kTailStates);
  t.final_state = t.initial_state;
  t.tail = {};
  return t;
}

/// Split states of the sequences of a pack, in front of the forward or behind it.
Status launch_planes_of(const stage::Call& inner, const tail::EndsArgs& ends, int64_t pack,
                        bool join, const Launch& where) {
  if (!ends.tail.rest.base) return {};
  const Problem& p = inner.problem;
  const int64_t in_pack = p.num_sequences / 2;
  tail::PlanesArgs args{ends.tail.shape, ends.tail.initial, ends.tail.rest};
  args.states = state_view(p, p.initial_state, inner.tensors.initial_state, nullptr, nullptr);
  args.forward_slots = ends.forward_slots;
  args.first = pack * in_pack;
  args.count = in_pack;
  args.join = join;
  return launch_planes(args, where);
}

/// The tokens behind boundaries.
Status append(const stage::Call& inner, const tail::EndsArgs& ends, int64_t pack, bool is_last,
              const Launch& where) {
  const Problem& p = inner.problem;
  const Tensors& t = inner.tensors;
  tail::TailArgs args = ends.tail;
  const GateView gate = args.gate;
  SequenceMaps maps;
  maps.map.num_sequences = p.num_sequences, maps.map.num_tokens = p.num_tokens;
  set_inputs(inner, maps, &args);
  args.gate = gate;
  args.o = row_view(p.o, t.o);
  args.lengths = t.cu_seqlens, args.wide_lengths = true;
  args.initial.indices = ends.row_slots + 2 * pack;
  args.initial.mask = nullptr;
  args.positions = ends.row_positions + 2 * pack;
  args.sources = nullptr;
  args.most_sure = args.most_tokens = static_cast<int32_t>(kTailBoundary - 1);
  args.zero_skipped = false;
  args.found = ends.found, args.num_found = ends.tail.map.num_sequences;
  if (!is_last) args.flags = nullptr;
  return launch_rows(args, where);
}

}  // namespace

/// A ring lies as a tail does; it has no `folded`.
Status ring_decode(const stage::Call& call, const DecodeArgs& base, const Launch& where) {
  const TailDesc& desc = *call.problem.tail;
  tail::RingArgs args{tail_args(call, base)};
  if (desc.flush) args.flush = call.tensors.tail.flush;
  return launch_ring_decode(args, where);
}

Status tail_decode(const stage::Call& call, const DecodeArgs& base, const Launch& where) {
  if (has_ring(call.problem)) return ring_decode(call, base, where);
  const tail::TailArgs args = tail_args(call, base);
  if (args.accepted) KDA_RETURN_IF_ERROR(launch_move_accepted(args, where));
  return launch_rows(args, where);
}

Status tail_forward(const stage::Call& call,
                    const std::function<Status(const stage::Call& inner)>& forward) {
  const Plan& plan = *call.plan->inner;
  const Launch where{call.stream};
  const bool packed = plan.problem.num_sequences == 2 * call.problem.num_sequences;
  const int64_t packs = packed ? 1 : call.problem.num_sequences;
  DecodeArgs base;
  KDA_RETURN_IF_ERROR(make_decode_args(call, &base));
  KDA_RETURN_IF_ERROR(expand_bias(call, &base.gate));
  const tail::EndsArgs ends = ends_args(call, base, packs);
  KDA_RETURN_IF_ERROR(launch_ends(ends, where));
  KDA_RETURN_IF_ERROR(fold(ends, where));
  for (int64_t pack = 0; pack < packs; ++pack) {
    const Tensors tensors = inner_tensors(call, ends, pack);
    const stage::Call inner{
        plan.problem, tensors, stage::Sequences(plan.problem, {}, nullptr), call.num_threads,
        nullptr,      &plan,   block_of<void>(call, block::kTailForward),   call.stream};
    KDA_RETURN_IF_ERROR(launch_planes_of(inner, ends, pack, /*join=*/true, where));
    KDA_RETURN_IF_ERROR(forward(inner));
    KDA_RETURN_IF_ERROR(launch_planes_of(inner, ends, pack, /*join=*/false, where));
    KDA_RETURN_IF_ERROR(append(inner, ends, pack, pack + 1 == packs, where));
  }
  return {};
}

}  // namespace kda::cuda::recurrent
