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
// span_maps() and fold_states() are for the CPU. Results do not depend on the number of threads,
// nor on other spans. On a GPU a forward is in two halves, with the exchange between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

/// The first half of a forward of spans, on a GPU: outputs from zero stay in o and the workspace, M
/// and B [N, HV, K, K or V] go to `maps`, on the device; null: not wanted. D is not made here.
/// `plan`: with PlanOptions::spans; `tensors`, `workspace` and `stream` as of run(). Asynchronous.
Status span_begin(const Plan& plan, const Tensors& tensors, const SpanMaps& maps, void* workspace,
                  std::size_t workspace_bytes, void* stream = nullptr) noexcept;

/// The second half: o and final states, from the states before the spans, `states_in` [N, HV, K, V]
/// in fp32 on the device, dense, in the kv layout. All else as it was given to span_begin(), which
/// must have run on the same workspace.
Status span_finish(const Plan& plan, const Tensors& tensors, const float* states_in,
                   void* workspace, std::size_t workspace_bytes, void* stream = nullptr) noexcept;

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
/// `map_stride` floats apart, and so a buffer may hold both; starts and states are dense.
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
  int32_t num_threads = 0;  ///< 0: OMP_NUM_THREADS or the number of cores
};

/// Folds in fp32, in the order of the steps. The first step has a start. Allocates host memory,
/// about K (V + K) floats a thread. kInvalidArgument: an entry that is outside its buffer, a null
/// pointer, sizes outside their ranges; nothing is written then.
Status fold_states(const StateFold& fold) noexcept;

}  // namespace kda
