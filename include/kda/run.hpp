// SPDX-License-Identifier: Apache-2.0
// run(): executes a Plan on the caller's memory. No allocation, re-entrant from many threads;
// every pointer, length and index that can be checked is checked before anything is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kda/plan.hpp"
#include "kda/status.hpp"
#include "kda/workspace.hpp"

namespace kda {

/// Pointers of a tail (TailDesc), and what a call with one is told of each sequence.
struct TailTensors {
  void* k = nullptr;
  void* g = nullptr;
  void* v_new = nullptr;  ///< fp32; of a ring as TailDesc::v_new says
  int32_t* folded = nullptr;
  const int32_t* positions = nullptr;      ///< [N] sure tokens before this call; of a ring its rows
  const int32_t* sources = nullptr;        ///< [N]; an index that means no slot: the sequence's own
  const int32_t* accepted_rows = nullptr;  ///< [N, accepted_columns], row-major
  int16_t* rest = nullptr;                 ///< of SplitDesc, as v and beta
  void* v = nullptr;
  void* beta = nullptr;
  const int32_t* flush = nullptr;  ///< [N], of a ring
};

/// Base pointers of the tensors that the Problem describes; null where it has none.
struct Tensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* g = nullptr;
  const void* beta = nullptr;
  const void* A_log = nullptr;    ///< fp32, or fp64 where its descriptor says so
  const void* dt_bias = nullptr;  ///< the same
  /// Needed when the plan was made from bounds. Else null, or on the CPU the lengths of the plan (a
  /// GPU does not read them again).
  const void* cu_seqlens = nullptr;

  /// Read-only; but decode without a final_state writes into this pool.
  void* initial_state = nullptr;
  const int32_t* initial_state_indices = nullptr;  ///< [N]; decode in place [N, S], row-major
  const uint8_t* initial_state_mask = nullptr;     ///< [N]
  const int32_t* num_accepted_tokens = nullptr;    ///< [N]
  const int32_t* token_parents = nullptr;          ///< [N, S]

  void* o = nullptr;
  void* final_state = nullptr;
  const int32_t* final_state_indices = nullptr;  ///< [N]; decode [N, S], row-major
  void* checkpoints = nullptr;
  const int32_t* checkpoint_indices = nullptr;  ///< [number of checkpoints], with offsets [N]
  const int32_t* checkpoint_offsets = nullptr;  ///< [N]

  TailTensors tail;

  /// The blocks of Plan::saved: at least plan.saved_bytes, aligned to kWorkspaceAlignment; may be
  /// null if the plan saves nothing.
  void* saved = nullptr;
  std::size_t saved_bytes = 0;

  /// CUDA: the caller vouches that every pointer and the stream belong to the current device, the
  /// plan's; run() then does not ask the driver about each of them. Null pointers, alignment and
  /// overlaps are looked at all the same.
  bool trusted = false;
};

/// Computes what `plan.problem` describes: forward or decode.
/// `workspace`: at least plan.workspace_bytes, aligned to kWorkspaceAlignment; may be null if 0.
///
/// CUDA plans: every pointer is device memory of the current device, `stream` a cudaStream_t of it
/// (null: the default stream). Kernels are launched and the call returns: no synchronisation, no
/// copy from the device, capturable in a CUDA graph. Indices and cu_seqlens cannot be looked at
/// from the host: bad entries are skipped or clamped and set MetadataFlag bits in the workspace
/// block "device_flags" (int32). Rows of outputs and gradients that no sequence of the device's
/// cu_seqlens has become 0. On the CPU `stream` is unused.
Status run(const Plan& plan, const Tensors& tensors, void* workspace, std::size_t workspace_bytes,
           void* stream = nullptr) noexcept;

/// Plan and run in one call, on the CPU, whatever problem.operation says. The plan is made once and
/// remembered (shared_plans()), `workspace` grows to what it takes. `cu_seqlens` and `options` as
/// of make_plan(); a problem with cu_seqlens is planned from bounds where none are given here.
Status forward(Problem problem, const Tensors& tensors, Workspace& workspace,
               std::span<const int64_t> cu_seqlens = {}, const PlanOptions& options = {}) noexcept;
Status decode(Problem problem, const Tensors& tensors, Workspace& workspace,
              std::span<const int64_t> cu_seqlens = {}, const PlanOptions& options = {}) noexcept;

/// The stages of context parallelism as calls of their own, on dense fp32 buffers in the kv
/// layout, one entry a segment of `plan` (which must be segmented):
///   segment_scan:    S_out = M S_in + B for every segment (docs/algorithm.md)
///   segment_merge:   states_in[first] = initial state, states_in[n + 1] = M_n states_in[n] + B_n
///   segment_forward: outputs, checkpoints and final states, every segment from its states_in
/// Calling them in this order is what run() does with SegmentMethod::kScanMergeForward.
struct SegmentTensors {
  float* M = nullptr;          ///< [NSEG, HV, K, K]
  float* B = nullptr;          ///< [NSEG, HV, K, V]
  float* states_in = nullptr;  ///< [NSEG, HV, K, V]
};
Status segment_scan(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                    void* workspace, std::size_t workspace_bytes, void* stream = nullptr) noexcept;
Status segment_merge(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                     void* workspace, std::size_t workspace_bytes, void* stream = nullptr) noexcept;
Status segment_forward(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                       void* workspace, std::size_t workspace_bytes,
                       void* stream = nullptr) noexcept;

}  // namespace kda
