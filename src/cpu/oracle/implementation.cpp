// SPDX-License-Identifier: Apache-2.0
// The oracle as registry rows: "--backend oracle". Slow, allocates, rounds once at the end.
#include "cpu/oracle/implementation.hpp"

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "cpu/oracle/backward.hpp"
#include "cpu/oracle/oracle.hpp"
#include "cpu/oracle/tail.hpp"
#include "cpu/plan.hpp"

namespace kda::cpu::oracle {
namespace {

const char* available() noexcept { return nullptr; }

std::vector<double> initial_state(const stage::Call& call, int64_t n, int64_t head) {
  const Problem& p = call.problem;
  if (!p.initial_state) return {};
  if (p.initial_state_mask && call.tensors.initial_state_mask[n] == 0) return {};
  const int64_t slot = state_slot(p, *p.initial_state, call.tensors.initial_state_indices, n);
  if (slot < 0) return {};
  return load_state(p, *p.initial_state, call.tensors.initial_state, slot, head);
}

void store_checkpoints(const stage::Call& call, int64_t n, int64_t head, const HeadResult& result) {
  const Problem& p = call.problem;
  int64_t index = 0;
  for (int64_t i = 0; i < n; ++i) index += num_checkpoints(p, call.sequences.length(i));
  const int64_t count = num_checkpoints(p, call.sequences.length(n));
  for (int64_t c = 0; c < count; ++c, ++index) {
    const int64_t token = (c + 1) * p.checkpoint_every - 1;
    const int64_t slot = state_slot(p, *p.checkpoints, call.tensors.checkpoint_indices, index);
    store_state(p, *p.checkpoints, call.tensors.checkpoints, slot, head,
                result.token_states.data() + token * p.key_dim * p.value_dim);
  }
}

void forward_head(const stage::Call& call, int64_t n, int64_t head) {
  const Problem& p = call.problem;
  const Span span{call.sequences.begin(n), call.sequences.end(n)};
  const HeadResult result = run_head(p, call.tensors, span, head, initial_state(call, n, head),
                                     p.checkpoints.has_value());
  store_outputs(call, span, head, result.o);
  if (p.checkpoints) store_checkpoints(call, n, head, result);
  if (p.final_state)
    store_state(p, *p.final_state, call.tensors.final_state,
                state_slot(p, *p.final_state, call.tensors.final_state_indices, n), head,
                result.state.data());
}

/// o is 0 where no token is computed, or left alone.
void skip_tokens(const stage::Call& call, Span span, int64_t head) {
  const auto count = static_cast<std::size_t>((span.end - span.begin) * call.problem.value_dim);
  if (zeroes_skipped(call.problem)) store_outputs(call, span, head, std::vector<double>(count));
}

/// A state a token, each of its parent's.
void decode_drafts(const stage::Call& call, int64_t n, int64_t head) {
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  const int64_t S = p.state_index_columns,
                column = p.num_accepted_tokens ? t.num_accepted_tokens[n] - 1 : 0;
  const Span span{call.sequences.begin(n), call.sequences.end(n)};
  const int64_t source = p.initial_state ? state_slot(p, *p.initial_state, t.initial_state_indices,
                                                      n * initial_columns(p) + column)
                                         : -1;
  if (p.initial_state && source < 0) return skip_tokens(call, span, head);
  const int64_t count = computed_tokens(p, t.token_parents, n, span.end - span.begin);
  const bool zero = source < 0 || (p.initial_state_mask && t.initial_state_mask[n] == 0);
  const std::vector<double> start =
      zero ? std::vector<double>{} : load_state(p, *p.initial_state, t.initial_state, source, head);
  const StateDesc& target = in_place(p) ? *p.initial_state : *p.final_state;
  void* const base = in_place(p) ? t.initial_state : t.final_state;
  const int32_t* slots = in_place(p) ? t.initial_state_indices : t.final_state_indices;
  std::vector<HeadResult> tokens;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = p.token_parents && i > 0 ? t.token_parents[n * S + i] : i - 1;
    const Span token{span.begin + i, span.begin + i + 1};
    tokens.push_back(run_head(p, t, token, head,
                              i == 0 ? start : tokens[static_cast<std::size_t>(parent)].state));
    store_outputs(call, token, head, tokens.back().o);
    store_state(p, target, base, state_slot(p, target, slots, n * S + i), head,
                tokens.back().state.data());
  }
  skip_tokens(call, {span.begin + count, span.end}, head);
}

/// In place, a state a sequence. With a final_state of its own, decode is forward.
void decode_head(const stage::Call& call, int64_t n, int64_t head) {
  const Problem& p = call.problem;
  if (p.state_index_columns > 1) return decode_drafts(call, n, head);
  if (p.final_state) return forward_head(call, n, head);
  const int64_t source = state_slot(p, *p.initial_state, call.tensors.initial_state_indices, n);
  const Span span{call.sequences.begin(n), call.sequences.end(n)};
  if (source < 0) return skip_tokens(call, span, head);
  const bool zero = p.initial_state_mask && call.tensors.initial_state_mask[n] == 0;
  if (span.begin == span.end && !zero) return;
  const HeadResult result =
      run_head(p, call.tensors, span, head,
               zero ? std::vector<double>{}
                    : load_state(p, *p.initial_state, call.tensors.initial_state, source, head));
  store_outputs(call, span, head, result.o);
  store_state(p, *p.initial_state, call.tensors.initial_state, source, head, result.state.data());
}

Status forward(const stage::Forward& args) {
  if (args.call.problem.tail) return tail_call(args.call);
  for (int64_t n = 0; n < args.call.sequences.count(); ++n)
    for (int64_t head = 0; head < args.call.problem.num_value_heads; ++head)
      forward_head(args.call, n, head);
  return {};
}

Status decode(const stage::Decode& args) {
  if (args.call.problem.tail) return tail_call(args.call);
  for (int64_t n = 0; n < args.call.sequences.count(); ++n)
    for (int64_t head = 0; head < args.call.problem.num_value_heads; ++head)
      decode_head(args.call, n, head);
  return {};
}

/// The inverse of load_rows(); nothing where the gradient is not wanted.
void store_rows(const Problem& p, const std::optional<TensorDesc>& desc, void* base, Span span,
                int64_t head, const std::vector<double>& rows) {
  if (!desc || span.begin == span.end) return;
  const auto size = static_cast<int64_t>(rows.size()) / (span.end - span.begin);
  const double* value = rows.data();
  for (int64_t token = span.begin; token < span.end; ++token) {
    const int64_t at = row_offset(p, *desc, token, head);
    for (int64_t i = 0; i < size; ++i) store_double(base, desc->dtype, at + i, *value++);
  }
}

/// Sums of rows of `size`.
std::vector<double> row_sums(const std::vector<double>& rows, int64_t size) {
  std::vector<double> sums(rows.size() / static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < rows.size(); ++i) sums[i / static_cast<std::size_t>(size)] += rows[i];
  return sums;
}

void add(const std::vector<double>& from, std::vector<double>* to) {
  to->resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) (*to)[i] += from[i];
}

/// The gradients of one (sequence, q/k head); those of parameters are added to `dA_log` [HV] and
/// `ddt_bias` [HV][K].
void backward_group(const stage::Backward& args, int64_t n, int64_t q_head,
                    std::vector<double>* dA_log, std::vector<std::vector<double>>* ddt_bias) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const Gradients& g = args.gradients;
  const GradientTensors& t = args.tensors;
  const Span span{call.sequences.begin(n), call.sequences.end(n)};
  const bool sums_gates = g.dg && is_a_head(p, *g.dg);
  const auto states = [&](const TensorDesc& tensor) {
    return StateDesc{tensor, p.num_sequences, false};
  };
  std::vector<double> dq, dk;
  for (int64_t j = 0; j < group_size(p); ++j) {
    const int64_t head = value_head_of(p, q_head, j);
    const std::vector<double> start = initial_state(call, n, head);
    std::vector<double> d_o, d_final;
    if (g.d_o) d_o = load_rows(p, *g.d_o, t.d_o, span, head, p.value_dim);
    if (g.d_final_state)
      d_final = load_state(p, states(*g.d_final_state), t.d_final_state, n, head);
    const HeadGradients r = backward_head(p, call.tensors, span, head, start, d_o, d_final);
    add(r.dq.value, &dq);
    add(r.dk.value, &dk);
    store_rows(p, g.dv, t.dv, span, head, r.dv.value);
    store_rows(p, g.dg, t.dg, span, head,
               sums_gates ? row_sums(r.dg.value, p.key_dim) : r.dg.value);
    store_rows(p, g.dbeta, t.dbeta, span, head, r.dbeta.value);
    (*dA_log)[static_cast<std::size_t>(head)] += r.dA_log.value[0];
    add(r.ddt_bias.value, &(*ddt_bias)[static_cast<std::size_t>(head)]);
    if (!g.d_initial_state) continue;
    // A sequence that starts from no state has no gradient of one.
    const std::vector<double> none(start.empty() ? r.d_initial_state.value.size() : 0);
    store_state(p, states(*g.d_initial_state), t.d_initial_state, n, head,
                start.empty() ? none.data() : r.d_initial_state.value.data());
  }
  store_rows(p, g.dq, t.dq, span, q_head, dq);
  store_rows(p, g.dk, t.dk, span, q_head, dk);
}

Status backward(const stage::Backward& args) {
  const Problem& p = args.call.problem;
  const auto heads = static_cast<std::size_t>(p.num_value_heads);
  std::vector<double> dA_log(heads);
  std::vector<std::vector<double>> ddt_bias(
      heads, std::vector<double>(static_cast<std::size_t>(p.key_dim)));
  for (int64_t n = 0; n < args.call.sequences.count(); ++n)
    for (int64_t q_head = 0; q_head < p.num_heads; ++q_head)
      backward_group(args, n, q_head, &dA_log, &ddt_bias);
  for (std::size_t head = 0; head < heads; ++head) {
    const auto j = static_cast<int64_t>(head);
    if (const auto& desc = args.gradients.dA_log)
      store_double(args.tensors.dA_log, desc->dtype, j * desc->strides[0], dA_log[head]);
    if (const auto& desc = args.gradients.ddt_bias) {
      const bool a_head = is_bias_a_head(p, *desc);
      const std::vector<double> row = a_head ? row_sums(ddt_bias[head], p.key_dim) : ddt_bias[head];
      for (std::size_t d = 0; d < row.size(); ++d)
        store_double(args.tensors.ddt_bias, desc->dtype,
                     j * desc->strides[0] + static_cast<int64_t>(d), row[d]);
    }
  }
  return {};
}

void drop_kept_states(plan::PlanBuilder& builder) {
  if (builder.requested().keep == KeepPolicy::kNothing) return;
  builder.set_keep(KeepPolicy::kNothing);
  builder.reason(cat("keep: ", builder.name(), " keeps nothing and makes the states again"));
}

void plan_forward(plan::PlanBuilder& builder) {
  if (builder.problem().tail) return plan_tail(builder);
  builder.cut({.automatic = never_cut});
  if (builder.plan().segmented) {
    builder.reason(cat(builder.name(), " has no segments: runs serially"));
    builder.drop_segments();
  }
  plan::note_one_intra_form(builder);
  drop_kept_states(builder);
  plan::list_forward(builder);
  book_slot_marks(builder);
}

void plan_backward(plan::PlanBuilder& builder) {
  const Problem& p = builder.problem();
  drop_kept_states(builder);
  builder.stage("backward", p.num_sequences * p.num_heads,
                "one (sequence, q/k head) after the other, its value heads in order");
}

void plan_decode(plan::PlanBuilder& builder) {
  if (builder.problem().tail) return plan_tail(builder);
  plan::list_decode(builder);
  book_slot_marks(builder);
}

constexpr registry::Head head_of(void (*plan)(plan::PlanBuilder&)) {
  return {.name = "cpu.oracle",
          .device = DeviceKind::kCpu,
          .chunk_size = 1,
          .unavailable = available,
          .plan = plan,
          .keeps_states = true,
          .float64 = true,
          .decline_tail = serves_every_tail};
}

}  // namespace

const registry::ForwardRow kForward = {
    .head = head_of(plan_forward), .forward = forward, .segments = {}, .chunk_stages = {}};
const registry::DecodeRow kDecode = {.head = head_of(plan_decode), .decode = decode};
const registry::BackwardRow kBackward = {.head = head_of(plan_backward), .backward = backward};

}  // namespace kda::cpu::oracle
