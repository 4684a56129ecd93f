// SPDX-License-Identifier: Apache-2.0
#include "support/backward.hpp"

#include <algorithm>

#include "core/layout.hpp"

namespace kda::test {
namespace {

namespace blocked = cpu::blocked;

/// What a forward with the policy `states` keeps: [states, HV, K, V] fp32.
io::Buffer kept_states(const check::Inputs& inputs, int64_t every) {
  Problem p = inputs.problem;
  p.checkpoint_every = every;
  StateDesc states;
  const std::vector<int64_t> offsets = inputs.offsets();
  for (std::size_t n = 0; n + 1 < offsets.size(); ++n)
    states.num_slots += (offsets[n + 1] - offsets[n]) / every;
  const Shape shape = state_shape(p, states);
  states.tensor = contiguous(DType::kFloat32, {shape[0], shape[1], shape[2], shape[3]});
  p.checkpoints = states;
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, cpu_facts(), {}, &plan));
  io::Buffer workspace(plan.workspace_bytes);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
  if (p.state_layout == StateLayout::kKV) return outputs.checkpoints;
  io::Buffer turned(outputs.checkpoints.size());
  const int64_t K = p.key_dim, V = p.value_dim;
  for (int64_t s = 0; s < states.num_slots * p.num_value_heads; ++s)
    for (int64_t d = 0; d < K; ++d)
      for (int64_t c = 0; c < V; ++c)
        turned.as<float>()[(s * K + d) * V + c] =
            outputs.checkpoints.as<float>()[(s * V + c) * K + d];
  return turned;
}

}  // namespace

std::vector<const blocked::Kernels*> kernel_tables() {
  std::vector<const blocked::Kernels*> tables = {blocked::portable_kernels()};
  if (blocked::avx2_kernels() && blocked::cpu_has_avx2()) tables.push_back(blocked::avx2_kernels());
  if (blocked::avx512_kernels() && blocked::cpu_has_avx512())
    tables.push_back(blocked::avx512_kernels());
  return tables;
}

void run_backward(const check::Inputs& inputs, check::GradientBuffers* buffers,
                  const BackwardRun& run) {
  const Problem& p = inputs.problem;
  const blocked::Kernels& kernels = run.kernels ? *run.kernels : blocked::best_kernels();
  io::Buffer scratch(blocked::backward_scratch_bytes(p, run.kept_every, run.num_threads));
  scratch.fill(0xff);
  Tensors tensors = inputs.tensors();
  tensors.initial_state_indices = run.state_indices;
  tensors.initial_state_mask = run.state_mask;
  const GradientTensors gradients = buffers->tensors();
  stage::Backward args{{p, tensors, stage::Sequences(p, inputs.cu_seqlens, nullptr),
                        run.num_threads, scratch.data()},
                       buffers->gradients,
                       gradients};
  io::Buffer states;
  if (run.kept_every > 0) {
    states = kept_states(inputs, run.kept_every);
    args.kept_states = states.as<float>();
    args.kept_every = run.kept_every;
  }
  throw_if_error(blocked::backward(kernels, args));
}

void restride_gradients(const Problem& p, check::GradientBuffers* buffers) {
  Gradients& g = buffers->gradients;
  if (g.d_o) pad_tensor(&buffers->d_o, &*g.d_o, v_shape(p), 1);
  pad_tensor(&buffers->dq, &*g.dq, qk_shape(p), 1);
  pad_tensor(&buffers->dk, &*g.dk, qk_shape(p), 2);
  pad_tensor(&buffers->dv, &*g.dv, v_shape(p), 1);
  pad_tensor(&buffers->dg, &*g.dg, g_shape(p), 3);
  const Shape beta = beta_shape(p);
  buffers->dbeta = spread_tensor(buffers->dbeta, &*g.dbeta, beta,
                                 {beta[1] * (beta[2] * 3 + 2) + 1, beta[2] * 3 + 2, 3, 0});
}

std::vector<const io::Buffer*> gradient_outputs(const check::GradientBuffers& buffers) {
  return {&buffers.dq,    &buffers.dk,     &buffers.dv,       &buffers.dg,
          &buffers.dbeta, &buffers.dA_log, &buffers.ddt_bias, &buffers.d_initial_state};
}

bool same_gradients(const check::GradientBuffers& a, const check::GradientBuffers& b) {
  const auto left = gradient_outputs(a), right = gradient_outputs(b);
  return std::equal(left.begin(), left.end(), right.begin(),
                    [](auto* x, auto* y) { return same_bits(*x, *y); });
}

}  // namespace kda::test
