// SPDX-License-Identifier: Apache-2.0
// validate(): every check of a Problem that needs neither pointers nor lengths.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/guard.hpp"
#include "core/layout.hpp"
#include "core/modes.hpp"
#include "core/text.hpp"
#include "kda/backward.hpp"
#include "kda/problem.hpp"

namespace kda {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 62;
constexpr int64_t kMaxTotalTokens = (int64_t{1} << 31) - 1;
constexpr int64_t kMaxSequences = int64_t{1} << 24;

struct TensorRules {
  const char* name;
  Shape shape;
  int rank;
  bool output;
  bool innermost_free = false;       // beta: a column of a fused projection
  const char* one_a_head = nullptr;  // what an innermost stride of 0 is one of, where it is taken
};

bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 ||
         dtype == DType::kFloat64;
}

Status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid(name, " = ", value, " is outside ", low, "..", high);
}

Status check_strides(const TensorRules& rules, const TensorDesc& desc) {
  const int64_t size = dtype_size(desc.dtype);
  int64_t extent = 1;  // elements from the first to one past the last
  for (int dim = 0; dim < rules.rank; ++dim) {
    const auto d = static_cast<std::size_t>(dim);
    const int64_t count = rules.shape[d];
    const int64_t stride = desc.strides[d];
    if (count <= 1) continue;
    if (stride == kUnsetStride)
      return invalid(rules.name, ": the stride of dimension ", dim, " was never set");
    if (dim == rules.rank - 1 && stride != 1 && !rules.innermost_free &&
        !(rules.one_a_head && stride == 0))
      return invalid(rules.name, ": innermost stride is ", stride, ", must be 1",
                     rules.one_a_head ? cat(", or 0 for one ", rules.one_a_head, " a head") : "");
    if (stride < 0)
      return invalid(rules.name, ": stride ", stride, " of dimension ", dim, " is negative");
    int64_t reach = 0;
    if (__builtin_mul_overflow(stride, count - 1, &reach) ||
        __builtin_add_overflow(extent, reach, &extent) || extent > kMaxBytes / size)
      return invalid(rules.name, ": stride ", stride, " times ", count, " of dimension ", dim,
                     " overflows");
    if (dim != rules.rank - 1 && (stride * size) % desc.alignment != 0)
      return invalid(rules.name, ": stride ", stride, " of dimension ", dim, " is ", stride * size,
                     " bytes, not a multiple of the stated alignment ", desc.alignment);
  }
  return {};
}

// Outputs must not write one element twice: sorted by stride, each dimension must step over all
// that the smaller ones reach.
Status check_injective(const TensorRules& rules, const TensorDesc& desc) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, count
  for (int dim = 0; dim < rules.rank; ++dim) {
    const auto d = static_cast<std::size_t>(dim);
    const bool one_for_all = rules.one_a_head && dim == rules.rank - 1 && desc.strides[d] == 0;
    if (rules.shape[d] > 1 && !one_for_all) dims.emplace_back(desc.strides[d], rules.shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, count] : dims) {
    if (stride <= reach)
      return invalid(rules.name, ": stride ", stride, " makes elements of this output ",
                     "overlap, needs at least ", reach + 1);
    reach += stride * (count - 1);
  }
  return {};
}

Status check_tensor(const TensorRules& rules, const TensorDesc& desc) {
  if (dtype_size(desc.dtype) == 0)
    return invalid(rules.name, ": dtype value ", static_cast<int32_t>(desc.dtype), " is unknown");
  const int64_t alignment = desc.alignment;
  if (alignment < 1 || alignment > 4096 || (alignment & (alignment - 1)) != 0)
    return invalid(rules.name, ": alignment ", alignment, " is not a power of two up to 4096");
  if (alignment < dtype_size(desc.dtype))
    return invalid(rules.name, ": alignment ", alignment, " is below the ", dtype_size(desc.dtype),
                   " bytes of ", dtype_name(desc.dtype));
  const bool empty = std::any_of(rules.shape.begin(), rules.shape.begin() + rules.rank,
                                 [](int64_t count) { return count == 0; });
  if (empty) return {};
  if (std::all_of(desc.strides.begin(), desc.strides.end(),
                  [](int64_t stride) { return stride == kUnsetStride; }))
    return invalid(rules.name, ": was never described (dtype and strides, as of a contiguous ",
                   "tensor of this shape)");
  KDA_RETURN_IF_ERROR(check_strides(rules, desc));
  return rules.output ? check_injective(rules, desc) : Status{};
}

Status check_io(const TensorRules& rules, const TensorDesc& desc) {
  if (!is_float(desc.dtype))
    return invalid(rules.name, ": dtype ", dtype_name(desc.dtype),
                   " is not fp32, bf16, fp16 or fp64");
  return check_tensor(rules, desc);
}

Status check_parameter(const TensorRules& rules, const std::optional<TensorDesc>& desc) {
  if (!desc) return {};
  if (desc->dtype != DType::kFloat32 && desc->dtype != DType::kFloat64)
    return invalid(rules.name, ": dtype ", dtype_name(desc->dtype), " is not fp32 or fp64");
  return check_tensor(rules, *desc);
}

Status check_state(const char* name, const Problem& p, const std::optional<StateDesc>& state,
                   bool output) {
  if (!state) return {};
  const DType dtype = state->tensor.dtype;
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat64)
    return invalid(name, ": dtype ", dtype_name(dtype), " is not fp32, bf16 or fp64");
  if (state->num_slots < 0)
    return invalid(name, ": num_slots = ", state->num_slots, " is negative");
  const bool per_sequence = std::string_view(name) != "checkpoints";
  if (per_sequence && !state->indexed && state->num_slots != p.num_sequences)
    return invalid(name, ": num_slots = ", state->num_slots,
                   " is not the number of sequences N = ", p.num_sequences,
                   " (a pool needs indexed = true)");
  return check_tensor({name, state_shape(p, *state), 4, output}, state->tensor);
}

Status check_sizes(const Problem& p) {
  if (p.operation != Operation::kForward && p.operation != Operation::kDecode)
    return invalid("operation: value ", static_cast<int32_t>(p.operation), " is unknown");
  KDA_RETURN_IF_ERROR(check_range("batch: B", p.batch, 0, kMaxSequences));
  KDA_RETURN_IF_ERROR(check_range("num_tokens: T", p.num_tokens, 0, kMaxTotalTokens));
  if (p.batch * p.num_tokens > kMaxTotalTokens)
    return invalid("num_tokens: B * T = ", p.batch * p.num_tokens, " is above ", kMaxTotalTokens);
  KDA_RETURN_IF_ERROR(check_range("num_heads: H", p.num_heads, 1, 65535));
  KDA_RETURN_IF_ERROR(check_range("num_value_heads: HV", p.num_value_heads, 1, 65535));
  if (p.num_value_heads % p.num_heads != 0)
    return invalid("v: HV = ", p.num_value_heads, " is not a multiple of H = ", p.num_heads);
  KDA_RETURN_IF_ERROR(check_range("key_dim: K", p.key_dim, 1, kMaxHeadDim));
  KDA_RETURN_IF_ERROR(check_range("value_dim: V", p.value_dim, 1, kMaxHeadDim));
  KDA_RETURN_IF_ERROR(check_range("num_sequences: N", p.num_sequences, 0, kMaxSequences));
  if (!p.cu_seqlens && p.num_sequences != p.batch)
    return invalid("num_sequences: N = ", p.num_sequences, " is not B = ", p.batch,
                   " (several sequences a row need cu_seqlens)");
  if (p.cu_seqlens && p.batch != 1) return invalid("cu_seqlens: needs batch = 1, got ", p.batch);
  if (p.cu_seqlens && *p.cu_seqlens != DType::kInt32 && *p.cu_seqlens != DType::kInt64)
    return invalid("cu_seqlens: dtype ", dtype_name(*p.cu_seqlens), " is not int32 or int64");
  return {};
}

Status check_gate(const Problem& p) {
  switch (p.gate_mode) {
    case GateMode::kLog:
      if (p.A_log || p.dt_bias)
        return invalid(p.A_log ? "A_log" : "dt_bias", ": given, but gate log takes none");
      return {};
    case GateMode::kSoftplus:
      if (!p.A_log) return invalid("A_log: required by gate softplus");
      return {};
    case GateMode::kBounded: return check_lower_bound(p.lower_bound);
  }
  return invalid("gate_mode: value ", static_cast<int32_t>(p.gate_mode), " is unknown");
}

Status check_modes(const Problem& p) {
  KDA_RETURN_IF_ERROR(check_gate(p));
  if (p.beta_mode < BetaMode::kPlain || p.beta_mode > BetaMode::kSigmoid2)
    return invalid("beta_mode: value ", static_cast<int32_t>(p.beta_mode), " is unknown");
  if (p.head_map != HeadMap::kGrouped && p.head_map != HeadMap::kTiled)
    return invalid("head_map: value ", static_cast<int32_t>(p.head_map), " is unknown");
  if (p.state_layout != StateLayout::kKV && p.state_layout != StateLayout::kVK)
    return invalid("state_layout: value ", static_cast<int32_t>(p.state_layout), " is unknown");
  return p.scale ? check_scale(*p.scale) : Status{};
}

Status check_first_slot(const Problem& p) {
  KDA_RETURN_IF_ERROR(check_range("first_slot", p.first_slot, 0, INT32_MAX));
  if (p.first_slot == 0) return {};
  bool indexed = false;
  for (const auto& [name, state] :
       {std::pair{"initial_state", &p.initial_state}, std::pair{"final_state", &p.final_state},
        std::pair{"checkpoints", &p.checkpoints}}) {
    if (!*state || !(*state)->indexed) continue;
    indexed = true;
    if (p.first_slot > (*state)->num_slots)
      return invalid("first_slot = ", p.first_slot, " is above ", (*state)->num_slots,
                     ", the number of slots of ", name);
  }
  return indexed ? Status{} : invalid("first_slot = ", p.first_slot, " needs indexed states");
}

Status check_forward_states(const Problem& p) {
  KDA_RETURN_IF_ERROR(check_state("final_state", p, p.final_state, true));
  KDA_RETURN_IF_ERROR(check_state("checkpoints", p, p.checkpoints, true));
  if (p.checkpoints &&
      (p.checkpoint_every < kCheckpointMultiple || p.checkpoint_every % kCheckpointMultiple != 0))
    return invalid("checkpoint_every: ", p.checkpoint_every, " is not a positive multiple of ",
                   kCheckpointMultiple);
  if (p.checkpoint_offsets && !(p.checkpoints && p.checkpoints->indexed))
    return invalid("checkpoint_offsets: needs checkpoints with indices");
  if (p.initial_state_mask && !p.initial_state)
    return invalid("initial_state_mask: given without initial_state");
  if (p.state_index_columns != 1 || p.num_accepted_tokens || p.token_parents)
    return invalid("state_index_columns, num_accepted_tokens, token_parents: belong to decode");
  if (p.zero_skipped && !(p.initial_state && p.initial_state->indexed))
    return invalid("zero_skipped: a forward needs an indexed initial_state, whose sequences ",
                   "without a slot have outputs of 0");
  return {};
}

/// Lengths that are known are looked at by the planner.
Status check_decode_tokens(const Problem& p) {
  const int64_t most = most_decode_tokens(p);
  if (p.cu_seqlens || p.num_tokens <= most) return {};
  return invalid("num_tokens: ", p.tail ? cat("a tail of R = ", p.tail->rows, " rows") : "decode",
                 " takes 1..", most, " tokens a sequence, got ", p.num_tokens);
}

Status check_decode_states(const Problem& p) {
  if (!p.initial_state && !p.final_state)
    return invalid("initial_state: decode needs the state pool, or final_state to write to");
  KDA_RETURN_IF_ERROR(check_state("final_state", p, p.final_state, true));
  if (p.final_state && p.num_accepted_tokens)
    return invalid("final_state: with num_accepted_tokens decode writes into the pool of ",
                   "initial_state");
  if (p.final_state && p.zero_skipped && p.state_index_columns == 1)
    return invalid("zero_skipped: belongs to decode in place, with final_state and one column of ",
                   "indices no token is skipped");
  if (p.initial_state_mask && !p.initial_state)
    return invalid("initial_state_mask: given without initial_state");
  if (p.checkpoints || p.checkpoint_offsets)
    return invalid("checkpoints, checkpoint_offsets: belong to forward");
  KDA_RETURN_IF_ERROR(check_range("state_index_columns: S", p.state_index_columns, 1, 65535));
  if (p.state_index_columns != 1 && !(p.final_state ? p.final_state : p.initial_state)->indexed)
    return invalid("state_index_columns: S = ", p.state_index_columns, " needs indexed states");
  if (p.token_parents && p.state_index_columns == 1)
    return invalid("token_parents: needs a state a token, state_index_columns = 1");
  return check_decode_tokens(p);
}

/// Whether rows of a tail are those of an input.
Status check_tail_rows(const TensorRules& rules, const TensorDesc& desc, const char* of,
                       DType dtype) {
  if (desc.dtype != dtype)
    return invalid(rules.name, ": dtype ", dtype_name(desc.dtype), " is not that of ", of, ", ",
                   dtype_name(dtype));
  return check_tensor(rules, desc);
}

Status check_tail_tensors(const Problem& p, const TailDesc& tail) {
  KDA_RETURN_IF_ERROR(
      check_tail_rows({"tail.k", tail_k_shape(p, tail), 4, true}, tail.k, "k", p.k.dtype));
  if (is_a_head(p, tail.g) != has_head_gate(p))
    return invalid("tail.g: innermost stride ", tail.g.strides[3], ", but g has ",
                   has_head_gate(p) ? "one gate a head" : "a gate a channel");
  KDA_RETURN_IF_ERROR(check_tail_rows({"tail.g", tail_g_shape(p, tail), 4, true, false, "gate"},
                                      tail.g, "g", p.g.dtype));
  if (tail.v_new.dtype != DType::kFloat32)
    return invalid("tail.v_new: dtype ", dtype_name(tail.v_new.dtype), " is not fp32");
  KDA_RETURN_IF_ERROR(check_tensor({"tail.v_new", tail_v_new_shape(p, tail), 4, true}, tail.v_new));
  if (tail.folded.dtype != DType::kInt32)
    return invalid("tail.folded: dtype ", dtype_name(tail.folded.dtype), " is not int32");
  return check_tensor({"tail.folded", tail_folded_shape(p, tail), 2, true}, tail.folded);
}

Status check_split(const Problem& p, const TailDesc& tail, const SplitDesc& split) {
  const StateDesc& pool = *p.initial_state;
  if (pool.tensor.dtype != DType::kBFloat16)
    return invalid("initial_state: dtype ", dtype_name(pool.tensor.dtype),
                   " is not bf16, which split states have beside tail.rest");
  if (split.rest.dtype != DType::kInt16)
    return invalid("tail.rest: dtype ", dtype_name(split.rest.dtype), " is not int16");
  KDA_RETURN_IF_ERROR(check_tensor({"tail.rest", state_shape(p, pool), 4, true}, split.rest));
  KDA_RETURN_IF_ERROR(
      check_tail_rows({"tail.v", tail_v_new_shape(p, tail), 4, true}, split.v, "v", p.v.dtype));
  return check_tail_rows({"tail.beta", tail_beta_shape(p, tail), 3, true, true}, split.beta, "beta",
                         p.beta.dtype);
}

Status check_ring_rows(const TensorRules& rules, const TensorDesc& desc) {
  if (!is_float(desc.dtype) || desc.dtype == DType::kFloat64)
    return invalid(rules.name, ": dtype ", dtype_name(desc.dtype), " is not fp32, bf16 or fp16");
  return check_tensor(rules, desc);
}

Status check_ring_tensors(const Problem& p, const TailDesc& tail) {
  KDA_RETURN_IF_ERROR(check_ring_rows({"tail.k", tail_k_shape(p, tail), 4, true}, tail.k));
  if (tail.g.dtype != DType::kFloat32)
    return invalid("tail.g: dtype ", dtype_name(tail.g.dtype), " is not fp32, which a ring has");
  KDA_RETURN_IF_ERROR(check_tensor({"tail.g", tail_g_shape(p, tail), 4, true}, tail.g));
  return check_ring_rows({"tail.v_new", tail_v_new_shape(p, tail), 4, true}, tail.v_new);
}

/// Rows that are made: of a decode of one token, and of nothing that tails have besides.
Status check_ring(const Problem& p, const TailDesc& tail) {
  if (p.operation != Operation::kDecode || p.num_tokens != 1 || p.cu_seqlens)
    return invalid("tail.ring: a ring takes a decode of one token a sequence, [N, 1], without ",
                   "cu_seqlens");
  if (has_head_gate(p)) return invalid("g: a ring has a gate a channel, got one gate a head");
  for (const auto& [name, given] :
       {std::pair{"initial_state_mask", p.initial_state_mask},
        std::pair{"token_parents", p.token_parents}, std::pair{"sources", tail.sources},
        std::pair{"accepted_rows", tail.accepted_columns != 0},
        std::pair{"tail.settle", tail.settle}, std::pair{"tail.rest", tail.split.has_value()}})
    if (given) return invalid(name, ": is not taken with a ring");
  return check_ring_tensors(p, tail);
}

/// A pool of boundary states, and tails in slots of the same numbers.
Status check_tail(const Problem& p, const TailDesc& tail) {
  if (!p.initial_state || !p.initial_state->indexed)
    return invalid("initial_state: a tail needs the pool of its boundary states, with indices");
  KDA_RETURN_IF_ERROR(
      check_range("tail: R", tail.rows, tail.ring ? 1 : kTailBoundary, kMaxTailRows));
  if (tail.num_slots != p.initial_state->num_slots)
    return invalid("tail: num_slots = ", tail.num_slots, " is not the ", p.initial_state->num_slots,
                   " of initial_state");
  for (const auto& [name, given] : {std::pair{"final_state", p.final_state.has_value()},
                                    std::pair{"checkpoints", p.checkpoints || p.checkpoint_offsets},
                                    std::pair{"num_accepted_tokens", p.num_accepted_tokens}})
    if (given) return invalid(name, ": is not taken with a tail");
  if (tail.flush && !tail.ring) return invalid("flush: belongs to a ring");
  if (tail.ring) KDA_RETURN_IF_ERROR(check_ring(p, tail));
  const bool decode = p.operation == Operation::kDecode;
  if (!decode && (p.token_parents || tail.accepted_columns != 0 || tail.settle))
    return invalid(p.token_parents ? "token_parents"
                   : tail.settle   ? "tail.settle"
                                   : "accepted_rows",
                   ": belongs to decode, all tokens of a forward are sure");
  KDA_RETURN_IF_ERROR(check_range("state_index_columns: S", p.state_index_columns, 1, 65535));
  if (!p.token_parents && p.state_index_columns != 1)
    return invalid("state_index_columns: S = ", p.state_index_columns,
                   ", but with a tail a sequence has one slot");
  KDA_RETURN_IF_ERROR(check_range("accepted_rows: columns", tail.accepted_columns, 0, tail.rows));
  if (!tail.ring) KDA_RETURN_IF_ERROR(check_tail_tensors(p, tail));
  if (tail.split) KDA_RETURN_IF_ERROR(check_split(p, tail, *tail.split));
  return decode ? check_decode_tokens(p) : Status{};
}

Status validate_or_throw(const Problem& p) {
  KDA_RETURN_IF_ERROR(check_sizes(p));
  KDA_RETURN_IF_ERROR(check_modes(p));
  KDA_RETURN_IF_ERROR(check_io({"q", qk_shape(p), 4, false}, p.q));
  KDA_RETURN_IF_ERROR(check_io({"k", qk_shape(p), 4, false}, p.k));
  KDA_RETURN_IF_ERROR(check_io({"v", v_shape(p), 4, false}, p.v));
  KDA_RETURN_IF_ERROR(check_io({"g", g_shape(p), 4, false, false, "gate"}, p.g));
  KDA_RETURN_IF_ERROR(check_io({"beta", beta_shape(p), 3, false, true}, p.beta));
  KDA_RETURN_IF_ERROR(check_io({"o", v_shape(p), 4, true}, p.o));
  KDA_RETURN_IF_ERROR(check_parameter({"A_log", {p.num_value_heads, 1, 1, 1}, 1, false}, p.A_log));
  KDA_RETURN_IF_ERROR(
      check_parameter({"dt_bias", bias_shape(p), 2, false, false, "bias"}, p.dt_bias));
  if (has_head_bias(p) && !has_head_gate(p))
    return invalid("dt_bias: innermost stride is 0, but g has a gate a channel");
  KDA_RETURN_IF_ERROR(check_state("initial_state", p, p.initial_state, in_place(p)));
  if (p.tail) {
    KDA_RETURN_IF_ERROR(check_tail(p, *p.tail));
    return check_first_slot(p);
  }
  switch (p.operation) {  // check_sizes() has refused others
    case Operation::kForward: KDA_RETURN_IF_ERROR(check_forward_states(p)); break;
    case Operation::kDecode: KDA_RETURN_IF_ERROR(check_decode_states(p)); break;
  }
  return check_first_slot(p);
}

/// A gradient that a loss may leave out or a caller may not want.
Status check_gradient(const TensorRules& rules, const std::optional<TensorDesc>& desc) {
  return desc ? check_io(rules, *desc) : Status{};
}

Status check_state_gradient(const char* name, const Problem& p,
                            const std::optional<TensorDesc>& desc, bool output) {
  if (!desc) return {};
  return check_state(name, p, StateDesc{*desc, p.num_sequences, false}, output);
}

Status check_gradients(const Problem& p, const Gradients& g) {
  if (p.tail) return invalid("forward: has a tail, only a forward without one has a backward");
  if (p.operation != Operation::kForward)
    return invalid("forward: its operation is ", operation_name(p.operation),
                   ", only forward has a backward");
  if (p.zero_skipped) return invalid("zero_skipped: a forward with it has no backward");
  if (!g.d_o && !g.d_final_state)
    return invalid("d_o, d_final_state: both are absent, a backward starts from at least one");
  KDA_RETURN_IF_ERROR(check_gradient({"d_o", v_shape(p), 4, false}, g.d_o));
  KDA_RETURN_IF_ERROR(check_state_gradient("d_final_state", p, g.d_final_state, false));
  if (!g.dq && !g.dk && !g.dv && !g.dg && !g.dbeta && !g.dA_log && !g.ddt_bias &&
      !g.d_initial_state)
    return invalid("gradients: none is wanted");
  KDA_RETURN_IF_ERROR(check_gradient({"dq", qk_shape(p), 4, true}, g.dq));
  KDA_RETURN_IF_ERROR(check_gradient({"dk", qk_shape(p), 4, true}, g.dk));
  KDA_RETURN_IF_ERROR(check_gradient({"dv", v_shape(p), 4, true}, g.dv));
  if (g.dg && is_a_head(p, *g.dg) && !has_head_gate(p))
    return invalid("dg: innermost stride is 0, but g has a gate a channel");
  KDA_RETURN_IF_ERROR(check_gradient({"dg", g_shape(p), 4, true, false, "gate"}, g.dg));
  KDA_RETURN_IF_ERROR(check_gradient({"dbeta", beta_shape(p), 3, true, true}, g.dbeta));
  if (g.dA_log && !p.A_log) return invalid("dA_log: given, but the forward has no A_log");
  if (g.ddt_bias && !p.dt_bias) return invalid("ddt_bias: given, but the forward has no dt_bias");
  if (g.d_initial_state && !p.initial_state)
    return invalid("d_initial_state: given, but the forward has no initial_state");
  KDA_RETURN_IF_ERROR(check_parameter({"dA_log", {p.num_value_heads, 1, 1, 1}, 1, true}, g.dA_log));
  KDA_RETURN_IF_ERROR(
      check_parameter({"ddt_bias", bias_shape(p), 2, true, false, "bias"}, g.ddt_bias));
  if (g.ddt_bias && is_bias_a_head(p, *g.ddt_bias) && !has_head_bias(p))
    return invalid("ddt_bias: innermost stride is 0, but dt_bias has a bias a channel");
  return check_state_gradient("d_initial_state", p, g.d_initial_state, true);
}

}  // namespace

Status validate(const BackwardProblem& problem) noexcept {
  return guarded([&] {
    KDA_RETURN_IF_ERROR(validate_or_throw(problem.forward));
    return check_gradients(problem.forward, problem.gradients);
  });
}

Status validate(const Problem& problem) noexcept {
  return guarded([&] { return validate_or_throw(problem); });
}

StateDesc states(const Problem& problem, DType dtype, int64_t num_slots, bool indexed) noexcept {
  const bool v_first = problem.state_layout == StateLayout::kVK;
  const int64_t rows = v_first ? problem.value_dim : problem.key_dim;
  const int64_t columns = v_first ? problem.key_dim : problem.value_dim;
  return {contiguous(dtype, {num_slots, problem.num_value_heads, rows, columns}), num_slots,
          indexed};
}

TailDesc tails(const Problem& p, int64_t rows) noexcept {
  TailDesc tail;
  tail.num_slots = p.initial_state ? p.initial_state->num_slots : 0;
  tail.rows = rows;
  tail.k = contiguous(p.k.dtype, {tail.num_slots, p.num_heads, rows, p.key_dim});
  tail.g = has_head_gate(p)
               ? head_gates(p.g.dtype, tail.num_slots, p.num_value_heads, rows)
               : contiguous(p.g.dtype, {tail.num_slots, p.num_value_heads, rows, p.key_dim});
  tail.v_new = contiguous(DType::kFloat32, {tail.num_slots, p.num_value_heads, rows, p.value_dim});
  tail.folded = contiguous(DType::kInt32, {tail.num_slots, p.num_value_heads});
  return tail;
}

SplitDesc split_states(const Problem& p, int64_t rows) noexcept {
  const int64_t slots = p.initial_state ? p.initial_state->num_slots : 0;
  return {states(p, DType::kInt16, slots).tensor,
          contiguous(p.v.dtype, {slots, p.num_value_heads, rows, p.value_dim}),
          contiguous(p.beta.dtype, {slots, p.num_value_heads, rows})};
}

double effective_scale(const Problem& problem) noexcept {
  return problem.scale ? *problem.scale : 1.0 / std::sqrt(static_cast<double>(problem.key_dim));
}

}  // namespace kda
