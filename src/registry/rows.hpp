// SPDX-License-Identifier: Apache-2.0
// Rows of the registry: what a backend says about itself, one type of row an operation. The planner
// reads the common head and lets the row plan; run() calls the functions of the row's stages.
//
// A new operation has a row type of its own here (a Head and its stages), its contracts in
// src/stage, and a list (lists.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kda/fused_decode.hpp"
#include "kda/gated_rms_norm.hpp"
#include "kda/plan.hpp"
#include "kda/short_conv.hpp"
#include "kda/stages.hpp"
#include "stage/backward.hpp"
#include "stage/chunk_delta_h.hpp"
#include "stage/chunk_intra.hpp"
#include "stage/chunk_o.hpp"
#include "stage/decode.hpp"
#include "stage/forward.hpp"
#include "stage/recompute_w_u.hpp"
#include "stage/segment_correct.hpp"
#include "stage/segment_merge.hpp"
#include "stage/segment_scan.hpp"
#include "stage/span_maps.hpp"

namespace kda::plan {
class PlanBuilder;
}

namespace kda::registry {

/// A question to a row before it plans.
struct Request {
  const Problem& problem;
  const DeviceFacts& device;
  const PlanOptions& options;
  const Gradients* gradients = nullptr;      ///< of a backward
  std::span<const int64_t> cu_seqlens = {};  ///< empty: lengths are unknown
};

/// A [B, T, heads, size] tensor that a call writes; without memory it is left out.
struct WrittenRows {
  const TensorDesc& desc;
  void* data;
  int64_t heads, size;
};

/// Care for memory that the host cannot read: checks before anything is launched, and zeros where
/// only the device knows that no sequence has a row.
struct DeviceChecks {
  /// The current device is one that `plan` was made for; `stream` and `workspace` belong to it,
  /// which a trusted caller vouches for.
  Status (*call)(const Plan& plan, bool trusted, const void* workspace, void* stream);
  /// `pointer` (may be null) is memory of the current device; `name` is for the message.
  Status (*pointer)(const char* name, const void* pointer);
  /// Zeros in the rows of `written` that no sequence of the device's cu_seqlens has, and with
  /// zero_skipped in those of sequences without a slot, after the kernels of `call`.
  Status (*zero_rows)(const stage::Call& call, std::span<const WrittenRows> written);
};

/// The part that rows of all operations have in common.
struct Head {
  const char* name;  ///< dotted, e.g. "cpu.blocked.avx2"
  DeviceKind device;
  int64_t chunk_size;  ///< tokens
  /// Null if usable on this machine, else why not.
  const char* (*unavailable)() noexcept;
  /// Fills the plan: cuts, stages, blocks, predicted times, reasons.
  void (*plan)(plan::PlanBuilder& builder);
  /// Empty if it serves the problem, else why not. Null: it serves all that validate() accepts.
  std::string (*decline)(const Problem& problem) = nullptr;
  /// Empty if it serves the options, else why not. Null: it serves all.
  std::string (*decline_options)(const PlanOptions& options) = nullptr;
  /// Empty if it serves a backward's gradients, else why not. Null: it serves all.
  std::string (*decline_gradients)(const Gradients& gradients) = nullptr;
  /// Why the next row should serve what this one can, where no backend is asked for; empty if it
  /// should not. Null: it never should.
  std::string (*defer)(const Request& request) = nullptr;
  int32_t min_compute_capability = 0;  ///< CUDA: 10 major + minor
  int32_t max_compute_capability = INT32_MAX;
  /// Empty if it serves a device of such a capability, else why not. Null: it serves all of them.
  std::string (*decline_device)(const DeviceFacts& device) = nullptr;
  /// Null: tensors are host memory, which run() reads itself.
  const DeviceChecks* device_checks = nullptr;
  bool keeps_states = false;  ///< serves every KeepPolicy
  /// Empty if it serves KeepPolicy::kChunks for the problem, else why not. Null: as keeps_states.
  std::string (*decline_keep)(const Problem& problem) = nullptr;
  /// Why a forward should keep nothing where this row can keep, if no backend is asked for; empty
  /// if it should not. Null: it never should. supported() asks it; a plan does what it was asked
  /// to.
  std::string (*defer_keep)(const Request& request) = nullptr;
  bool float64 = false;        ///< serves tensors in fp64
  bool takes_offsets = false;  ///< reads checkpoint_offsets itself, in place of checkpoint_places
  /// Empty if it serves the problem with its tail, else why not. Null: it serves none with a tail.
  std::string (*decline_tail)(const Request& request) = nullptr;
};

/// Segments of a sequence side by side (include/kda/run.hpp).
struct SegmentStages {
  Status (*scan)(const stage::SegmentScan& args);
  Status (*merge)(const stage::SegmentMerge& args);
  Status (*correct)(const stage::SegmentCorrect& args) = nullptr;  ///< null: not in one pass
  stage::SegmentRows one_pass_rows = stage::SegmentRows::kAll;     ///< of M, B, states_in there
};

/// The stages of include/kda/stages.hpp, on buffers of the caller.
struct ChunkStages {
  Status (*chunk_intra)(const stage::ChunkIntra& args);
  Status (*recompute_w_u)(const stage::RecomputeWU& args);
  Status (*chunk_delta_h)(const stage::ChunkDeltaH& args);
  Status (*chunk_o)(const stage::ChunkO& args);
  StageSizes (*sizes)(const Plan& plan);
};

/// Spans of longer sequences (include/kda/span.hpp).
struct SpanStages {
  Status (*maps)(const stage::SpanMapsCall& args) = nullptr;  ///< null where there are phases
  Status (*fold)(const StateFold& fold) = nullptr;            ///< null: another row of the device
  // Null where there are no phases.
  Status (*begin)(const stage::SpanMapsCall& args) = nullptr;
  Status (*finish)(const stage::SpanFinish& args) = nullptr;
};

struct ForwardRow {
  Head head;
  Status (*forward)(const stage::Forward& args);
  std::optional<SegmentStages> segments;
  std::optional<ChunkStages> chunk_stages;
  std::optional<SpanStages> spans = {};
  /// Fills the plan's block checkpoint_places from checkpoint_offsets; null: run() does, on the
  /// host.
  Status (*place_checkpoints)(const stage::Call& call, int32_t* places) = nullptr;
};

/// A forward with a tail, around a forward without one that a row of the same device computes.
struct TailForward {
  /// Empty if it serves the problem, else why not.
  std::string (*decline)(const Request& request);
  /// The problem of the forward inside, whose lengths only the device knows.
  Problem (*inner)(const Problem& problem);
  /// Adds its part to a plan, which has `inner` and nothing else yet.
  void (*plan)(plan::PlanBuilder& builder, const Plan& inner);
  /// Calls `forward` for the plan's `inner`, once or more.
  Status (*run)(const stage::Call& call,
                const std::function<Status(const stage::Call& inner)>& forward);
};

struct DecodeRow {
  Head head;
  Status (*decode)(const stage::Decode& args);
  const TailForward* tail_forward = nullptr;  ///< null: rows of forwards have tails, or nobody
};

struct BackwardRow {
  Head head;
  Status (*backward)(const stage::Backward& args);
  // A backward of spans in two phases; null: there are none.
  std::string (*decline_phases)(const Plan& plan) = nullptr;  ///< empty, or why this plan has none
  Status (*begin)(const stage::SpanBackwardBegin& args) = nullptr;
  Status (*finish)(const stage::Backward& args) = nullptr;
};

/// The operations around KDA in its layer, which have no plan: one row a device. Calls are checked
/// before (run/check_layer.hpp).
struct LayerRow {
  DeviceKind device;
  const char* (*unavailable)() noexcept;  ///< as in Head
  Status (*short_conv)(const ShortConv& call);
  Status (*short_conv_backward)(const ShortConv& call, const ShortConvGradients& gradients);
  Status (*gated_rms_norm)(const GatedRmsNorm& call);
  Status (*gated_rms_norm_backward)(const GatedRmsNorm& call,
                                    const GatedRmsNormGradients& gradients);
  Status (*fused_decode)(const FusedDecode& call) = nullptr;  ///< null: not in one kernel
  /// Bytes that a backward needs; null: none.
  std::size_t (*short_conv_workspace)(const ShortConv& call) noexcept = nullptr;
  std::size_t (*gated_rms_norm_workspace)(const GatedRmsNorm& call) noexcept = nullptr;
  /// Null: memory of the host.
  struct Checks {
    Status (*call)(void* stream);
    Status (*pointer)(const char* name, const void* pointer);
  };
  const Checks* device_checks = nullptr;
};

/// Null: there is no such device.
const LayerRow* layer_row(DeviceKind device) noexcept;

/// The rows of each operation, best first, the reference last.
std::span<const ForwardRow* const> forward_rows() noexcept;
std::span<const DecodeRow* const> decode_rows() noexcept;
std::span<const BackwardRow* const> backward_rows() noexcept;

inline constexpr Operation kOperations[] = {Operation::kForward, Operation::kDecode};

/// How a device has forwards with a tail; null: rows of forwards have tails themselves, or nobody.
const TailForward* tail_forward(DeviceKind device) noexcept;

/// The heads of an operation's rows, in the order of its list.
std::span<const Head* const> heads(Operation operation) noexcept;
std::span<const Head* const> backward_heads() noexcept;

/// Null: there is none of this name.
template <class Row>
const Row* find_row(std::span<const Row* const> rows, std::string_view name) {
  for (const Row* row : rows)
    if (name == row->head.name) return row;
  return nullptr;
}

}  // namespace kda::registry
