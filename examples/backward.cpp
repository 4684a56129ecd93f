// SPDX-License-Identifier: Apache-2.0
// Gradients in C++: a forward that keeps states for its backward, and the backward; one of the
// gradients is checked by a difference of losses.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kda/kda.hpp"

namespace {

constexpr int64_t T = 300, H = 2, K = 32, V = 32;

struct Memory {
  explicit Memory(std::size_t size)
      : bytes(size), data(std::aligned_alloc(kda::kWorkspaceAlignment, size)) {}
  ~Memory() { std::free(data); }
  std::size_t bytes;
  void* data;
};

std::vector<float> waves(int64_t count, double pace, double size) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(size * std::sin(pace * static_cast<double>(i))));
  return values;
}

}  // namespace

int main() {
  kda::Problem problem;
  problem.num_tokens = T;
  problem.num_heads = problem.num_value_heads = H;
  problem.key_dim = K;
  problem.value_dim = V;
  problem.q = problem.k = problem.g = kda::contiguous(kda::DType::kFloat32, {1, T, H, K});
  problem.v = problem.o = kda::contiguous(kda::DType::kFloat32, {1, T, H, V});
  problem.beta = kda::contiguous(kda::DType::kFloat32, {1, T, H});
  problem.beta_mode = kda::BetaMode::kSigmoid;
  problem.gate_mode = kda::GateMode::kBounded;
  problem.qk_l2norm = true;

  kda::PlanOptions options;
  options.keep = kda::KeepPolicy::kStates;
  options.kept_state_every = 128;
  kda::Plan forward;
  kda::throw_if_error(kda::make_plan(problem, {}, kda::cpu_facts(), options, &forward));
  kda::Gradients wanted;
  wanted.d_o = problem.o;
  wanted.dv = problem.v;
  wanted.dbeta = problem.beta;
  kda::BackwardPlan plan;
  kda::throw_if_error(kda::make_backward_plan(forward, wanted, {}, &plan));
  std::printf("%s", plan.to_text().c_str());

  const std::vector<float> q = waves(T * H * K, 0.7, 1), k = waves(T * H * K, 1.3, 1),
                           g = waves(T * H * K, 0.3, 2);
  std::vector<float> v = waves(T * H * V, 0.9, 1), beta = waves(T * H, 0.5, 1), o(T * H * V);
  const std::vector<float> d_o = waves(T * H * V, 0.2, 1);
  std::vector<float> dv(T * H * V), dbeta(T * H);
  const Memory saved(forward.saved_bytes), room(forward.workspace_bytes),
      workspace(plan.plan.workspace_bytes);
  kda::Tensors tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.g = g.data();
  tensors.beta = beta.data();
  tensors.o = o.data();
  tensors.saved = saved.data;
  tensors.saved_bytes = saved.bytes;
  const auto loss = [&] {
    kda::throw_if_error(kda::run(forward, tensors, room.data, room.bytes));
    double sum = 0;
    for (std::size_t i = 0; i < o.size(); ++i) sum += static_cast<double>(d_o[i]) * o[i];
    return sum;
  };
  loss();
  kda::GradientTensors gradients;
  gradients.d_o = d_o.data();
  gradients.dv = dv.data();
  gradients.dbeta = dbeta.data();
  kda::throw_if_error(kda::backward(plan, tensors, gradients, workspace.data, workspace.bytes));

  constexpr std::size_t kToken = 77;
  beta[kToken] += 0.01f;
  const double above = loss();
  beta[kToken] -= 0.02f;
  const double difference = (above - loss()) / 0.02;
  std::printf("dbeta[%zu] = %.5f, by a difference %.5f\n", kToken,
              static_cast<double>(dbeta[kToken]), difference);
  return std::fabs(difference - dbeta[kToken]) < 1e-2 * (std::fabs(difference) + 0.01) ? 0 : 1;
}
