// SPDX-License-Identifier: Apache-2.0
// A program in C++17, which links the C ABI alone.
#include <cstdio>
#include <kda/call.hpp>
#include <string>
#include <utility>

static_assert(__cplusplus < 202002L, "this consumer is compiled as C++17");

int main() {
  // K = V = 1: S = beta k v = 0.5 * 2 * 3 = 3, o = S q = 12; then S e^-1 + 0.5 * 2 * (3 - 2 S
  // e^-1).
  float q = 4, k = 2, v = 3, g = -1, beta = 0.5f, o = 0, state = 0;
  kda::c::Problem problem;
  problem.num_tokens = problem.key_dim = problem.value_dim = 1;
  problem.tokens(KDA_FP32, {&q, &k, &v, &g, &beta, &o});
  problem.states(&kda_problem::final_state, &state, KDA_FP32, 1);
  kda::c::call(problem);
  bool good = o > 11.99f && o < 12.01f && state > 2.99f && state < 3.01f;

  // The same by a plan, in memory of the caller, which moves.
  kda::c::Workspace workspace;
  kda::c::Plan made(problem), plan = std::move(made);
  o = 0;
  plan.run(problem, workspace);
  good = good && o > 11.99f && o < 12.01f && *plan.implementation() != 0;

  // Bytes first, then the call.
  kda::c::PlanOptions options;
  const std::size_t bytes = kda::c::workspace_bytes(problem, options);
  workspace.reserve(bytes);
  o = 0;
  kda::c::call_on(problem, options, workspace.data(), bytes);
  good = good && o > 11.99f && o < 12.01f;

  // Gradients of o: dq = S = 3.
  kda_gradients gradients = {};
  gradients.struct_size = sizeof(gradients);
  float d_o = 1, dq = 0;
  const int64_t one[] = {1, 1, 1, 1};
  kda::c::check(kda_tensor_contiguous(&gradients.d_o, &d_o, KDA_FP32, 4, one));
  kda::c::check(kda_tensor_contiguous(&gradients.dq, &dq, KDA_FP32, 4, one));
  const kda::c::BackwardPlan backward(plan, gradients);
  backward.run(problem, gradients, workspace);
  good = good && dq > 2.99f && dq < 3.01f;

  try {
    problem.key_dim = 300;
    kda::c::call(problem);
    return 1;
  } catch (const kda::c::Error& error) {
    std::printf("C++17 consumer: o = %g, dq = %g; %s\n", static_cast<double>(o),
                static_cast<double>(dq), error.what());
    good = good && error.status() == KDA_INVALID_ARGUMENT &&
           std::string(error.what()).find("key_dim") == 0;
  }
  return good ? 0 : 1;
}
