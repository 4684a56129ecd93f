// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <kda/kda.hpp>

int main() {
  kda::Problem problem;
  problem.num_tokens = 8;
  problem.q = problem.k = problem.v = problem.g = problem.o =
      kda::contiguous(kda::DType::kBFloat16, {1, 8, 1, 128});
  problem.beta = kda::contiguous(kda::DType::kBFloat16, {1, 8, 1});
  kda::Plan plan;
  kda::throw_if_error(kda::make_plan(problem, {}, kda::cpu_facts(), {}, &plan));
  std::printf("C++ consumer: %s\n", plan.implementation.c_str());
  return 0;
}
