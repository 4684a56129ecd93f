// SPDX-License-Identifier: Apache-2.0
// What tests of the CUDA backends share. They run with KDA_TEST_DEVICE=cuda (./dev gpu-test) and
// are skipped elsewhere.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "support/harness.hpp"

namespace kda::test {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs KDA_TEST_DEVICE=cuda and a GPU";
  }
};

/// On the emulator (tests/emulator) everything takes a thousand times as long.
inline bool emulated() { return device().name.starts_with("emulated"); }
/// Tokens of a long case.
inline int64_t long_case(int64_t tokens) { return emulated() ? tokens / 4 : tokens; }

inline int32_t oracle_threads() {
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
}

/// A planned problem with all of its memory on the current device: what a caller of run() holds.
struct OnDevice {
  Problem problem;
  Plan plan;
  check::Outputs outputs;  ///< on the host; read() fills them
  std::unique_ptr<check::DeviceTensors> memory;
  check::DeviceBuffer workspace;

  OnDevice(const check::Inputs& inputs, const RunOptions& options = {}) : problem(inputs.problem) {
    if (problem.operation == Operation::kForward && !problem.final_state)
      check::want_final_state(&problem);
    outputs = check::make_outputs(&problem, options.out_dtype);
    throw_if_error(make_plan(problem, inputs.cu_seqlens, device(), options.plan, &plan));
    Tensors host = inputs.tensors();
    outputs.attach(&host);
    memory = std::make_unique<check::DeviceTensors>(plan, host);
    workspace = check::DeviceBuffer(plan.workspace_bytes);
    workspace.fill(0xff);
  }
  Status run(void* stream = nullptr) const {
    return kda::run(plan, memory->tensors(), workspace.data(), workspace.size(), stream);
  }
  void read() {
    check::synchronize_device();
    memory->download();
  }
};

/// With KDA_TEST_VERBOSE=1 prints the errors of a case.
inline void note(const std::string& what, double o, double state) {
  if (std::getenv("KDA_TEST_VERBOSE"))
    std::printf("  %-28s o %.2e  final state %.2e\n", what.c_str(), o, state);
}

}  // namespace kda::test
