// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm80.staged: all launches of a group of heads, then those of the next one.
#include "core/text.hpp"
#include "cuda/backward/backward.hpp"
#include "cuda/host/backends.hpp"
#include "cuda/host/blocks.hpp"
#include "cuda/host/gradients.hpp"
#include "cuda/host/staged.hpp"
#include "cuda/host/views.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/finish.hpp"
#include "cuda/staged/backward/reverse.hpp"
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

/// Behind the rows of the group.
uint32_t* left_words(const stage::Call& call, const BackwardArgs& args) {
  const auto heads = static_cast<std::size_t>(args.shape.HV);
  return reinterpret_cast<uint32_t*>(args.rows) +
         heads * head_bytes(*call.plan).rows / sizeof(float);
}

/// All launches of a group, whose arguments `args` are.
Status launch_group(const stage::Call& call, const BackwardArgs& args) {
  const Launch where{call.stream};
  const Blocks blocks = blocks_of(call, args);
  const int64_t num_chunks = most_chunks(*call.plan);
  const bool narrow =
      narrow_tiles(call.plan->device.num_sms, args.map.num_sequences * args.shape.HV, args.shape.V);

  ChunkIntraArgs intra;
  intra.shape = args.shape, intra.map = args.map, intra.num_chunks = num_chunks;
  intra.q = args.q, intra.k = args.k, intra.v = args.v, intra.g = args.g, intra.beta = args.beta;
  intra.gate = args.gate;
  intra.factors = blocks.factors;
  KDA_RETURN_IF_ERROR(launch_chunk_intra(intra, /*half=*/false, /*tokens=*/false, where));

  ChainArgs chain;
  chain.shape = args.shape, chain.map = args.map, chain.num_chunks = num_chunks;
  chain.factors = blocks.factors;
  chain.initial = args.initial;
  chain.h = blocks.h, chain.vn = blocks.errors;
  chain.flags = args.flags, chain.accumulate_flags = args.accumulate_flags;
  KDA_RETURN_IF_ERROR(
      launch_chunk_delta_h(chain, ChainUse::kErrors, /*fp16=*/false, narrow, where));

  ReverseArgs reverse;
  reverse.shape = args.shape, reverse.map = args.map;
  reverse.factors = blocks.factors;
  reverse.d_o = args.d_o, reverse.d_final = args.d_final, reverse.dv = args.dv;
  reverse.d_initial = args.d_initial, reverse.initial = args.initial;
  reverse.dh = blocks.dh, reverse.dz = blocks.dz;
  KDA_RETURN_IF_ERROR(launch_chunk_reverse(reverse, narrow, where));

  FinishedGradArgs grad;
  grad.shape = args.shape, grad.map = args.map, grad.num_chunks = num_chunks;
  grad.q = args.q, grad.k = args.k, grad.g = args.g, grad.beta = args.beta;
  grad.gate = args.gate;
  grad.d_o = args.d_o;
  grad.h = blocks.h, grad.dh = blocks.dh, grad.errors = blocks.errors, grad.dz = blocks.dz;
  grad.rows = args.rows;
  grad.dq = args.dq, grad.dk = args.dk, grad.dg = args.dg, grad.dbeta = args.dbeta;
  grad.sums = args.sums;
  if (sm90::kBuilt && call.plan->device.compute_capability == 90 && sm90::serves_chunk_grad(grad)) {
    grad.left = left_words(call, args);
    KDA_RETURN_IF_ERROR(sm90::launch_chunk_grad(grad, call.plan->device.num_sms, where));
    BackwardArgs by_chunks = args;
    by_chunks.sizes.pieces = num_chunks;
    return args.sums ? launch_parameters(by_chunks, where) : Status{};
  }
  KDA_RETURN_IF_ERROR(launch_chunk_grad(grad, where));
  KDA_RETURN_IF_ERROR(launch_finish_gradients(args, where));
  return args.sums ? launch_parameters(args, where) : Status{};
}

}  // namespace

Status backward(const stage::Backward& b) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(b.call, {}, false, &maps));
  BackwardArgs all;
  set_gradients(b, maps, &all);
  all.sizes.pieces = pieces_of(b.call.problem);
  all.rows = static_cast<float*>(
      plan::find_block(*b.call.plan, b.call.workspace, block::kFactorsThenRows));
  const HeadGroups groups = groups_of(*b.call.plan);
  for (int64_t first = 0; first < all.shape.H; first += groups.heads) {
    KDA_RETURN_IF_ERROR(launch_group(b.call, group_at(all.shape, first, groups.heads).of(all)));
    all.flags = nullptr;  // the first group has set them
  }
  return {};
}

}  // namespace kda::cuda::staged
