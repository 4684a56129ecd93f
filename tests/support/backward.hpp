// SPDX-License-Identifier: Apache-2.0
// Running the backward pass on inputs of tests, on the device that tests run on.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "check/backward.hpp"
#include "registry/rows.hpp"
#include "support/harness.hpp"

namespace kda::test {

struct BackwardRun {
  std::string backend;  ///< as PlanOptions::backend
  int32_t num_threads = 1;
  /// The forward keeps a state every so many tokens; on CUDA, where it keeps none, windows have so
  /// many. 0: no states, the windows of the plan.
  int64_t kept_every = 0;
  bool keep_chunks = false;  ///< KeepPolicy::kChunks
  int32_t num_sms = 0;       ///< that plans count on; 0: those of the device
  bool from_bounds = false;  ///< the plan does not know cu_seqlens
  int64_t segments = 0;      ///< of each sequence, as far as it has chunks; 0: as the planner likes
  bool whole = false;        ///< no sequence is cut
  bool spans = false;        ///< a backward in two phases
  const int32_t* state_indices = nullptr;
  const uint8_t* state_mask = nullptr;
};

/// What to ask for so that every implementation of device() that declines nothing has its turn.
std::vector<std::string> backward_backends();
/// Types of q, k and v so that every row of device() has its turn, if K and V are multiples of 8:
/// on a GPU those in bf16 go to cuda.sm80.staged.
std::vector<DType> backward_types();
/// The same, and how many segments a sequence is cut into: those in bf16 once whole and once cut.
struct BackwardForm {
  DType dtype;
  int64_t segments;
};
std::vector<BackwardForm> backward_forms();
/// check::make_gradients() with d_o of the type of v, and what comes out in fp32.
check::GradientBuffers gradients_in_fp32(const check::Inputs& inputs,
                                         check::GradientOptions options = {});

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

/// Gradients on a plan that `plan_backward` makes in place of the function of `head`, whose text is
/// wanted.
check::GradientBuffers run_planned_by(const registry::Head& head,
                                      void (*plan_backward)(plan::PlanBuilder&),
                                      const check::Inputs& inputs, check::GradientBuffers buffers,
                                      std::string* text, const BackwardRun& run = {});

/// On the device alone a backward has offsets `wrong`, which are to be clamped to those of `inputs`
/// before they are cut, and flagged.
void expect_clamped(const check::Inputs& inputs, const check::GradientBuffers& buffers,
                    const std::vector<int64_t>& wrong, BackwardRun run);

/// Multiplies element i of a tensor of `type` by factor(i).
void scale_by(io::Buffer* tensor, DType type, const std::function<double(int64_t)>& factor);

/// Runs a planned call and compares its gradients with the oracle's: every head within its
/// tolerance; if `many`, all heads together within the bounds of bf16 operands, and of fp16 chains
/// too if `half`. (The sum over tokens of dA_log may cancel in all of a few heads.)
/// KDA_TEST_VERBOSE prints the errors.
void expect_gradients_within(const check::Inputs& inputs, check::GradientBuffers buffers,
                             BackwardCall* call, bool many, bool half, const std::string& what);

/// Replaces d_o and every gradient of tokens by copies with padded strides, those of d_o multiples
/// of `unit`, dbeta with a strided innermost dimension.
void restride_gradients(const Problem& problem, check::GradientBuffers* buffers, int64_t unit = 1);

/// The outputs in the order of check::kGradientNames.
std::vector<const io::Buffer*> gradient_outputs(const check::GradientBuffers& buffers);
/// Every gradient of `a` has the bits of `b`; else with the name of the first that has not.
testing::AssertionResult same_gradients(const check::GradientBuffers& a,
                                        const check::GradientBuffers& b);

}  // namespace kda::test
