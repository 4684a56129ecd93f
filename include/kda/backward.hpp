// SPDX-License-Identifier: Apache-2.0
// The backward pass: gradients of a loss with respect to the inputs of a forward, given those with
// respect to its outputs (docs/operation.md, "Backward").
//
// Of the inputs as the caller gave them: dq and dk through the L2 norm, dg of the raw gate (or log
// decay), dbeta of the raw step size. Value heads that share a q/k head add up in its dq and dk.
#pragma once

#include <cstdint>
#include <optional>

#include "kda/problem.hpp"
#include "kda/tensor.hpp"

namespace kda {

/// What a forward keeps for its backward, in blocks that the caller owns.
enum class KeepPolicy : int32_t {
  kInputs = 0,  ///< nothing: the states of a long sequence are made again, one pass more
  kStates = 1,  ///< the fp32 state after every kept_state_every tokens of a sequence
  kKeep = 2,    ///< states and prediction errors of every chunk: one pass less than kStates
};

inline constexpr int64_t kKeptStateEvery = 2048;  ///< default of kept_state_every
/// kept_state_every is a multiple of this.
inline constexpr int64_t kKeptStateMultiple = 64;

/// The gradients of one backward: two that come in and eight that go out. An absent input counts as
/// zero, at least one of the two must be there; an absent output is not wanted, and at least one
/// must be. Each has a type and strides of its own; shapes are those of what it is the gradient of.
struct Gradients {
  std::optional<TensorDesc> d_o;            ///< in: [B, T, HV, V] bf16, fp16 or fp32
  std::optional<TensorDesc> d_final_state;  ///< in: [N, HV, K, V] in state_layout, fp32 or bf16

  std::optional<TensorDesc> dq;        ///< [B, T, H, K]  bf16, fp16 or fp32
  std::optional<TensorDesc> dk;        ///< [B, T, H, K]
  std::optional<TensorDesc> dv;        ///< [B, T, HV, V]
  std::optional<TensorDesc> dg;        ///< [B, T, HV, K]
  std::optional<TensorDesc> dbeta;     ///< [B, T, HV]; any innermost stride
  std::optional<TensorDesc> dA_log;    ///< [HV] fp32; only where the forward has A_log
  std::optional<TensorDesc> ddt_bias;  ///< [HV, K] fp32; only where it has dt_bias
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
  float* dA_log = nullptr;
  float* ddt_bias = nullptr;
  void* d_initial_state = nullptr;
};

/// One backward: the forward that it belongs to, and its gradients. `forward.o`, `final_state` and
/// `checkpoints` are not looked at (no gradient flows through checkpoints).
struct BackwardProblem {
  Problem forward;
  Gradients gradients;
};

}  // namespace kda
