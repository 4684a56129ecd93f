// SPDX-License-Identifier: Apache-2.0
// Forward in C++: one sequence of 1,000 tokens, 2 heads.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kda/kda.hpp"

int main() {
  // [readme]
  constexpr int64_t T = 1000, H = 2, K = 128, V = 128;
  kda::Problem problem;
  problem.num_tokens = T;
  problem.num_heads = problem.num_value_heads = H;
  problem.q = problem.k = problem.g = kda::contiguous(kda::DType::kFloat32, {1, T, H, K});
  problem.v = problem.o = kda::contiguous(kda::DType::kFloat32, {1, T, H, V});
  problem.beta = kda::contiguous(kda::DType::kFloat32, {1, T, H});
  problem.beta_mode = kda::BetaMode::kSigmoid;
  problem.qk_l2norm = true;

  kda::Plan plan;
  kda::throw_if_error(kda::make_plan(problem, {}, kda::cpu_facts(), {}, &plan));

  std::vector<float> qk(T * H * K, 0.1f), v(T * H * V, 1.0f), g(T * H * K, -0.01f),
      beta(T * H, 0.0f);
  std::vector<float> o(T * H * V);
  kda::Tensors tensors;
  tensors.q = tensors.k = qk.data();
  tensors.v = v.data();
  tensors.g = g.data();
  tensors.beta = beta.data();
  tensors.o = o.data();
  void* workspace = std::aligned_alloc(kda::kWorkspaceAlignment, plan.workspace_bytes);
  kda::throw_if_error(kda::run(plan, tensors, workspace, plan.workspace_bytes));
  // [readme]
  std::printf("%s: o[last] = %f\n", plan.implementation.c_str(), static_cast<double>(o.back()));
  std::free(workspace);
  return o.back() > 0.05f && o.back() < 0.1f ? 0 : 1;  // near scale * |q| * v
}
