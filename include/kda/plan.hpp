// SPDX-License-Identifier: Apache-2.0
// Plan: how a Problem will be computed on a device, as a printable value. Made on the host from
// plain data: no device call, no allocation outside the returned value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kda/problem.hpp"
#include "kda/status.hpp"

namespace kda {

/// Facts that the planner may know of a device. Plain data, so that a plan for any device can be
/// made on any machine.
struct DeviceFacts {
  DeviceKind kind = DeviceKind::kCpu;
  std::string name = "cpu";
  int32_t compute_capability = 0;  ///< CUDA: 10 * major + minor
  int32_t num_sms = 132;           ///< unit count that the segment rules divide by; see cpu_facts()
  double memory_bytes_per_second = 0;  ///< CUDA: of a large copy, reads and writes together
  double gigahertz = 0;                ///< CUDA: clock of the multiprocessors under load
};

/// Facts of this machine's CPU. num_sms is 132 on every CPU: it only feeds the named segment
/// policies, whose partition must not depend on the machine.
DeviceFacts cpu_facts();
/// Facts that are assumed of a GPU with `num_sms` multiprocessors: clock and memory are those of a
/// card that is sold with that compute capability (90: an H200; of several the one whose number of
/// multiprocessors is nearest), memory by multiprocessors. The caller may set what it knows better.
DeviceFacts gpu_facts(int32_t num_sms, int32_t compute_capability = 90);
/// Facts of CUDA device `ordinal` of this machine; asks the driver once a device and remembers.
/// Clock and memory are what the driver says, where it says something else than gpu_facts().
/// kUnavailable, with the reason, where there is no such device, no driver, or no CUDA in this
/// build.
Status cuda_device_facts(int32_t ordinal, DeviceFacts* facts) noexcept;
/// Number of CUDA devices that cuda_device_facts() knows; 0 where there are none.
int32_t cuda_device_count() noexcept;

/// Rules that cut long sequences into segments. They fix the partition only: execution always
/// merges the exact transition M of every segment.
enum class SegmentPolicy : int32_t {
  kAuto = 0,  ///< by the cost model of the backend; never on the CPU
  kOff = 1,
  kFixed = 2,     ///< PlanOptions::num_segments for every sequence that has enough chunks
  kFlashKda = 3,  ///< FlashKDA's published rule
  kCula = 4,      ///< cuLA's published guards
};

/// How the segments are joined (docs/algorithm.md); both are exact. Segments of kAuto in
/// cuda.sm90.fused are joined in one pass.
enum class SegmentMethod : int32_t {
  kScanMergeForward = 0,  ///< scan M and B, merge start states, run every segment from its own
  kOnePass = 1,           ///< run once from zero with K extra columns, then o += Qt S_in
};

/// How chunk_intra of cuda.sm80.staged computes the 16 x 16 blocks on the diagonal; both are exact
/// for every gate and causal to the bit. Other backends have one form.
enum class IntraForm : int32_t {
  kAuto = 0,    ///< kTensor: faster at every shape measured (docs/design/staged.md)
  kTensor = 1,  ///< tensor cores, factors anchored at dyadic midpoints
  kToken = 2,   ///< token by token, exponents of pairs, in fp32
};

/// Data that a forward keeps for its backward (include/kda/backward.hpp), in Plan::saved.
enum class KeepPolicy : int32_t {
  /// But the inputs. States are made twice: on a CPU those of sequences of more than 4,096 tokens,
  /// on a GPU all of the tensor cores' backward, and of the fp32 one what is longer than a window.
  kNothing = 0,
  kStates = 1,  ///< the fp32 state after every kept_state_every tokens of a sequence; CPU alone
  /// States before chunks of 64 tokens and errors, in bf16; the backward has one pass less. GPUs of
  /// compute capability 9.0 do, for bf16 and K = V = 64 or 128. The CPU takes it as kStates.
  kChunks = 2,
};

inline constexpr int64_t kKeptStateEvery = 2048;   ///< default of PlanOptions::kept_state_every
inline constexpr int64_t kKeptStateMultiple = 64;  ///< which is a multiple of this

inline constexpr int64_t kMostCutBytes = int64_t{1} << 30;  ///< default of most_cut_bytes

struct PlanOptions {
  SegmentPolicy context_parallel = SegmentPolicy::kAuto;
  int64_t num_segments = 0;  ///< for kFixed
  SegmentMethod segment_method = SegmentMethod::kScanMergeForward;
  IntraForm intra_form = IntraForm::kAuto;
  std::string backend;      ///< empty: best available; else a name or part of it ("blocked.avx2")
  int32_t num_threads = 0;  ///< CPU; 0: OMP_NUM_THREADS, else the cores of this process
  KeepPolicy keep = KeepPolicy::kNothing;  ///< forward only
  /// Tokens; 0: kKeptStateEvery. Set it on the forward: its backward takes it over,
  /// and on a GPU works in windows of at most so many.
  int64_t kept_state_every = 0;
  /// A forward on a GPU in two phases: the states before its sequences come between span_begin()
  /// and span_finish() (include/kda/span.hpp). The problem has no initial states. A backward
  /// likewise: the gradients of its final states come between span_backward_begin() and
  /// span_backward_finish(); the forward's plan is made without this.
  bool spans = false;
  /// Bytes that segments may take in the workspace of a plan from bounds, on top of a run of whole
  /// sequences; with more such a plan never cuts. It depends on tokens and heads, never on lengths.
  /// A plan from lengths needs no such limit: it books what its cut takes. A backward has that of
  /// its forward.
  int64_t most_cut_bytes = kMostCutBytes;
};

/// Tokens [begin, end) of a sequence, counted from the start of the flattened [B * T] tokens.
struct Segment {
  int64_t sequence = 0;
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const Segment&) const = default;
};

/// The cut of a plan from bounds: a kernel of the call makes it, from the lengths on the device. It
/// is the cut that a plan from these lengths has, and results have the same bits.
struct DeviceCut {
  bool on = false;          ///< false: sequences run whole, whatever their lengths
  int64_t most_behind = 0;  ///< segments behind the first ones of their sequences, of all sequences
  /// The cut where one sequence has all tokens, which the kernel need not search for: chunks of its
  /// first segment (0: as the others) and of the others (0: it stays whole, or is searched for).
  int64_t first_chunks = 0, segment_chunks = 0;
  bool early_exit = false;  ///< of that cut, where transitions fit
};

/// An implementation that was considered: chosen, or declined with a reason.
struct Candidate {
  std::string name;
  bool chosen = false;
  std::string reason;
};

/// One step of the execution and how it is spread over the device.
struct StagePlan {
  std::string name;
  int64_t num_tasks = 0;
  std::string what;
};

/// A kernel that a plan launches, in the order of the launches; a GPU's alone. Helpers that make
/// maps of sequences are not listed.
struct KernelChoice {
  std::string stage;   ///< of StagePlan; what several stages share is listed with each
  std::string kernel;  ///< as errors of launches name it
  std::string why;     ///< and not another one; empty: there is no other
};

/// A named piece of the caller's workspace, or of the memory that it keeps (Plan::saved).
struct WorkspaceBlock {
  std::string name;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

/// Predicted times in microseconds, for CUDA devices (constants: cost.hpp of each backend).
struct CostEstimate {
  double roofline_us = 0;
  double serial_us = 0;     ///< in stages, uncut
  double segmented_us = 0;  ///< of the chosen partition; 0 when there is none
  double fused_us = 0;      ///< of cuda.sm90.fused, uncut, where the plan is its own
};

struct Plan {
  Problem problem;
  PlanOptions requested;  ///< the options as the caller gave them
  /// The options in effect: backend is the implementation, num_threads is counted, context_parallel
  /// is kOff where nothing is cut, segment_method and intra_form are those that run.
  PlanOptions resolved;
  DeviceFacts device;

  std::string implementation;  ///< empty: nothing in this build can run the plan
  std::vector<Candidate> candidates;

  bool lengths_known = false;
  std::vector<int64_t> cu_seqlens;  ///< [N + 1] when lengths_known, over the flattened tokens

  int64_t chunk_size = 0;
  /// [N + 1] when lengths_known: the chunks of sequence n are [chunk_offsets[n],
  /// chunk_offsets[n+1]) of the batch; every sequence is chunked from its own start.
  std::vector<int64_t> chunk_offsets;
  int64_t num_v_splits = 1;
  int32_t num_threads = 1;

  bool segmented = false;
  int64_t segment_chunks = 0;  ///< longest segment, in chunks of the policy
  /// One pass on a GPU: transitions come after all else and stop where |M|_F <= 2^-20, as they may
  /// where that norm never grows (docs/algorithm.md).
  bool early_exit = false;
  std::vector<Segment> segments;  ///< all of them when segmented, in order
  /// [N + 1] when segmented: segments before each sequence.
  std::vector<int64_t> segment_offsets;
  DeviceCut device_cut;              ///< of a plan from bounds
  std::vector<std::string> reasons;  ///< why the schedule is what it is, one sentence each

  CostEstimate cost;
  std::vector<StagePlan> stages;
  std::vector<KernelChoice> kernels;  ///< on a GPU
  std::vector<WorkspaceBlock> workspace;
  std::size_t workspace_bytes = 0;
  /// Blocks that a run() writes for a later call (Tensors::saved). The caller owns this memory and
  /// keeps it until that call. Only plans that were asked to save something have such blocks.
  std::vector<WorkspaceBlock> saved;
  std::size_t saved_bytes = 0;
  /// A forward with a tail on a GPU: the forward of what comes to lie in front of the boundaries.
  std::shared_ptr<const Plan> inner;

  std::string to_text(bool explain = false) const;
  std::string to_json() const;
};

inline constexpr std::size_t kWorkspaceAlignment = 64;

/// Plans with host lengths: `cu_seqlens` has N + 1 entries, or is empty when the problem has none
/// (every sequence then has T tokens). Fails on anything validate() refuses and on bad lengths.
Status make_plan(const Problem& problem, std::span<const int64_t> cu_seqlens,
                 const DeviceFacts& device, const PlanOptions& options, Plan* plan) noexcept;

/// Plans from the bounds (T, N) alone; run() then reads Tensors::cu_seqlens. Never
/// segmented by the plan; Plan::device_cut says whether a kernel cuts.
Status make_plan_from_bounds(const Problem& problem, const DeviceFacts& device,
                             const PlanOptions& options, Plan* plan) noexcept;

/// Ok if some implementation of this build serves `problem` on `device`; otherwise why not. It
/// reads backend, keep and kept_state_every of `options`. Where no backend is asked for,
/// kUnsupported also says that keeping is slower than keeping nothing; a plan that is asked to keep
/// does so all the same.
Status supported(const Problem& problem, const DeviceFacts& device,
                 const PlanOptions& options = {}) noexcept;

/// Every implementation known to this build, best first, with why it is unavailable here, if so.
std::vector<Candidate> implementations();

}  // namespace kda
