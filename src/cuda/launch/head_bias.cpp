// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/head_bias.hpp"

#include "core/layout.hpp"
#include "cuda/launch/blocks.hpp"
#include "plan/ledger.hpp"
#include "stage/backward.hpp"

namespace kda::cuda {
namespace {

HeadBiasArgs args_of(const stage::Call& call, const void* bias, const TensorDesc& desc) {
  const Problem& p = call.problem;
  return {
      .rows = static_cast<float*>(plan::find_block(*call.plan, call.workspace, block::kHeadBias)),
      .bias = static_cast<float*>(const_cast<void*>(bias)),
      .stride = desc.strides[0],
      .heads = p.num_value_heads,
      .channels = p.key_dim};
}

}  // namespace

Status expand_bias(const stage::Call& call, GateView* gate) {
  const Problem& p = call.problem;
  if (!has_head_bias(p)) return {};
  const HeadBiasArgs args = args_of(call, call.tensors.dt_bias, *p.dt_bias);
  gate->dt_bias = args.rows, gate->stride_dt = p.key_dim;
  return launch_expand_bias(args, {call.stream});
}

Status sum_bias(const stage::Backward& b) {
  const std::optional<TensorDesc>& desc = b.gradients.ddt_bias;
  if (!desc || !is_bias_a_head(b.call.problem, *desc)) return {};
  return launch_sum_bias(args_of(b.call, b.tensors.ddt_bias, *desc), {b.call.stream});
}

}  // namespace kda::cuda
