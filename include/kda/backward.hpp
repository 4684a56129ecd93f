// SPDX-License-Identifier: Apache-2.0
// The backward pass: gradients of a loss with respect to the inputs of a forward, given those with
// respect to its outputs (docs/operation.md, "Backward").
//
// They are gradients of the inputs as the caller gave them: dq and dk through the L2 norm, dg of
// the raw gate (or log decay), dbeta of the raw step size. Value heads that share a q/k head add up
// in its dq and dk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "kda/plan.hpp"
#include "kda/problem.hpp"
#include "kda/run.hpp"
#include "kda/tensor.hpp"

namespace kda {

/// The gradients of one backward: two that come in and eight that go out. An absent input counts as
/// zero, at least one of the two must be there; an absent output is not wanted, and at least one
/// must be. Each has a type and strides of its own; shapes are those of what it is the gradient of.
/// Each may also be fp64, for backend oracle (include/kda/problem.hpp).
struct Gradients {
  std::optional<TensorDesc> d_o;            ///< in: [B, T, HV, V] bf16, fp16 or fp32
  std::optional<TensorDesc> d_final_state;  ///< in: [N, HV, K, V] in state_layout, fp32 or bf16

  std::optional<TensorDesc> dq;  ///< [B, T, H, K]  bf16, fp16 or fp32
  std::optional<TensorDesc> dk;  ///< [B, T, H, K]
  std::optional<TensorDesc> dv;  ///< [B, T, HV, V]
  /// [B, T, HV, K]; where g has an innermost stride of 0, it may have one too: the sum over
  /// channels, [B, T, HV] in memory.
  std::optional<TensorDesc> dg;
  std::optional<TensorDesc> dbeta;   ///< [B, T, HV]; any innermost stride
  std::optional<TensorDesc> dA_log;  ///< [HV] fp32; only where the forward has A_log
  /// [HV, K] fp32; only where it has dt_bias. Of one bias a head the innermost stride may be 0: the
  /// sum over channels.
  std::optional<TensorDesc> ddt_bias;
  /// [N, HV, K, V] in state_layout, fp32 or bf16, dense also where the initial states come from a
  /// pool; zero for a sequence that starts from none. Only where the forward has initial_state.
  std::optional<TensorDesc> d_initial_state;
};

/// Base pointers of what a Gradients describes; null where it has none.
struct GradientTensors {
  const void* d_o = nullptr;
  const void* d_final_state = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  void* dg = nullptr;
  void* dbeta = nullptr;
  void* dA_log = nullptr;
  void* ddt_bias = nullptr;
  void* d_initial_state = nullptr;
};

/// One backward: the forward that it belongs to, and its gradients. `forward.o`, `final_state` and
/// `checkpoints` are not looked at (no gradient flows through checkpoints).
struct BackwardProblem {
  Problem forward;
  Gradients gradients;
};

/// Checks all that can be known without pointers and lengths, the forward's problem first. The
/// message names the first offending field.
Status validate(const BackwardProblem& problem) noexcept;

/// How a backward will be computed: a printable value, as Plan.
struct BackwardPlan {
  /// The plan of the backward itself: implementation, stages, workspace. Its problem is the
  /// forward's without the outputs; its `saved` are the blocks that the forward has kept.
  Plan plan;
  Gradients gradients;
  uint64_t forward_id = 0;  ///< plan_id() of the forward's plan

  std::string to_text(bool explain = false) const;
  std::string to_json() const;
};

/// Tells plans apart that keep different things: a hash of the sizes, options, lengths and
/// implementation of a forward.
uint64_t plan_id(const Plan& forward) noexcept;

/// Plans the backward of `forward`, for its device and with its lengths and what it keeps. Of
/// `options` backend, num_threads and spans count; segments are asked for as the forward was asked
/// (context_parallel, num_segments). kInvalidArgument: anything that validate() refuses, a plan of
/// decode; kUnsupported: no implementation of this build has a backward on that device.
Status make_backward_plan(const Plan& forward, const Gradients& gradients,
                          const PlanOptions& options, BackwardPlan* plan) noexcept;

/// Computes the gradients. `tensors` has the inputs of the forward, unchanged since, and `saved` if
/// the forward kept something; its outputs are not looked at. `saved` must have been written by a
/// run() of the plan that `plan` was made for (on the CPU another one is refused); it is only read,
/// so a backward may be run again. `workspace`: at least plan.plan.workspace_bytes, aligned to
/// kWorkspaceAlignment. No output may overlap another tensor. No allocation; on an error nothing
/// has been written.
Status backward(const BackwardPlan& plan, const Tensors& tensors, const GradientTensors& gradients,
                void* workspace, std::size_t workspace_bytes, void* stream = nullptr) noexcept;

}  // namespace kda
