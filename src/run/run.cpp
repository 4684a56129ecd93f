// SPDX-License-Identifier: Apache-2.0
// run() and the stage calls: checks, then the stages of the plan's row.
#include "run/run_rows.hpp"

#include <cstring>
#include <tuple>
#include <type_traits>

#include "core/guard.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "plan/builder.hpp"
#include "plan/ledger.hpp"
#include "run/check_tensors.hpp"
#include "stage/buffers.hpp"

namespace kda {
namespace {

using registry::DecodeRow;
using registry::ForwardRow;
using registry::Head;

template <class T>
T* block_of(const stage::Call& call, const stage::BufferSpec& spec) {
  return static_cast<T*>(plan::find_block(*call.plan, call.workspace, spec.name));
}

/// Everything that can be checked before a row of the plan's implementation is called.
Status check_call(const Head& head, const Plan& plan, const Tensors& tensors,
                  const stage::Sequences& sequences, void* workspace, std::size_t workspace_bytes,
                  void* stream, const GradientCheck* backward) {
  if (const char* reason = head.unavailable())
    return Status(StatusCode::kUnavailable, cat("plan: ", head.name, " cannot run here: ", reason));
  KDA_RETURN_IF_ERROR(check_workspace(plan, workspace, workspace_bytes));
  KDA_RETURN_IF_ERROR(check_saved(plan, tensors, workspace));
  const registry::DeviceChecks* checks = head.device_checks;
  if (checks) KDA_RETURN_IF_ERROR(checks->call(plan, tensors.trusted, workspace, stream));
  return check_tensors(plan, tensors, sequences, workspace, checks, backward);
}

/// Arguments of a caller beside the plan.
struct Given {
  const Tensors& tensors;
  void* workspace;
  std::size_t workspace_bytes;
  void* stream;
  const GradientCheck* backward;
};

/// Checks everything that can be checked, then calls body(context, call). `head`: of the plan's
/// row.
Status call_on(const Head* head, const Plan& plan, const Given& given,
               Status (*body)(void* context, const stage::Call& call), void* context) noexcept {
  return guarded([&] {
    if (!head)
      return Status(StatusCode::kUnsupported,
                    cat("plan: no implementation of this build runs on ", plan.device.name));
    // Device memory is not looked at from here.
    const stage::Sequences sequences(plan.problem, plan.cu_seqlens,
                                     head->device_checks ? nullptr : given.tensors.cu_seqlens);
    KDA_RETURN_IF_ERROR(check_call(*head, plan, given.tensors, sequences, given.workspace,
                                   given.workspace_bytes, given.stream, given.backward));
    return body(context, {plan.problem, given.tensors, sequences, plan.num_threads,
                          plan::find_block(plan, given.workspace, plan::block::kThreadScratch),
                          &plan, given.workspace, given.stream});
  });
}

void place_checkpoints(const stage::Call& call, int32_t* places) {
  const Problem& p = call.problem;
  for (int64_t n = 0; n < p.num_sequences; ++n) {
    const int64_t count = num_checkpoints(p, call.sequences.length(n));
    const int64_t due = call.tensors.checkpoint_offsets[n] / p.checkpoint_every - 1;
    for (int64_t i = 0; i < count; ++i)
      *places++ = i == due ? call.tensors.checkpoint_indices[n] : -1;
  }
}

/// Calls body(call). With checkpoint_offsets it sees checkpoint_indices as without them: one every
/// checkpoint_every tokens, of which most are none.
template <class Body>
Status with_checkpoints(const ForwardRow& row, const stage::Call& call, Body&& body) {
  if (!call.problem.checkpoint_offsets || row.head.takes_offsets) return body(call);
  auto* places = static_cast<int32_t*>(
      plan::find_block(*call.plan, call.workspace, plan::block::kCheckpointPlaces));
  if (places && row.place_checkpoints) {
    KDA_RETURN_IF_ERROR(row.place_checkpoints(call, places));
  } else if (places) {
    place_checkpoints(call, places);
  }
  Tensors tensors = call.tensors;
  tensors.checkpoint_indices = places;
  return body({call.problem, tensors, call.sequences, call.num_threads, call.scratch, call.plan,
               call.workspace, call.stream});
}

/// Finds the plan's row, and calls body(row, call) once all is checked.
template <class Row, class Body>
Status checked_call(std::span<const Row* const> rows, const Plan& plan, const Tensors& tensors,
                    void* workspace, std::size_t workspace_bytes, void* stream, Body&& body,
                    const GradientCheck* backward = nullptr) noexcept {
  const Row* row = registry::find_row(rows, plan.implementation);
  auto run = [&](const stage::Call& call) -> Status {
    if constexpr (std::is_same_v<Row, ForwardRow>)
      return with_checkpoints(*row, call, [&](const stage::Call& c) { return body(*row, c); });
    else
      return body(*row, call);
  };
  return call_on(
      row ? &row->head : nullptr, plan, {tensors, workspace, workspace_bytes, stream, backward},
      [](void* context, const stage::Call& call) {
        return (*static_cast<decltype(run)*>(context))(call);
      },
      &run);
}

void* saved_block(const Plan& plan, const Tensors& tensors, const char* name) {
  return tensors.saved ? plan::find_block(plan.saved, tensors.saved, name) : nullptr;
}

stage::Forward with_kept(stage::Forward args) {
  args.kept_every_states =
      static_cast<float*>(saved_block(*args.call.plan, args.call.tensors, stage::kKeptStates));
  args.kept_every = plan::kept_every(*args.call.plan);
  return args;
}

/// Zeros in rows of `written` that belong to no sequence, where only the device knows of them, or
/// to one without a slot.
Status zero_rows(const Head& head, const stage::Call& call,
                 std::initializer_list<registry::WrittenRows> written) {
  const bool may_end_early = call.problem.cu_seqlens && !call.plan->lengths_known;
  if (!head.device_checks || !(may_end_early || zeroes_without_slot(call.problem))) return {};
  return head.device_checks->zero_rows(call, {written.begin(), written.size()});
}

/// Zeros in o of sequences without a slot, in memory of the host.
void zero_without_slot(const stage::Call& call) {
  const Problem& p = call.problem;
  const int64_t size = dtype_size(p.o.dtype);
  for (int64_t n = 0; n < p.num_sequences; ++n) {
    if (state_slot(p, *p.initial_state, call.tensors.initial_state_indices, n) >= 0) continue;
    for (int64_t token = call.sequences.begin(n); token < call.sequences.end(n); ++token)
      for (int64_t head = 0; head < p.num_value_heads; ++head)
        std::memset(static_cast<char*>(call.tensors.o) + row_offset(p, p.o, token, head) * size, 0,
                    static_cast<std::size_t>(p.value_dim * size));
  }
}

Status zero_outputs(const Head& head, const stage::Call& call) {
  const Problem& p = call.problem;
  if (!head.device_checks && zeroes_without_slot(p)) zero_without_slot(call);
  return zero_rows(head, call, {{p.o, call.tensors.o, p.num_value_heads, p.value_dim}});
}

Status zero_gradients(const Head& head, const stage::Backward& b) {
  const Problem& p = b.call.problem;
  const Gradients& g = b.gradients;
  const GradientTensors& t = b.tensors;
  const TensorDesc none;
  const auto rows = [&](const std::optional<TensorDesc>& desc, void* data, const Shape& shape) {
    return registry::WrittenRows{desc ? *desc : none, desc ? data : nullptr, shape[2], shape[3]};
  };
  const bool sum = g.dg && is_a_head(p, *g.dg);
  return zero_rows(
      head, b.call,
      {rows(g.dq, t.dq, qk_shape(p)), rows(g.dk, t.dk, qk_shape(p)), rows(g.dv, t.dv, v_shape(p)),
       rows(g.dg, t.dg, sum ? beta_shape(p) : g_shape(p)), rows(g.dbeta, t.dbeta, beta_shape(p))});
}

/// Says in what was kept, where the host can write there, which plan has kept it.
Status mark_kept(const Head& head, const Plan& plan, const Tensors& tensors) {
  void* mark = saved_block(plan, tensors, stage::kKeptMark);
  if (head.device_checks || !mark) return {};
  const uint64_t id = plan_id(plan);
  std::memcpy(mark, &id, sizeof(id));
  return {};
}

Status check_mark(const BackwardPlan& plan, const Tensors& tensors) {
  const void* mark = saved_block(plan.plan, tensors, stage::kKeptMark);
  if (mark && std::memcmp(mark, &plan.forward_id, sizeof(plan.forward_id)) != 0)
    return invalid("saved: was not written by a run of the forward that this plan is for");
  return {};
}

Status run_scan_merge_forward(const ForwardRow& row, const stage::Call& call) {
  const auto& segments = call.plan->segments;
  auto* M = block_of<float>(call, stage::kSegmentM);
  auto* B = block_of<float>(call, stage::kSegmentB);
  auto* states = block_of<float>(call, stage::kSegmentStates);
  KDA_RETURN_IF_ERROR(
      row.segments->scan({.call = call, .segments = segments, .M = M, .B = B, .skip_last = true}));
  KDA_RETURN_IF_ERROR(row.segments->merge(
      {.call = call, .segments = segments, .M = M, .B = B, .states_in = states, .prepared = true}));
  return row.forward(with_kept({call, segments, states, /*prepared=*/true}));
}

Status run_one_pass(const ForwardRow& row, const stage::Call& call) {
  const auto& segments = call.plan->segments;
  auto* M = block_of<float>(call, stage::kSegmentM);
  auto* B = block_of<float>(call, stage::kSegmentB);
  auto* states = block_of<float>(call, stage::kSegmentStates);
  auto* o_zero = block_of<float>(call, stage::kOutputFromZero);
  auto* Qt = block_of<void>(call, stage::kTransitionOutput);
  auto* exit_token = block_of<int64_t>(call, stage::kExitToken);
  const stage::SegmentRows rows = row.segments->one_pass_rows;
  KDA_RETURN_IF_ERROR(row.segments->scan({.call = call,
                                          .segments = segments,
                                          .M = M,
                                          .B = B,
                                          .rows = rows,
                                          .o_zero = o_zero,
                                          .Qt = Qt,
                                          .exit_token = exit_token}));
  KDA_RETURN_IF_ERROR(row.segments->merge(
      {.call = call, .segments = segments, .M = M, .B = B, .states_in = states, .rows = rows}));
  return row.segments->correct({.call = call,
                                .segments = segments,
                                .M = M,
                                .B = B,
                                .states_in = states,
                                .rows = rows,
                                .o_zero = o_zero,
                                .Qt = Qt,
                                .exit_token = exit_token});
}

Status check_maps(const Problem& p, const SpanMaps& maps) {
  if (!maps.M && !maps.B) return invalid("M: pointer is null, and so is that of B");
  if (!maps.D) return {};
  if (!maps.M) return invalid("M: pointer is null, and D needs M");
  if (!maps.d_o && p.batch * p.num_tokens > 0) return invalid("d_o: pointer is null");
  const DType type = maps.d_o_dtype;
  if (type != DType::kFloat32 && type != DType::kBFloat16 && type != DType::kFloat16)
    return invalid("d_o: dtype ", dtype_name(type), " is not fp32, bf16 or fp16");
  return {};
}

Status run_forward(const ForwardRow& row, const stage::Call& call);

/// A forward around one without a tail.
Status run_tail_forward(const ForwardRow& row, const stage::Call& call) {
  const registry::TailForward* tail = registry::tail_forward(row.head.device);
  return tail->run(call, [&](const stage::Call& inner) {
    KDA_RETURN_IF_ERROR(run_forward(row, inner));
    return zero_outputs(row.head, inner);
  });
}

Status run_forward(const ForwardRow& row, const stage::Call& call) {
  if (call.plan->device_cut.on)
    return row.segments->correct ? run_one_pass(row, call) : run_scan_merge_forward(row, call);
  if (!call.plan->segmented) return row.forward(with_kept({call, {}, nullptr}));
  return call.plan->resolved.segment_method == SegmentMethod::kOnePass
             ? run_one_pass(row, call)
             : run_scan_merge_forward(row, call);
}

Status check_segments(const Plan& plan, const ForwardRow& row, const SegmentTensors& segments,
                      bool needs_scan, bool needs_states) {
  if (!plan.segmented || !row.segments) return invalid("plan: is not segmented");
  for (const auto& [name, pointer, needed] :
       {std::tuple{"M", segments.M, needs_scan}, std::tuple{"B", segments.B, needs_scan},
        std::tuple{"states_in", segments.states_in, needs_states}}) {
    if (!needed) continue;
    if (!pointer) return invalid(name, ": pointer is null");
    if (row.head.device_checks) KDA_RETURN_IF_ERROR(row.head.device_checks->pointer(name, pointer));
  }
  return {};
}

}  // namespace

namespace run_rows {

Status forward(std::span<const ForwardRow* const> rows, const Plan& plan, const Tensors& tensors,
               void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(rows, plan, tensors, workspace, workspace_bytes, stream,
                      [&](const ForwardRow& row, const stage::Call& call) {
                        if (plan.inner) return run_tail_forward(row, call);
                        KDA_RETURN_IF_ERROR(run_forward(row, call));
                        KDA_RETURN_IF_ERROR(zero_outputs(row.head, call));
                        return mark_kept(row.head, plan, tensors);
                      });
}

Status decode(std::span<const DecodeRow* const> rows, const Plan& plan, const Tensors& tensors,
              void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(rows, plan, tensors, workspace, workspace_bytes, stream,
                      [&](const DecodeRow& row, const stage::Call& call) {
                        KDA_RETURN_IF_ERROR(row.decode({call}));
                        if (zeroes_skipped(call.problem))
                          return Status{};  // these rows with others
                        return zero_outputs(row.head, call);
                      });
}

}  // namespace run_rows

Status run(const Plan& plan, const Tensors& tensors, void* workspace, std::size_t workspace_bytes,
           void* stream) noexcept {
  switch (plan.problem.operation) {
    case Operation::kForward:
      return run_rows::forward(registry::forward_rows(), plan, tensors, workspace, workspace_bytes,
                               stream);
    case Operation::kDecode:
      return run_rows::decode(registry::decode_rows(), plan, tensors, workspace, workspace_bytes,
                              stream);
  }
  return guarded([] { return invalid("plan: its operation is unknown"); });
}

namespace {

/// Calls run(row, args) of a backward once all is checked.
template <class Run>
Status run_backward(const BackwardPlan& plan, const Tensors& tensors,
                    const GradientTensors& gradients, void* workspace, std::size_t workspace_bytes,
                    void* stream, Run&& run) noexcept {
  const GradientCheck check{plan.gradients, gradients};
  return checked_call(
      registry::backward_rows(), plan.plan, tensors, workspace, workspace_bytes, stream,
      [&](const registry::BackwardRow& row, const stage::Call& call) {
        if (!row.head.device_checks) KDA_RETURN_IF_ERROR(check_mark(plan, tensors));
        const auto* kept =
            static_cast<const float*>(saved_block(plan.plan, tensors, stage::kKeptStates));
        return run(row, {call, plan.gradients, gradients, kept, plan::kept_every(plan.plan)});
      },
      &check);
}

Status made_without_spans() {
  return guarded([] { return invalid("plan: was made without spans in its options"); });
}

}  // namespace

Status backward(const BackwardPlan& plan, const Tensors& tensors, const GradientTensors& gradients,
                void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_backward(plan, tensors, gradients, workspace, workspace_bytes, stream,
                      [](const registry::BackwardRow& row, const stage::Backward& args) {
                        KDA_RETURN_IF_ERROR(row.backward(args));
                        return zero_gradients(row.head, args);
                      });
}

Status span_backward_begin(const BackwardPlan& plan, const Tensors& tensors,
                           const GradientTensors& gradients, const SpanGradients& spans,
                           void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  if (!plan.plan.requested.spans) return made_without_spans();
  return run_backward(plan, tensors, gradients, workspace, workspace_bytes, stream,
                      [&](const registry::BackwardRow& row, const stage::Backward& args) {
                        if (row.head.device_checks)
                          KDA_RETURN_IF_ERROR(row.head.device_checks->pointer("D", spans.D));
                        return row.begin({args, spans});
                      });
}

Status span_backward_finish(const BackwardPlan& plan, const Tensors& tensors,
                            const GradientTensors& gradients, void* workspace,
                            std::size_t workspace_bytes, void* stream) noexcept {
  if (!plan.plan.requested.spans) return made_without_spans();
  return run_backward(plan, tensors, gradients, workspace, workspace_bytes, stream,
                      [](const registry::BackwardRow& row, const stage::Backward& args) {
                        return row.finish(args);
                      });
}

Status segment_scan(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                    void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(
      registry::forward_rows(), plan, tensors, workspace, workspace_bytes, stream,
      [&](const ForwardRow& row, const stage::Call& call) {
        KDA_RETURN_IF_ERROR(check_segments(plan, row, segments, true, false));
        return row.segments->scan(
            {.call = call, .segments = plan.segments, .M = segments.M, .B = segments.B});
      });
}

Status segment_merge(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(registry::forward_rows(), plan, tensors, workspace, workspace_bytes, stream,
                      [&](const ForwardRow& row, const stage::Call& call) {
                        KDA_RETURN_IF_ERROR(check_segments(plan, row, segments, true, true));
                        return row.segments->merge({.call = call,
                                                    .segments = plan.segments,
                                                    .M = segments.M,
                                                    .B = segments.B,
                                                    .states_in = segments.states_in});
                      });
}

Status segment_forward(const Plan& plan, const Tensors& tensors, const SegmentTensors& segments,
                       void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return checked_call(
      registry::forward_rows(), plan, tensors, workspace, workspace_bytes, stream,
      [&](const ForwardRow& row, const stage::Call& call) {
        KDA_RETURN_IF_ERROR(check_segments(plan, row, segments, false, true));
        KDA_RETURN_IF_ERROR(row.forward(with_kept({call, plan.segments, segments.states_in})));
        KDA_RETURN_IF_ERROR(zero_outputs(row.head, call));
        return mark_kept(row.head, plan, tensors);
      });
}

Status span_maps(const Plan& plan, const Tensors& tensors, const SpanMaps& maps, void* workspace,
                 std::size_t workspace_bytes) noexcept {
  if (plan.problem.operation != Operation::kForward)
    return guarded([] { return invalid("plan: is not of a forward"); });
  return checked_call(
      registry::forward_rows(), plan, tensors, workspace, workspace_bytes, nullptr,
      [&](const ForwardRow& row, const stage::Call& call) {
        if (plan.problem.tail) return invalid("plan: has a tail, and a tail has no maps");
        if (!row.spans || !row.spans->maps)
          return Status(StatusCode::kUnsupported,
                        cat("plan: ", row.head.name, " has no maps of spans (cpu.blocked has)"));
        KDA_RETURN_IF_ERROR(check_maps(plan.problem, maps));
        return row.spans->maps({call, maps});
      });
}

namespace {

/// One half of a forward of spans: `run` gets the row's stages.
template <class Run>
Status run_half(const Plan& plan, const Tensors& tensors, void* workspace,
                std::size_t workspace_bytes, void* stream, Run&& run) noexcept {
  if (!plan.requested.spans) return made_without_spans();
  return checked_call(
      registry::forward_rows(), plan, tensors, workspace, workspace_bytes, stream,
      [&](const ForwardRow& row, const stage::Call& call) { return run(row, call); });
}

Status check_device_buffer(const ForwardRow& row, const char* name, const void* pointer) {
  return row.head.device_checks ? row.head.device_checks->pointer(name, pointer) : Status{};
}

}  // namespace

Status span_begin(const Plan& plan, const Tensors& tensors, const SpanMaps& maps, void* workspace,
                  std::size_t workspace_bytes, void* stream) noexcept {
  return run_half(plan, tensors, workspace, workspace_bytes, stream,
                  [&](const ForwardRow& row, const stage::Call& call) {
                    if (maps.D) return invalid("D: is of a backward, and not made here");
                    KDA_RETURN_IF_ERROR(check_device_buffer(row, "M", maps.M));
                    KDA_RETURN_IF_ERROR(check_device_buffer(row, "B", maps.B));
                    return row.spans->begin({call, maps});
                  });
}

Status span_finish(const Plan& plan, const Tensors& tensors, const float* states_in,
                   void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_half(plan, tensors, workspace, workspace_bytes, stream,
                  [&](const ForwardRow& row, const stage::Call& call) {
                    if (!states_in) return invalid("states_in: pointer is null");
                    KDA_RETURN_IF_ERROR(check_device_buffer(row, "states_in", states_in));
                    return row.spans->finish({call, states_in});
                  });
}

namespace {

/// The buffers that a stage needs are not null; those that are given can be used.
Status check_buffers(const ForwardRow& row, stage::ChunkStage which, const StageTensors& buffers) {
  const stage::ChunkPointers pointers = stage::chunk_pointers(buffers);
  for (std::size_t i = 0; i < pointers.size(); ++i) {
    const stage::ChunkBuffer& buffer = stage::kChunkBuffers[i];
    const char* name = buffer.spec.name;
    if ((buffer.needed & which) && !pointers[i]) return invalid(name, ": pointer is null");
    if (row.head.device_checks)
      KDA_RETURN_IF_ERROR(row.head.device_checks->pointer(name, pointers[i]));
    if (reinterpret_cast<std::uintptr_t>(pointers[i]) % 16 != 0)
      return invalid(name, ": pointer is not aligned to 16 bytes");
  }
  return {};
}

/// `function`: the member of ChunkStages to call.
template <class Stage>
Status run_chunk_stage(Status (*registry::ChunkStages::*function)(const Stage&),
                       stage::ChunkStage which, const Plan& plan, const Tensors& tensors,
                       const StageTensors& buffers, void* workspace, std::size_t workspace_bytes,
                       void* stream) noexcept {
  return checked_call(
      registry::forward_rows(), plan, tensors, workspace, workspace_bytes, stream,
      [&](const ForwardRow& row, const stage::Call& call) {
        if (!row.chunk_stages)
          return Status(StatusCode::kUnsupported,
                        cat("plan: ", row.head.name, " has no chunk stages (backend staged has)"));
        KDA_RETURN_IF_ERROR(check_buffers(row, which, buffers));
        KDA_RETURN_IF_ERROR(((*row.chunk_stages).*function)(Stage{call, buffers}));
        return which == stage::kO ? zero_outputs(row.head, call) : Status{};
      });
}

}  // namespace

Status stage_sizes(const Plan& plan, StageSizes* sizes) noexcept {
  return guarded([&] {
    if (!sizes) return invalid("sizes: is null");
    const ForwardRow* row = registry::find_row(registry::forward_rows(), plan.implementation);
    if (!row || !row->chunk_stages)
      return Status(StatusCode::kUnsupported, cat("plan: '", plan.implementation,
                                                  "' has no chunk stages (backend staged has)"));
    *sizes = row->chunk_stages->sizes(plan);
    return Status{};
  });
}

Status chunk_intra(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                   void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(&registry::ChunkStages::chunk_intra, stage::kIntra, plan, tensors, stages,
                         workspace, workspace_bytes, stream);
}
Status recompute_w_u(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(&registry::ChunkStages::recompute_w_u, stage::kRecomputeWU, plan, tensors,
                         stages, workspace, workspace_bytes, stream);
}
Status chunk_delta_h(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(&registry::ChunkStages::chunk_delta_h, stage::kDeltaH, plan, tensors,
                         stages, workspace, workspace_bytes, stream);
}
Status chunk_o(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
               void* workspace, std::size_t workspace_bytes, void* stream) noexcept {
  return run_chunk_stage(&registry::ChunkStages::chunk_o, stage::kO, plan, tensors, stages,
                         workspace, workspace_bytes, stream);
}

}  // namespace kda
