// SPDX-License-Identifier: Apache-2.0
// Rows of the blocked backend: the same stages over three kernel tables.
#include "cpu/blocked/backward_kernels.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/plan.hpp"
#include "plan/ledger.hpp"

namespace kda::cpu::blocked {
namespace {

using KernelsFn = const Kernels* (*)() noexcept;
using SupportFn = bool (*)() noexcept;

bool always() noexcept { return true; }

template <KernelsFn kKernels, SupportFn kSupported>
const char* unavailable() noexcept {
  if (!kKernels()) return "not built for this processor family";
  return kSupported() ? nullptr : "this CPU lacks the instruction set";
}

template <KernelsFn kKernels>
Status forward_with(const stage::Forward& args) {
  if (args.call.problem.tail) return tail_call(*kKernels(), args.call);
  return forward(*kKernels(), args);
}
template <KernelsFn kKernels>
Status decode_with(const stage::Decode& args) {
  if (args.call.problem.tail) return tail_call(*kKernels(), args.call);
  return decode(*kKernels(), args);
}
template <KernelsFn kKernels>
Status segment_scan_with(const stage::SegmentScan& args) {
  return segment_scan(*kKernels(), args);
}
template <KernelsFn kKernels>
Status segment_merge_with(const stage::SegmentMerge& args) {
  return segment_merge(*kKernels(), args);
}
template <KernelsFn kKernels>
Status segment_correct_with(const stage::SegmentCorrect& args) {
  return segment_correct(*kKernels(), args);
}

template <KernelsFn kKernels>
Status span_maps_with(const stage::SpanMapsCall& args) {
  return span_maps(*kKernels(), args);
}
template <KernelsFn kKernels>
Status fold_states_with(const StateFold& fold) {
  return fold_states(*kKernels(), fold);
}

template <KernelsFn kKernels>
Status backward_with(const stage::Backward& args) {
  return backward(*kKernels(), args);
}

void plan_tail(plan::PlanBuilder& builder) {
  cpu::list_tail(builder);
  builder.book(plan::block::kThreadScratch, 1,
               tail_scratch_bytes(builder.problem(), builder.plan().num_threads));
  cpu::book_slot_marks(builder);
}

void plan_forward(plan::PlanBuilder& builder) {
  if (builder.problem().tail) return plan_tail(builder);
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  builder.cut({.automatic = cpu::never_cut});
  builder.join(p.checkpoints                ? "checkpoints need the true start state"
               : plan::kept_every(plan) > 0 ? "kept states need the true start state"
                                            : "");
  plan::note_one_intra_form(builder);
  const bool one_pass = plan.segmented && plan.resolved.segment_method == SegmentMethod::kOnePass;
  const auto segments = static_cast<int64_t>(plan.segments.size());
  if (one_pass) {
    builder.stage("segment_scan", 2 * segments * p.num_value_heads,
                  "B with outputs from zero, and M with its outputs");
    builder.stage("segment_merge", p.num_sequences * p.num_value_heads, "start states, in order");
    builder.stage("segment_correct", segments * p.num_value_heads, "o += Qt S_in");
  } else {
    plan.segmented ? plan::list_scan_merge_forward(builder) : plan::list_forward(builder);
  }
  builder.book(plan::block::kThreadScratch, 1, scratch_bytes(p, plan.num_threads));
  cpu::book_slot_marks(builder);
  plan::save_states(builder);
  if (!plan.segmented) return;
  plan::book_segments(builder, plan.segments.size());
  if (!one_pass) return;
  stage::DimValues dims = stage::dims_of(p);
  builder.book(stage::kOutputFromZero.name, dims.tokens,
               stage::entry_bytes(stage::kOutputFromZero, dims));
  builder.book(stage::kTransitionOutput.name, dims.tokens,
               stage::entry_bytes(stage::kTransitionOutput, dims));
  builder.book(stage::kExitToken.name, plan.segments.size(),
               stage::entry_bytes(stage::kExitToken, dims));
}

void plan_decode(plan::PlanBuilder& builder) {
  if (builder.problem().tail) return plan_tail(builder);
  plan::list_decode(builder);
  builder.book(plan::block::kThreadScratch, 1,
               scratch_bytes(builder.problem(), builder.plan().num_threads));
  cpu::book_slot_marks(builder);
}

void plan_backward(plan::PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  builder.stage("backward", std::min(plan.problem.num_sequences, kMaxRuns) * plan.problem.num_heads,
                "one (run of sequences, q/k head) a task, its value heads in order");
  builder.book(plan::block::kThreadScratch, 1,
               backward_scratch_bytes(plan, plan::kept_every(plan)));
  plan::save_states(builder);
}

template <KernelsFn kKernels, SupportFn kSupported>
constexpr registry::Head head_of(const char* name, void (*plan)(plan::PlanBuilder&),
                                 int64_t chunk = kChunk) {
  return {.name = name,
          .device = DeviceKind::kCpu,
          .chunk_size = chunk,
          .unavailable = unavailable<kKernels, kSupported>,
          .plan = plan,
          .keeps_states = true,
          .decline_tail = serves_every_tail};
}

template <KernelsFn kKernels, SupportFn kSupported>
constexpr registry::ForwardRow forward_row(const char* name) {
  return {.head = head_of<kKernels, kSupported>(name, plan_forward),
          .forward = forward_with<kKernels>,
          .segments = registry::SegmentStages{.scan = segment_scan_with<kKernels>,
                                              .merge = segment_merge_with<kKernels>,
                                              .correct = segment_correct_with<kKernels>},
          .chunk_stages = {},
          .spans = registry::SpanStages{.maps = span_maps_with<kKernels>,
                                        .fold = fold_states_with<kKernels>}};
}

template <KernelsFn kKernels, SupportFn kSupported>
constexpr registry::DecodeRow decode_row(const char* name) {
  return {.head = head_of<kKernels, kSupported>(name, plan_decode),
          .decode = decode_with<kKernels>};
}

template <KernelsFn kKernels, SupportFn kSupported>
constexpr registry::BackwardRow backward_row(const char* name) {
  return {.head = head_of<kKernels, kSupported>(name, plan_backward, kBackwardChunk),
          .backward = backward_with<kKernels>};
}

}  // namespace

const registry::ForwardRow kAvx512Forward =
    forward_row<avx512_kernels, cpu_has_avx512>("cpu.blocked.avx512");
const registry::ForwardRow kAvx2Forward =
    forward_row<avx2_kernels, cpu_has_avx2>("cpu.blocked.avx2");
const registry::ForwardRow kPortableForward =
    forward_row<portable_kernels, always>("cpu.blocked.portable");
const registry::DecodeRow kAvx512Decode =
    decode_row<avx512_kernels, cpu_has_avx512>("cpu.blocked.avx512");
const registry::DecodeRow kAvx2Decode = decode_row<avx2_kernels, cpu_has_avx2>("cpu.blocked.avx2");
const registry::DecodeRow kPortableDecode =
    decode_row<portable_kernels, always>("cpu.blocked.portable");
const registry::BackwardRow kAvx512Backward =
    backward_row<avx512_kernels, cpu_has_avx512>("cpu.blocked.avx512");
const registry::BackwardRow kAvx2Backward =
    backward_row<avx2_kernels, cpu_has_avx2>("cpu.blocked.avx2");
const registry::BackwardRow kPortableBackward =
    backward_row<portable_kernels, always>("cpu.blocked.portable");

const Kernels& best_kernels() noexcept {
  if (avx512_kernels() && cpu_has_avx512()) return *avx512_kernels();
  if (avx2_kernels() && cpu_has_avx2()) return *avx2_kernels();
  return *portable_kernels();
}

}  // namespace kda::cpu::blocked
