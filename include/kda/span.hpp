// SPDX-License-Identifier: Apache-2.0
// Spans of longer sequences, whose other spans are elsewhere: in another process or in a later call
// (docs/design/many_cards.md). A span maps the state before it to the state behind it, and the
// gradient of the latter to that of the former:
//   S_out = M S_in + B,   dS_in = M^T dS_out + D
//   M = prod_t (I - beta_t k_t k_t^T) Diag(exp g_t) [K, K],   B [K, V] from q, k, v, g, beta
//   D = sum_t qt_t d_o_t^T [K, V],   qt_t = scale (M of the tokens up to t)^T q_t
// Maps of all spans are gathered; fold_states() then gives each span its S_in or dS_out; run() and
// backward() compute it, with these as initial state and as gradient of the final state.
//
// span_maps() is for the CPU; on a GPU a forward is in two phases, with the exchange between them.
// fold_states() is for both. Results do not depend on the number of threads, nor on other spans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kda/backward.hpp"
#include "kda/plan.hpp"
#include "kda/run.hpp"
#include "kda/status.hpp"
#include "kda/types.hpp"

namespace kda {

/// The maps of the N sequences of a problem, each a span; dense fp32, in the kv layout whatever the
/// layout of states. At least one of M and B is there, and M where D is.
struct SpanMaps {
  float* M = nullptr;  ///< [N, HV, K, K]
  /// [N, HV, K, V]; where the problem has initial states M S_in + B, the state behind the span.
  float* B = nullptr;
  float* D = nullptr;                 ///< [N, HV, K, V]
  const void* d_o = nullptr;          ///< [B, T, HV, V], dense; read where D is wanted
  DType d_o_dtype = DType::kFloat32;  ///< bf16, fp16 or fp32
};

/// `plan`: of a forward, on the CPU; `tensors` and `workspace` as of run(), except that o,
/// final states and checkpoints are not written. Allocates host memory where D is wanted, about
/// K (V + 150) floats a thread. kUnsupported: the plan's implementation has no
/// maps (a GPU, the oracle). On an error nothing has been written.
Status span_maps(const Plan& plan, const Tensors& tensors, const SpanMaps& maps, void* workspace,
                 std::size_t workspace_bytes) noexcept;

/// The first phase of a forward of spans, on a GPU: outputs from zero stay in o and the workspace,
/// M and B [N, HV, K, K or V] go to `maps`, on the device; null: not wanted. D is not made here.
/// `plan`: with PlanOptions::spans; `tensors`, `workspace` and `stream` as of run(). Asynchronous.
Status span_begin(const Plan& plan, const Tensors& tensors, const SpanMaps& maps, void* workspace,
                  std::size_t workspace_bytes, void* stream = nullptr) noexcept;

/// The second phase: o, final states and checkpoints, from the states before the spans, `states_in`
/// [N, HV, K, V] in fp32 on the device, dense, in the kv layout. All else as it was given to
/// span_begin(), which must have run on the same workspace.
Status span_finish(const Plan& plan, const Tensors& tensors, const float* states_in,
                   void* workspace, std::size_t workspace_bytes, void* stream = nullptr) noexcept;

/// Gradients that the first phase of a backward leaves for other spans.
struct SpanGradients {
  /// [N, HV, K, V] on the device, fp32, in the kv layout, the gradients of the states before the
  /// spans: D, or with `from_final` M^T dS_out + D. Null: not wanted.
  float* D = nullptr;
  bool from_final = false;  ///< d_final_state is there already
};

/// The first phase of a backward of spans, on a GPU: all that does not wait for d_final_state, the
/// gradients behind the spans. `plan`: with PlanOptions::spans; the states before the spans are its
/// initial states. `tensors`, `workspace` and `stream` as of backward(), `gradients` too, of which
/// d_final_state is read with `from_final` only and nothing is written. Asynchronous.
Status span_backward_begin(const BackwardPlan& plan, const Tensors& tensors,
                           const GradientTensors& gradients, const SpanGradients& spans,
                           void* workspace, std::size_t workspace_bytes,
                           void* stream = nullptr) noexcept;

/// The second phase: all gradients, from d_final_state. All else as it was given to
/// span_backward_begin(), which must have run on the same workspace.
Status span_backward_finish(const BackwardPlan& plan, const Tensors& tensors,
                            const GradientTensors& gradients, void* workspace,
                            std::size_t workspace_bytes, void* stream = nullptr) noexcept;

/// One step of a fold: S = the start, if there is one; S = M S + A, if there is a map; S is stored,
/// if there is a place.
struct FoldStep {
  static constexpr int64_t kNone = -1;  ///< of each: goes on from S; no map; not stored
  static constexpr int64_t kZero = -2;  ///< of start: S = 0
  int64_t start = kNone;                ///< entry of `starts`
  int64_t map = kNone;                  ///< entry of the maps
  int64_t store = kNone;                ///< entry of `states`
};

/// Steps over gathered maps, one after the other, for each head. Entries of M and A are
/// `map_stride` floats apart, and so a buffer may hold both; starts and states are dense. Rows of a
/// buffer, one from each rank, may have something else behind their maps (`maps_per_row`).
struct StateFold {
  int64_t num_value_heads = 0;
  int64_t key_dim = 0;    ///< 1..256
  int64_t value_dim = 0;  ///< 1..256
  int64_t num_maps = 0;
  int64_t map_stride = 0;    ///< floats; at least the larger of HV K K and HV K V
  const float* M = nullptr;  ///< [num_maps, HV, K, K]
  const float* A = nullptr;  ///< [num_maps, HV, K, V] what each map adds: B, or D
  bool transposed = false;   ///< M^T in the place of M
  int64_t num_starts = 0;
  const float* starts = nullptr;  ///< [num_starts, HV, K, V]
  int64_t num_states = 0;
  float* states = nullptr;  ///< [num_states, HV, K, V]
  std::span<const FoldStep> steps;
  int32_t num_threads = 0;   ///< 0: OMP_NUM_THREADS, else the cores of this process
  int64_t maps_per_row = 0;  ///< 0: all maps are `map_stride` apart
  int64_t row_stride = 0;    ///< floats from one row to the next; at least those of its maps
  /// On a GPU all pointers are of the current device, and `device_steps` is `steps` in its memory.
  DeviceKind device = DeviceKind::kCpu;
  const FoldStep* device_steps = nullptr;
  void* stream = nullptr;  ///< cudaStream_t
};

/// Folds in the order of the steps, in fp32: S starts as A, and takes M's channels in order, one
/// multiply-add each. So a GPU has the bits of a CPU whose vectors have them (AVX2, AVX-512). The
/// first step has a start. On the CPU allocates host memory, about K (V + K) floats a thread. On a
/// GPU it is one launch, asynchronous; steps with a start begin chains that run side by side, so no
/// two may store in one place. kInvalidArgument: an entry that is outside its buffer, a null
/// pointer, sizes outside their ranges; nothing is written then.
Status fold_states(const StateFold& fold) noexcept;

}  // namespace kda
