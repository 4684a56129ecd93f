// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.smxx.recurrent, and what both backwards are given.
#include "cuda/recurrent/backward/launches.hpp"

#include "cuda/recurrent/backward/backward.hpp"

#include "core/text.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/head_bias.hpp"
#include "cuda/recurrent/backward/gradients.hpp"
#include "cuda/recurrent/backward/head_gates.hpp"
#include "cuda/recurrent/backward/sizes.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda {

void set_gradient_views(const stage::Backward& b, const SequenceMaps& maps, BackwardArgs* args) {
  const stage::Call& call = b.call;
  const Problem& p = call.problem;
  const Gradients& g = b.gradients;
  const GradientTensors& t = b.tensors;
  set_inputs(call, maps, args);
  args->initial = initial_view(p, call.tensors);
  const auto rows = [](const std::optional<TensorDesc>& desc, const void* base) {
    return desc ? row_view(*desc, base) : RowView{};
  };
  const auto states = [&](const std::optional<TensorDesc>& desc, const void* base) {
    if (!desc) return StateView{};
    return state_view(p, StateDesc{*desc, p.num_sequences, false}, const_cast<void*>(base), nullptr,
                      nullptr);
  };
  args->d_o = rows(g.d_o, t.d_o);
  args->d_final = states(g.d_final_state, t.d_final_state);
  args->dq = rows(g.dq, t.dq);
  args->dk = rows(g.dk, t.dk);
  args->dv = rows(g.dv, t.dv);
  args->dg = rows(g.dg, t.dg);
  args->dbeta = rows(g.dbeta, t.dbeta);
  args->d_initial = states(g.d_initial_state, t.d_initial_state);
  if (g.dA_log)
    args->dA_log = static_cast<float*>(t.dA_log), args->stride_dA = g.dA_log->strides[0];
  if (g.ddt_bias)
    args->ddt_bias = static_cast<float*>(t.ddt_bias), args->stride_ddt = g.ddt_bias->strides[0];
  if (g.dA_log || g.ddt_bias)
    args->sums =
        static_cast<double*>(plan::find_block(*call.plan, call.workspace, block::kParameterSums));
  args->num_tokens = p.batch * p.num_tokens;
  args->flags = maps.flags;
  args->accumulate_flags = maps.accumulate_flags;
}

Status set_gradients(const stage::Backward& b, const SequenceMaps& maps, BackwardArgs* args) {
  const stage::Call& call = b.call;
  const Problem& p = call.problem;
  const Gradients& g = b.gradients;
  set_gradient_views(b, maps, args);
  if (g.ddt_bias && is_bias_a_head(p, *g.ddt_bias))  // that of each channel, for sum_bias()
    args->ddt_bias =
        static_cast<float*>(plan::find_block(*call.plan, call.workspace, block::kHeadBias)),
    args->stride_ddt = p.key_dim;
  return expand_bias(call, &args->gate);
}

namespace recurrent {

Status backward(const stage::Backward& b) {
  const stage::Call& call = b.call;
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, false, &maps));
  BackwardArgs args;
  KDA_RETURN_IF_ERROR(set_gradients(b, maps, &args));
  args.sizes = backward_sizes(*call.plan);
  const auto block = [&](const char* name) {
    return static_cast<float*>(plan::find_block(*call.plan, call.workspace, name));
  };
  args.states = block(block::kBackwardStates);
  args.d_states = block(block::kBackwardDStates);
  args.starts = block(block::kBackwardStarts);
  args.carry = block(block::kBackwardCarry);
  args.errors = block(block::kBackwardErrors);
  args.dz = block(block::kBackwardDz);
  args.rows = block(block::kBackwardRows);
  if (!needs_head_gates(call.problem)) return launch_backward(args, {call.stream});
  KDA_RETURN_IF_ERROR(head_gates::launch_backward(with_head_gates(b, args), {call.stream}));
  return sum_bias(b);
}

}  // namespace recurrent

}  // namespace kda::cuda
