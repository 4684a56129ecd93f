// SPDX-License-Identifier: Apache-2.0
// Context parallelism by hand: scan the segments (anywhere), merge their maps, run each from its
// own start. The same three calls join segments that live on several machines.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kda/kda.hpp"

namespace {

constexpr int64_t T = 2048, H = 1, K = 64, V = 64;

kda::Problem describe() {
  kda::Problem problem;
  problem.num_tokens = T;
  problem.key_dim = K;
  problem.value_dim = V;
  problem.q = problem.k = problem.g = kda::contiguous(kda::DType::kFloat32, {1, T, H, K});
  problem.v = problem.o = kda::contiguous(kda::DType::kFloat32, {1, T, H, V});
  problem.beta = kda::contiguous(kda::DType::kFloat32, {1, T, H});
  problem.beta_mode = kda::BetaMode::kSigmoid;
  problem.qk_l2norm = true;
  return problem;
}

std::vector<float> wave(int64_t count, float size, float shift) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = shift + size * std::sin(static_cast<float>(i * i % 1009));
  return values;
}

}  // namespace

int main() {
  const auto q = wave(T * H * K, 1, 0), k = wave(T * H * K, 1, 0.2f), v = wave(T * H * V, 1, 0);
  const auto g = wave(T * H * K, 0.004f, -0.005f), beta = wave(T * H, 1, 0);
  std::vector<float> o(T * H * V), serial(T * H * V);
  kda::Tensors tensors;
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.g = g.data();
  tensors.beta = beta.data();

  kda::PlanOptions options;
  options.context_parallel = kda::SegmentPolicy::kFixed;
  options.num_segments = 4;
  kda::Plan plan, serial_plan;
  kda::throw_if_error(kda::make_plan(describe(), {}, kda::cpu_facts(), options, &plan));
  kda::throw_if_error(kda::make_plan(describe(), {}, kda::cpu_facts(), {}, &serial_plan));
  void* workspace = std::aligned_alloc(kda::kWorkspaceAlignment, plan.workspace_bytes);

  const std::size_t n = plan.segments.size();
  std::vector<float> M(n * H * K * K), B(n * H * K * V), states(n * H * K * V);
  const kda::SegmentTensors segments{M.data(), B.data(), states.data()};
  tensors.o = o.data();
  for (const auto stage : {kda::segment_scan, kda::segment_merge, kda::segment_forward})
    kda::throw_if_error(stage(plan, tensors, segments, workspace, plan.workspace_bytes, nullptr));

  tensors.o = serial.data();
  kda::throw_if_error(kda::run(serial_plan, tensors, workspace, plan.workspace_bytes));
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    error += std::pow(o[i] - serial[i], 2);
    norm += std::pow(serial[i], 2);
  }
  std::free(workspace);
  std::printf("%zu segments, distance from the serial run: %.1e\n", n, std::sqrt(error / norm));
  return std::sqrt(error / norm) < 1e-5 ? 0 : 1;
}
