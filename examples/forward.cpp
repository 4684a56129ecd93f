// SPDX-License-Identifier: Apache-2.0
// Forward in C++: one sequence of 1,000 tokens, 2 heads.
#include <cstdio>
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

  std::vector<float> qk(T * H * K, 0.1f), v(T * H * V, 1.0f), g(T * H * K, -0.01f),
      beta(T * H, 0.0f);
  std::vector<float> o(T * H * V);
  kda::Tensors tensors;
  tensors.q = tensors.k = qk.data();
  tensors.v = v.data();
  tensors.g = g.data();
  tensors.beta = beta.data();
  tensors.o = o.data();
  kda::Workspace workspace;  // grows to what calls need
  kda::throw_if_error(kda::forward(problem, tensors, workspace));
  // [readme]
  std::printf("%zu bytes of workspace, o[last] = %f\n", workspace.size(),
              static_cast<double>(o.back()));
  return o.back() > 0.05f && o.back() < 0.1f ? 0 : 1;  // near scale * |q| * v
}
