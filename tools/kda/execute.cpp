// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/execute.hpp"

#include <algorithm>
#include <chrono>

#include "check/device.hpp"
#include "core/thread_pool.hpp"

namespace kda::tools {

double seconds_since_start() {
  using Clock = std::chrono::steady_clock;
  static const Clock::time_point start = Clock::now();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Execution execute(check::Inputs* inputs, DType out_dtype, const DeviceFacts& device,
                  const PlanOptions& options) {
  Execution execution;
  execution.outputs = check::make_outputs(&inputs->problem, out_dtype);
  throw_if_error(make_plan(inputs->problem, inputs->cu_seqlens, device, options, &execution.plan));
  Tensors tensors = inputs->tensors();
  execution.outputs.attach(&tensors);
  if (device.kind == DeviceKind::kCuda) {
    check::DeviceTensors copies(execution.plan, tensors);
    check::DeviceBuffer workspace(execution.plan.workspace_bytes);
    execution.seconds =
        1e-6 * check::time_on_device([&] {
          throw_if_error(run(execution.plan, copies.tensors(), workspace.data(), workspace.size()));
        });
    copies.download();
    return execution;
  }
  io::Buffer workspace(execution.plan.workspace_bytes);
  const double start = seconds_since_start();
  throw_if_error(run(execution.plan, tensors, workspace.data(), workspace.size()));
  execution.seconds = seconds_since_start() - start;
  return execution;
}

BackwardExecution execute_backward(const check::Inputs& inputs, const DeviceFacts& device,
                                   const PlanOptions& options, check::GradientBuffers* gradients) {
  Plan forward;
  throw_if_error(make_plan(inputs.problem, inputs.cu_seqlens, device, options, &forward));
  BackwardExecution execution;
  throw_if_error(make_backward_plan(forward, gradients->gradients, options, &execution.plan));
  if (device.kind == DeviceKind::kCuda) {
    const Plan& plan = execution.plan.plan;
    check::DeviceTensors copies(plan, inputs.tensors());
    check::DeviceGradients outputs(execution.plan, gradients->tensors());
    check::DeviceBuffer workspace(plan.workspace_bytes);
    execution.seconds =
        1e-6 * check::time_on_device([&] {
          throw_if_error(backward(execution.plan, copies.tensors(), outputs.tensors(),
                                  workspace.data(), workspace.size()));
        });
    outputs.download();
    return execution;
  }
  io::Buffer workspace(execution.plan.plan.workspace_bytes);
  const double start = seconds_since_start();
  throw_if_error(backward(execution.plan, inputs.tensors(), gradients->tensors(), workspace.data(),
                          workspace.size()));
  execution.seconds = seconds_since_start() - start;
  return execution;
}

namespace {

double seconds_of(const std::function<void()>& call) {
  const double start = seconds_since_start();
  call();
  return seconds_since_start() - start;
}

Timing timing_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples.front(), samples.back(),
          static_cast<int>(samples.size())};
}

}  // namespace

Timing time_calls(const std::function<void()>& call, double min_seconds, int min_repeats) {
  call();
  std::vector<double> samples;
  double total = 0;
  while (static_cast<int>(samples.size()) < min_repeats || total < min_seconds)
    total += samples.emplace_back(seconds_of(call));
  return timing_of(std::move(samples));
}

std::pair<Timing, Timing> time_pairs(const std::function<void()>& first,
                                     const std::function<void()>& second, double min_seconds,
                                     int min_repeats) {
  first(), second();
  std::vector<double> of_first, of_second;
  double total = 0;
  while (static_cast<int>(of_first.size()) < min_repeats || total < min_seconds) {
    total += of_first.emplace_back(seconds_of(first));
    total += of_second.emplace_back(seconds_of(second));
  }
  return {timing_of(std::move(of_first)), timing_of(std::move(of_second))};
}

double measure_fma_rate(const cpu::blocked::Kernels& kernels, int32_t threads, double min_seconds) {
  constexpr int64_t kMaxIterations = 4'000'000;
  int64_t iterations = kMaxIterations / 1024;
  std::vector<int64_t> done(static_cast<std::size_t>(threads));
  auto task = [&](int64_t idx, int32_t) {
    done[static_cast<std::size_t>(idx)] = kernels.peak_fma(iterations);
  };
  const auto call = [&] { throw_if_error(parallel_tasks(threads, threads, task)); };
  // A call of milliseconds, in which the start of threads is nothing, where there is time for some;
  // in a build that is not optimised fewer iterations are enough for that.
  while (seconds_of(call) < std::min(0.005, min_seconds / 20) && iterations < kMaxIterations)
    iterations *= 2;
  const Timing timing = time_calls(call, min_seconds, 5);
  return static_cast<double>(done[0]) * threads / timing.fastest;
}

void make_decode(check::Inputs* inputs) {
  Problem& p = inputs->problem;
  p.operation = Operation::kDecode;
  StateDesc pool;
  pool.num_slots = p.num_sequences;
  pool.tensor =
      contiguous(DType::kFloat32, {p.num_sequences, p.num_value_heads, p.key_dim, p.value_dim});
  p.initial_state = pool;
  const auto states =
      static_cast<std::size_t>(p.num_sequences * p.num_value_heads * p.key_dim * p.value_dim);
  inputs->initial_state = io::Buffer(states * sizeof(float));
  inputs->initial_state.fill(0);
}

BoundaryStates parse_boundary_states(const std::string& text) {
  return text == "fp32"   ? BoundaryStates::kFp32
         : text == "bf16" ? BoundaryStates::kBf16
                          : BoundaryStates::kSplit;
}

void add_tails(Problem* p, int64_t rows, BoundaryStates of) {
  const DType type = of == BoundaryStates::kFp32 ? DType::kFloat32 : DType::kBFloat16;
  p->initial_state = states(*p, type, p->initial_state->num_slots, /*indexed=*/true);
  p->tail = tails(*p, rows);
  if (of == BoundaryStates::kSplit) p->tail->split = split_states(*p, rows);
}

StateShares state_shares(const Problem& p) {
  if (p.tail->split) return {0.5, 1.5};  // the rest is read, and both are written
  return p.initial_state->tensor.dtype == DType::kBFloat16 ? StateShares{0.5, 0.5}
                                                           : StateShares{1, 1};
}

double multiply_adds(const Problem& p) {
  constexpr double C = 16;
  const auto K = static_cast<double>(p.key_dim);
  const auto V = static_cast<double>(p.value_dim);
  return 3 * C * K + 2 * C * V + 3 * K * V + C * C / 3;
}

}  // namespace kda::tools
