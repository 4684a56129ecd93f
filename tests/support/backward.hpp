// SPDX-License-Identifier: Apache-2.0
// Running a backward pass of the CPU on inputs of tests.
#pragma once

#include <string>

#include "check/backward.hpp"
#include "cpu/blocked/blocked.hpp"
#include "support/harness.hpp"

namespace kda::test {

struct BackwardRun {
  const cpu::blocked::Kernels* kernels = nullptr;  ///< null: those of `backend`
  std::string backend;                             ///< empty: the planner's choice
  int32_t num_threads = 1;
  int64_t kept_every = 0;  ///< the forward keeps a state every so many tokens; 0: none
  const int32_t* state_indices = nullptr;
  const uint8_t* state_mask = nullptr;
};

/// Every kernel table that this machine runs.
std::vector<const cpu::blocked::Kernels*> kernel_tables();

/// A backward ready to run; what the forward keeps is there, the workspace is filled with NaN.
struct BackwardCall {
  BackwardCall(const check::Inputs& inputs, const Gradients& gradients,
               const BackwardRun& run = {});
  Status run(check::GradientBuffers* buffers);

  Plan forward;
  BackwardPlan plan;
  io::Buffer saved, workspace;
  Tensors tensors;
};

/// Fills the outputs of `buffers`; the workspace is filled with NaN first. Throws kda::Error.
void run_backward(const check::Inputs& inputs, check::GradientBuffers* buffers,
                  const BackwardRun& run = {});

/// Replaces d_o and every gradient of tokens by copies with padded strides, dbeta with a strided
/// innermost dimension.
void restride_gradients(const Problem& problem, check::GradientBuffers* buffers);

/// The outputs in the order of check::kGradientNames.
std::vector<const io::Buffer*> gradient_outputs(const check::GradientBuffers& buffers);
bool same_gradients(const check::GradientBuffers& a, const check::GradientBuffers& b);

}  // namespace kda::test
