// SPDX-License-Identifier: Apache-2.0
#include "capi/structs.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/layout.hpp"

namespace kda::capi {

bool is_described(const kda_tensor& given) {
  return given.dtype != 0 || given.alignment != 0 ||
         std::any_of(given.strides, given.strides + 4, [](int64_t stride) { return stride != 0; });
}

namespace {

int64_t natural_alignment(const TensorDesc& desc, const Shape& shape, int rank) {
  int64_t alignment = kDefaultAlignment;
  for (int dim = 0; dim + 1 < rank; ++dim) {
    const auto d = static_cast<std::size_t>(dim);
    if (shape[d] <= 1) continue;
    // Reduced first: the strides have not been checked for overflow yet.
    while (alignment > 1 && desc.strides[d] % alignment * dtype_size(desc.dtype) % alignment != 0)
      alignment /= 2;
  }
  return alignment;
}

TensorDesc tensor_of(const kda_tensor& given, const Shape& shape, int rank) {
  TensorDesc desc;
  desc.dtype = static_cast<DType>(given.dtype);
  if (!is_described(given)) return desc;
  for (std::size_t i = 0; i < 4; ++i) desc.strides[i] = given.strides[i];
  desc.alignment = given.alignment;
  if (desc.alignment != 0) return desc;
  desc.alignment = natural_alignment(desc, shape, rank);
  // A planned pointer may be less aligned than its strides.
  while (desc.alignment > dtype_size(desc.dtype) &&
         reinterpret_cast<std::uintptr_t>(given.data) %
                 static_cast<std::uintptr_t>(desc.alignment) !=
             0)
    desc.alignment /= 2;
  return desc;
}

/// Whatever is given counts; the flags are for planning without data.
bool is_given(const kda_state& state) {
  return state.present || state.num_slots != 0 || state.tensor.data || state.indices;
}
bool is_given(const kda_tensor& parameter) { return parameter.data || parameter.strides[0] != 0; }
bool has_mask(const kda_problem& c) { return c.has_initial_state_mask || c.initial_state_mask; }
bool has_accepted(const kda_problem& c) {
  return c.has_num_accepted_tokens || c.num_accepted_tokens;
}
bool has_offsets(const kda_problem& c) { return c.has_checkpoint_offsets || c.checkpoint_offsets; }
bool has_parents(const kda_problem& c) { return c.has_token_parents || c.token_parents; }

std::optional<TailDesc> tail_of(const Problem& p, const kda_tail* given) {
  if (!given) return std::nullopt;
  const Shape states = state_shape(p, {.num_slots = given->num_slots});
  TailDesc tail;
  tail.num_slots = given->num_slots;
  tail.rows = given->rows;
  tail.k = tensor_of(given->k, tail_k_shape(p, tail), 4);
  tail.g = tensor_of(given->g, tail_g_shape(p, tail), 4);
  tail.v_new = tensor_of(given->v_new, tail_v_new_shape(p, tail), 4);
  tail.ring = given->ring != 0;
  tail.flush = given->has_flush || given->flush;
  if (!tail.ring) tail.folded = tensor_of(given->folded, tail_folded_shape(p, tail), 2);
  tail.sources = given->has_sources || given->sources;
  tail.accepted_columns = given->accepted_columns;
  tail.settle = given->settle != 0;
  if (!is_described(given->rest) && !given->rest.data) return tail;
  SplitDesc& split = tail.split.emplace();
  split.rest = tensor_of(given->rest, states, 4);
  split.v = tensor_of(given->v, tail_v_new_shape(p, tail), 4);
  split.beta = tensor_of(given->beta, tail_beta_shape(p, tail), 3);
  return tail;
}

std::optional<StateDesc> state_of(const Problem& p, const kda_state& given) {
  if (!is_given(given)) return std::nullopt;
  StateDesc desc;
  desc.num_slots = given.num_slots;
  desc.indexed = given.indexed || given.indices;
  desc.tensor = tensor_of(given.tensor, state_shape(p, desc), 4);
  return desc;
}

}  // namespace

Problem problem_of(const kda_problem& c) {
  Problem p;
  p.operation = static_cast<Operation>(c.operation);
  p.batch = c.batch;
  p.num_tokens = c.num_tokens;
  p.num_heads = c.num_heads;
  p.num_value_heads = c.num_value_heads;
  p.key_dim = c.key_dim;
  p.value_dim = c.value_dim;
  p.num_sequences = c.num_sequences;
  p.head_map = static_cast<HeadMap>(c.head_map);
  p.q = tensor_of(c.q, qk_shape(p), 4);
  p.k = tensor_of(c.k, qk_shape(p), 4);
  p.v = tensor_of(c.v, v_shape(p), 4);
  p.g = tensor_of(c.g, g_shape(p), 4);
  p.beta = tensor_of(c.beta, beta_shape(p), 3);
  p.o = tensor_of(c.o, v_shape(p), 4);
  p.gate_mode = static_cast<GateMode>(c.gate_mode);
  p.lower_bound = c.lower_bound;
  if (is_given(c.A_log)) p.A_log = tensor_of(c.A_log, {p.num_value_heads, 1, 1, 1}, 1);
  if (is_given(c.dt_bias)) p.dt_bias = tensor_of(c.dt_bias, bias_shape(p), 2);
  p.beta_mode = static_cast<BetaMode>(c.beta_mode);
  p.qk_l2norm = c.qk_l2norm != 0;
  if (c.has_scale || c.scale != 0) p.scale = c.scale;
  if (c.has_cu_seqlens || c.cu_seqlens) p.cu_seqlens = static_cast<DType>(c.cu_seqlens_dtype);
  p.state_layout = static_cast<StateLayout>(c.state_layout);
  p.initial_state = state_of(p, c.initial_state);
  p.initial_state_mask = has_mask(c);
  p.final_state = state_of(p, c.final_state);
  p.checkpoints = state_of(p, c.checkpoints);
  p.checkpoint_every = c.checkpoint_every;
  p.checkpoint_offsets = has_offsets(c);
  p.state_index_columns = c.state_index_columns == 0 ? 1 : c.state_index_columns;
  p.num_accepted_tokens = has_accepted(c);
  p.token_parents = has_parents(c);
  p.zero_skipped = c.zero_skipped != 0;
  p.first_slot = c.first_slot;
  p.tail = tail_of(p, c.tail);
  p.batch_invariant = c.batch_invariant != 0;
  return p;
}

Tensors tensors_of(const kda_problem& c) {
  Tensors t;
  t.q = c.q.data;
  t.k = c.k.data;
  t.v = c.v.data;
  t.g = c.g.data;
  t.beta = c.beta.data;
  t.o = c.o.data;
  t.A_log = c.A_log.data;
  t.dt_bias = c.dt_bias.data;
  t.cu_seqlens = c.cu_seqlens;
  t.initial_state = c.initial_state.tensor.data;
  t.initial_state_indices = c.initial_state.indices;
  t.initial_state_mask = c.initial_state_mask;
  t.num_accepted_tokens = c.num_accepted_tokens;
  t.token_parents = c.token_parents;
  t.final_state = c.final_state.tensor.data;
  t.final_state_indices = c.final_state.indices;
  t.checkpoints = c.checkpoints.tensor.data;
  t.checkpoint_indices = c.checkpoints.indices;
  t.checkpoint_offsets = c.checkpoint_offsets;
  if (c.tail)
    t.tail = {.k = c.tail->k.data,
              .g = c.tail->g.data,
              .v_new = c.tail->v_new.data,
              .folded = static_cast<int32_t*>(c.tail->folded.data),
              .positions = c.tail->positions,
              .sources = c.tail->sources,
              .accepted_rows = c.tail->accepted_rows,
              .rest = static_cast<int16_t*>(c.tail->rest.data),
              .v = c.tail->v.data,
              .beta = c.tail->beta.data,
              .flush = c.tail->flush};
  t.saved = c.saved;
  t.saved_bytes = c.saved_bytes;
  t.trusted = c.trusted != 0;
  return t;
}

Status read_problem(const kda_problem* given, GivenProblem* current) {
  kda_problem_init(current);
  KDA_RETURN_IF_ERROR(read_struct<kda_problem>(given, "problem", current));
  if (!current->tail) return {};
  const kda_tail* tail = current->tail;
  kda_tail_init(&current->own_tail);
  current->tail = &current->own_tail;
  KDA_RETURN_IF_ERROR(read_struct(tail, "tail", &current->own_tail));
  if (current->own_tail.accepted_rows && current->own_tail.accepted_columns == 0)
    return invalid("accepted_rows: given, but accepted_columns = 0");
  return {};
}

Status check_call(const Problem& planned, const kda_problem& c) {
  const auto unplanned = [](const char* name) {
    return invalid(name, ": given, but the plan was made without it");
  };
  const struct {
    const char* name;
    const char* indices;
    const kda_state& given;
    const std::optional<StateDesc>& state;
  } states[] = {{"initial_state", "initial_state_indices", c.initial_state, planned.initial_state},
                {"final_state", "final_state_indices", c.final_state, planned.final_state},
                {"checkpoints", "checkpoint_indices", c.checkpoints, planned.checkpoints}};
  for (const auto& row : states) {
    if (is_given(row.given) && !row.state) return unplanned(row.name);
    if (row.given.indices && !row.state->indexed) return unplanned(row.indices);
  }
  if (c.A_log.data && !planned.A_log) return unplanned("A_log");
  if (c.dt_bias.data && !planned.dt_bias) return unplanned("dt_bias");
  if (c.cu_seqlens && !planned.cu_seqlens) return unplanned("cu_seqlens");
  if (has_mask(c) && !planned.initial_state_mask) return unplanned("initial_state_mask");
  if (has_accepted(c) && !planned.num_accepted_tokens) return unplanned("num_accepted_tokens");
  if (has_offsets(c) && !planned.checkpoint_offsets) return unplanned("checkpoint_offsets");
  if (has_parents(c) && !planned.token_parents) return unplanned("token_parents");
  if (c.tail && !planned.tail) return unplanned("tail");
  if (c.tail && c.tail->rest.data && !planned.tail->split) return unplanned("tail.rest");
  if (c.tail && c.tail->sources && !planned.tail->sources) return unplanned("sources");
  if (c.tail && c.tail->accepted_rows && planned.tail->accepted_columns == 0)
    return unplanned("accepted_rows");
  if (c.tail && c.tail->flush && !planned.tail->flush) return unplanned("flush");
  return {};
}

Status read_call(const kda_plan* plan, const kda_problem* given, GivenProblem* current) {
  if (!plan) return invalid("plan: is null");
  KDA_RETURN_IF_ERROR(read_problem(given, current));
  return check_call(plan->plan->problem, *current);
}

namespace {

DeviceFacts gpu_of(const kda_plan_options& c) {
  DeviceFacts device = gpu_facts(c.num_sms == 0 ? 132 : c.num_sms,
                                 c.compute_capability == 0 ? 90 : c.compute_capability);
  if (c.memory_bytes_per_second != 0) device.memory_bytes_per_second = c.memory_bytes_per_second;
  if (c.gigahertz != 0) device.gigahertz = c.gigahertz;
  return device;
}

}  // namespace

Status read_options(const kda_plan_options* given, DeviceFacts* device, PlanOptions* options) {
  kda_plan_options c;
  kda_plan_options_init(&c);
  if (given) KDA_RETURN_IF_ERROR(read_struct(given, "options", &c));
  if (c.device_kind != KDA_CPU && c.device_kind != KDA_CUDA)
    return invalid("device_kind: value ", c.device_kind, " is unknown");
  *device = c.device_kind == KDA_CUDA ? gpu_of(c) : cpu_facts();
  options->context_parallel = static_cast<SegmentPolicy>(c.context_parallel);
  options->segment_method = c.one_pass ? SegmentMethod::kOnePass : SegmentMethod::kScanMergeForward;
  options->intra_form = static_cast<IntraForm>(c.intra_form);
  options->num_segments = c.num_segments;
  options->spans = c.spans != 0;
  if (c.most_cut_bytes < KDA_NEVER_CUT)
    return invalid("most_cut_bytes: ", c.most_cut_bytes, " is neither a number of bytes nor -1");
  if (c.most_cut_bytes != 0) options->most_cut_bytes = std::max<int64_t>(c.most_cut_bytes, 0);
  options->num_threads = c.num_threads;
  if (c.backend) options->backend = c.backend;
  if (c.keep != 0)
    options->keep = c.keep == KDA_KEEP_CHUNKS ? KeepPolicy::kChunks : KeepPolicy::kStates;
  if (c.keep != KDA_KEEP_CHUNKS) options->kept_state_every = c.keep;
  return {};
}

GradientsOf gradients_of(const Problem& p, const kda_gradients& c) {
  const Shape states = state_shape(p, {{}, p.num_sequences, false});
  const auto desc = [](const kda_tensor& given, const Shape& shape,
                       int rank) -> std::optional<TensorDesc> {
    if (!given.data && !is_described(given)) return std::nullopt;
    return tensor_of(given, shape, rank);
  };
  GradientsOf all;
  all.gradients = {.d_o = desc(c.d_o, v_shape(p), 4),
                   .d_final_state = desc(c.d_final_state, states, 4),
                   .dq = desc(c.dq, qk_shape(p), 4),
                   .dk = desc(c.dk, qk_shape(p), 4),
                   .dv = desc(c.dv, v_shape(p), 4),
                   .dg = desc(c.dg, g_shape(p), 4),
                   .dbeta = desc(c.dbeta, beta_shape(p), 3),
                   .dA_log = desc(c.dA_log, {p.num_value_heads, 1, 1, 1}, 1),
                   .ddt_bias = desc(c.ddt_bias, bias_shape(p), 2),
                   .d_initial_state = desc(c.d_initial_state, states, 4)};
  all.tensors = {.d_o = c.d_o.data,
                 .d_final_state = c.d_final_state.data,
                 .dq = c.dq.data,
                 .dk = c.dk.data,
                 .dv = c.dv.data,
                 .dg = c.dg.data,
                 .dbeta = c.dbeta.data,
                 .dA_log = c.dA_log.data,
                 .ddt_bias = c.ddt_bias.data,
                 .d_initial_state = c.d_initial_state.data};
  return all;
}

Status check_gradients(const Gradients& planned, const kda_gradients& c) {
  const struct {
    const char* name;
    const kda_tensor& given;
    const std::optional<TensorDesc>& planned;
  } rows[] = {{"d_o", c.d_o, planned.d_o},
              {"d_final_state", c.d_final_state, planned.d_final_state},
              {"dq", c.dq, planned.dq},
              {"dk", c.dk, planned.dk},
              {"dv", c.dv, planned.dv},
              {"dg", c.dg, planned.dg},
              {"dbeta", c.dbeta, planned.dbeta},
              {"dA_log", c.dA_log, planned.dA_log},
              {"ddt_bias", c.ddt_bias, planned.ddt_bias},
              {"d_initial_state", c.d_initial_state, planned.d_initial_state}};
  for (const auto& row : rows)
    if (row.given.data && !row.planned)
      return invalid(row.name, ": given, but the plan was made without it");
  return {};
}

}  // namespace kda::capi
