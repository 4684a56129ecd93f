// SPDX-License-Identifier: Apache-2.0
// Decode in C++: a prompt of 60 tokens, then 4 tokens one by one with the state in place. What
// comes out is compared with a forward of all 64.
#include <cmath>
#include <cstdio>
#include <vector>

#include "kda/kda.hpp"

namespace {

constexpr int64_t T = 64, kPrompt = 60, H = 4, D = 128;

std::vector<float> waves(int64_t count, float pace, float shift) {
  std::vector<float> x(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = shift + std::sin(pace * static_cast<float>(i));
  return x;
}

kda::Problem problem_of(int64_t tokens) {
  kda::Problem p;
  p.num_tokens = tokens;
  p.num_heads = p.num_value_heads = H;
  p.q = p.k = p.v = p.g = p.o = kda::contiguous(kda::DType::kFloat32, {1, tokens, H, D});
  p.beta = kda::contiguous(kda::DType::kFloat32, {1, tokens, H});
  p.beta_mode = kda::BetaMode::kSigmoid;
  p.qk_l2norm = true;
  return p;
}

}  // namespace

int main() {
  const auto q = waves(T * H * D, .7f, 0), k = waves(T * H * D, 1.3f, 0),
             v = waves(T * H * D, .9f, 0), g = waves(T * H * D, .3f, -1.5f),
             beta = waves(T * H, .5f, 0);
  std::vector<float> o(q.size()), expected(q.size()), state(H * D * D);
  const auto tensors_from = [&](int64_t t, std::vector<float>& outputs) {
    kda::Tensors x;
    x.q = &q[static_cast<std::size_t>(t * H * D)];
    x.k = &k[static_cast<std::size_t>(t * H * D)];
    x.v = &v[static_cast<std::size_t>(t * H * D)];
    x.g = &g[static_cast<std::size_t>(t * H * D)];
    x.beta = &beta[static_cast<std::size_t>(t * H)];
    x.o = &outputs[static_cast<std::size_t>(t * H * D)];
    return x;
  };
  kda::Workspace workspace;

  kda::Problem prompt = problem_of(kPrompt);
  prompt.final_state = kda::states(prompt, kda::DType::kFloat32, 1);
  kda::Tensors tensors = tensors_from(0, o);
  tensors.final_state = state.data();
  kda::throw_if_error(kda::forward(prompt, tensors, workspace));

  kda::Problem step = problem_of(1);
  step.initial_state = kda::states(step, kda::DType::kFloat32, 1);  // read and written in place
  for (int64_t t = kPrompt; t < T; ++t) {
    tensors = tensors_from(t, o);
    tensors.initial_state = state.data();
    kda::throw_if_error(kda::decode(step, tensors, workspace));
  }

  kda::throw_if_error(kda::forward(problem_of(T), tensors_from(0, expected), workspace));
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    error += std::pow(o[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  std::printf("decode after a prompt: relative error %.1e\n", std::sqrt(error / norm));
  return norm > 0 && error < 1e-10 * norm ? 0 : 1;
}
