// SPDX-License-Identifier: Apache-2.0
#include "run/check_layer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/lengths.hpp"
#include "core/modes.hpp"
#include "run/slots.hpp"
#include "stage/short_conv.hpp"

namespace kda {

// ---- short convolution --------------------------------------------------------------------------

namespace {

using stage::length_entry;
using stage::num_sequences;
using stage::slot_of;

Status check_width(int64_t width) {
  if (width >= 2 && width <= stage::kMaxConvWidth) return {};
  return invalid("width: is ", width, ", must be 2 to ", stage::kMaxConvWidth);
}

Status check_eps(const char* name, double eps) {
  if (eps >= 0 && std::isfinite(static_cast<float>(eps))) return {};
  return invalid(name, ": is ", eps, ", must be finite in fp32 and not negative");
}

Status check_lengths(const ShortConv& call) {
  if (!call.cu_seqlens) return {};
  if (call.cu_seqlens_dtype != DType::kInt32 && call.cu_seqlens_dtype != DType::kInt64)
    return invalid("cu_seqlens: type is ", dtype_name(call.cu_seqlens_dtype),
                   ", must be int32 or int64");
  if (call.batch != 1) return invalid("batch: is ", call.batch, ", must be 1 with cu_seqlens");
  KDA_RETURN_IF_ERROR(check_count("num_sequences", call.num_sequences, 0));
  if (call.device != DeviceKind::kCpu) return {};  // the kernels clamp
  return kda::check_lengths(call.num_sequences, call.num_tokens,
                            [&](int64_t n) { return length_entry(call, n); });
}

Status check_first_slot(int64_t first_slot, int64_t num_slots) {
  if (first_slot >= 0 && first_slot <= num_slots) return {};
  return invalid("first_slot: is ", first_slot, ", must be 0 to the number of slots, ", num_slots);
}

/// Refuses slots of `N` sequences, which the host can read, beyond the pool, or twice where they
/// are written.
Status check_slot_values(const char* name, const int32_t* slots, int64_t N, int64_t first_slot,
                         int64_t num_slots, bool written) {
  KDA_RETURN_IF_ERROR(check_index(name, slots, N, num_slots));
  if (!written) return {};
  std::vector<int32_t> taken;
  std::copy_if(slots, slots + N, std::back_inserter(taken),
               [&](int32_t slot) { return slot >= first_slot; });
  std::sort(taken.begin(), taken.end());
  const auto twice = std::adjacent_find(taken.begin(), taken.end());
  if (twice == taken.end()) return {};
  return invalid(name, ": slot ", *twice, " would be written twice");
}

struct StateNames {
  const char *state, *indices;
};
constexpr StateNames kInitialNames = {"initial_state", "initial_state_indices"};
constexpr StateNames kFinalNames = {"final_state", "final_state_indices"};

Status check_slots(const ShortConv& call, const ConvState& state, const StateNames& names,
                   bool written) {
  if (!state.tensor.data) return {};
  if (call.state_width < call.width - 1)
    return invalid("state_width: is ", call.state_width,
                   ", must be at least width - 1 = ", call.width - 1);
  KDA_RETURN_IF_ERROR(check_count("state_width", call.state_width, 0));
  KDA_RETURN_IF_ERROR(check_count(names.state, state.num_slots, 0));
  const int64_t N = num_sequences(call);
  if (!state.indices) {
    if (state.num_slots == N) return {};
    return invalid(names.state, ": has ", state.num_slots, " slots, must have one for each of the ",
                   N, " sequences, or indices");
  }
  KDA_RETURN_IF_ERROR(check_first_slot(call.first_slot, state.num_slots));
  if (call.device != DeviceKind::kCpu) return {};
  return check_slot_values(names.indices, state.indices, N, call.first_slot, state.num_slots,
                           written);
}

Shape state_shape(const ShortConv& call, const ConvState& state) {
  return {state.num_slots, call.channels, call.state_width, 1};
}

/// In place means the same states, sequence by sequence: a slot that is written is read by nobody
/// else.
Status check_in_place(const ShortConv& call) {
  const ConvState &a = call.initial_state, &b = call.final_state;
  if (!share_memory({"", &a.tensor, state_shape(call, a)}, {"", &b.tensor, state_shape(call, b)}))
    return {};
  bool same = a.tensor.data == b.tensor.data && a.tensor.dtype == b.tensor.dtype &&
              a.tensor.strides == b.tensor.strides;
  if (call.device != DeviceKind::kCpu) same = same && a.indices == b.indices;
  for (int64_t n = 0; call.device == DeviceKind::kCpu && same && n < num_sequences(call); ++n)
    same = slot_of(call, a, n) == slot_of(call, b, n);
  if (same) return {};
  return invalid("final_state: overlaps initial_state, and is not the same states in place");
}

Status check_sizes(const ShortConv& call) {
  KDA_RETURN_IF_ERROR(check_count("batch", call.batch, 0));
  KDA_RETURN_IF_ERROR(check_count("num_tokens", call.num_tokens, 0));
  KDA_RETURN_IF_ERROR(check_count("channels", call.channels, 1));
  KDA_RETURN_IF_ERROR(check_count("num_threads", call.num_threads, 0));
  KDA_RETURN_IF_ERROR(check_width(call.width));
  if (call.activation != Activation::kNone && call.activation != Activation::kSilu)
    return invalid("activation: is ", activation_name(call.activation), ", must be none or silu");
  int64_t elements = 0;
  if (__builtin_mul_overflow(call.batch, std::max<int64_t>(call.num_tokens, 1), &elements) ||
      __builtin_mul_overflow(elements, call.channels, &elements))
    return invalid("channels: batch x num_tokens x channels is beyond 2^63");
  return check_lengths(call);
}

Shape rows_shape(const ShortConv& call) { return {call.batch, call.num_tokens, call.channels, 1}; }

NamedView bias_of(const ShortConv& call) { return {"bias", &call.bias, {call.channels, 1, 1, 1}}; }
NamedView weight_of(const ShortConv& call) {
  return {"weight", &call.weight, {call.channels, call.width, 1, 1}, false, true};
}

Status check_metadata(const ShortConv& call, const Memory& memory) {
  KDA_RETURN_IF_ERROR(memory.check("cu_seqlens", call.cu_seqlens));
  KDA_RETURN_IF_ERROR(memory.check(kInitialNames.indices, call.initial_state.indices));
  KDA_RETURN_IF_ERROR(memory.check(kFinalNames.indices, call.final_state.indices));
  return memory.check("has_state", call.has_state);
}

/// That `written` lies apart from the integers of the call.
Status check_arrays(const ShortConv& call, std::span<const NamedView> written) {
  const int64_t N = num_sequences(call);
  return check_overlaps(
      written, std::array{NamedArray{"cu_seqlens", call.cu_seqlens,
                                     (N + 1) * dtype_size(call.cu_seqlens_dtype)},
                          NamedArray{kInitialNames.indices, call.initial_state.indices, N * 4},
                          NamedArray{kFinalNames.indices, call.final_state.indices, N * 4},
                          NamedArray{"has_state", call.has_state, N}});
}

}  // namespace

Status check_short_conv(const ShortConv& call, const Memory& memory) {
  KDA_RETURN_IF_ERROR(check_sizes(call));
  const ConvState &initial = call.initial_state, &final = call.final_state;
  KDA_RETURN_IF_ERROR(check_slots(call, initial, kInitialNames, false));
  KDA_RETURN_IF_ERROR(check_slots(call, final, kFinalNames, true));
  if (call.has_state && !initial.tensor.data) return invalid("has_state: needs initial_state");
  const NamedView x{"x", &call.x, rows_shape(call), false, true};
  const NamedView y{"y", &call.y, rows_shape(call), true, true};
  const NamedView before{"initial_state", &initial.tensor, state_shape(call, initial)};
  const NamedView after{"final_state", &final.tensor, state_shape(call, final), true};
  const NamedView weight = weight_of(call), bias = bias_of(call);
  KDA_RETURN_IF_ERROR(memory.check_each(std::array{x, weight, bias, before, y, after}));
  KDA_RETURN_IF_ERROR(check_metadata(call, memory));
  KDA_RETURN_IF_ERROR(check_overlaps(std::array{x, weight, bias, before, y}));
  KDA_RETURN_IF_ERROR(check_overlaps(std::array{x, weight, bias, y, after}));
  KDA_RETURN_IF_ERROR(check_arrays(call, std::array{y, after}));
  return check_in_place(call);
}

Status check_short_conv_backward(const ShortConv& call, const ShortConvGradients& g,
                                 const Memory& memory) {
  KDA_RETURN_IF_ERROR(check_sizes(call));
  const ConvState& initial = call.initial_state;
  if (initial.indices) return invalid("initial_state_indices: a backward has one state a sequence");
  KDA_RETURN_IF_ERROR(check_slots(call, initial, kInitialNames, false));
  if (call.has_state && !initial.tensor.data) return invalid("has_state: needs initial_state");
  if (g.d_initial_state.data && !initial.tensor.data)
    return invalid("d_initial_state: needs initial_state");
  if (g.dbias.data && !call.bias.data) return invalid("dbias: needs bias");
  const ConvState final{g.d_final_state, num_sequences(call), nullptr};
  KDA_RETURN_IF_ERROR(check_slots(call, final, {"d_final_state", ""}, false));
  const Shape rows = rows_shape(call), states = state_shape(call, initial);
  const NamedView views[] = {{"x", &call.x, rows, false, true},
                             weight_of(call),
                             bias_of(call),
                             {"initial_state", &initial.tensor, states},
                             {"dy", &g.dy, rows},
                             {"d_final_state", &g.d_final_state, state_shape(call, final)},
                             {"dx", &g.dx, rows, true},
                             {"dweight", &g.dweight, {call.channels, call.width, 1, 1}, true},
                             {"dbias", &g.dbias, {call.channels, 1, 1, 1}, true},
                             {"d_initial_state", &g.d_initial_state, states, true}};
  KDA_RETURN_IF_ERROR(memory.check_each(views));
  KDA_RETURN_IF_ERROR(check_metadata(call, memory));
  KDA_RETURN_IF_ERROR(check_overlaps(views));
  return check_arrays(call, views);
}

// ---- gated RMS norm -----------------------------------------------------------------------------

namespace {

Shape shape_of(const GatedRmsNorm& call) {
  return {call.rows[0], call.rows[1], call.rows[2], call.channels};
}

Status check_norm_sizes(const GatedRmsNorm& call) {
  int64_t rows = 1;
  for (const int64_t count : call.rows) {
    KDA_RETURN_IF_ERROR(check_count("rows", count, 0));
    if (__builtin_mul_overflow(rows, std::max<int64_t>(count, 1), &rows))
      return invalid("rows: their product is beyond 2^63");
  }
  KDA_RETURN_IF_ERROR(check_count("channels", call.channels, 1));
  if (__builtin_mul_overflow(rows, call.channels, &rows))
    return invalid("rows: with the channels their product is beyond 2^63");
  KDA_RETURN_IF_ERROR(check_count("num_threads", call.num_threads, 0));
  KDA_RETURN_IF_ERROR(check_eps("eps", call.eps));
  if (call.activation != Activation::kNone && call.activation != Activation::kSilu &&
      call.activation != Activation::kSigmoid)
    return invalid("activation: is ", static_cast<int>(call.activation),
                   ", must be none, silu or sigmoid");
  return {};
}

/// Rows are read along their channels.
Status check_rows(const GatedRmsNorm& call, const NamedView& given) {
  const std::size_t innermost = given.shape[3] == call.channels ? 3 : 0;
  if (!given.view->data || call.channels == 1 || given.view->strides[innermost] == 1) return {};
  return invalid(given.name, ": innermost stride is ", given.view->strides[innermost],
                 ", must be 1");
}

Status check_all(const GatedRmsNorm& call, std::span<const NamedView> views, const Memory& memory) {
  KDA_RETURN_IF_ERROR(memory.check_each(views));
  for (const NamedView& given : views) KDA_RETURN_IF_ERROR(check_rows(call, given));
  return check_overlaps(views);
}

}  // namespace

Status check_gated_rms_norm(const GatedRmsNorm& call, const Memory& memory) {
  KDA_RETURN_IF_ERROR(check_norm_sizes(call));
  const Shape rows = shape_of(call);
  return check_all(call,
                   std::array<NamedView, 4>{{{"x", &call.x, rows, false, true},
                                             {"gate", &call.gate, rows},
                                             {"weight", &call.weight, {call.channels, 1, 1, 1}},
                                             {"y", &call.y, rows, true, true}}},
                   memory);
}

Status check_gated_rms_norm_backward(const GatedRmsNorm& call, const GatedRmsNormGradients& g,
                                     const Memory& memory) {
  KDA_RETURN_IF_ERROR(check_norm_sizes(call));
  if (g.dgate.data && !call.gate.data) return invalid("dgate: needs gate");
  if (g.dweight.data && !call.weight.data) return invalid("dweight: needs weight");
  const Shape rows = shape_of(call), weight = {call.channels, 1, 1, 1};
  return check_all(call,
                   std::array<NamedView, 7>{{{"x", &call.x, rows, false, true},
                                             {"gate", &call.gate, rows},
                                             {"weight", &call.weight, weight},
                                             {"dy", &g.dy, rows, false, true},
                                             {"dx", &g.dx, rows, true},
                                             {"dgate", &g.dgate, rows, true},
                                             {"dweight", &g.dweight, weight, true}}},
                   memory);
}

// ---- fused decode -------------------------------------------------------------------------------

namespace {

Status unsupported(std::string text) { return Status(StatusCode::kUnsupported, std::move(text)); }

Status check_decode_sizes(const FusedDecode& call) {
  KDA_RETURN_IF_ERROR(check_count("num_sequences", call.num_sequences, 0));
  KDA_RETURN_IF_ERROR(check_count("num_heads", call.num_heads, 1));
  KDA_RETURN_IF_ERROR(check_count("num_slots", call.num_slots, 0));
  if (call.num_tokens < 1 || call.num_tokens > 8)
    return invalid("num_tokens: is ", call.num_tokens, ", must be 1 to 8");
  KDA_RETURN_IF_ERROR(check_width(call.width));
  KDA_RETURN_IF_ERROR(check_count("state_width", call.state_width, call.width - 1));
  if (call.head_dim < 1 || call.head_dim > kMaxHeadDim)
    return invalid("head_dim: is ", call.head_dim, ", must be 1 to ", kMaxHeadDim);
  if (!call.slots && call.num_slots != call.num_sequences)
    return invalid("num_slots: is ", call.num_slots, ", must be N = ", call.num_sequences,
                   " without slots");
  const auto known = [](auto value, auto last) {
    return value >= decltype(value){} && value <= last;
  };
  if (!known(call.gate_mode, GateMode::kBounded))
    return invalid("gate_mode: is ", static_cast<int>(call.gate_mode), ", must be 0 to 2");
  if (!known(call.beta_mode, BetaMode::kSigmoid2))
    return invalid("beta_mode: is ", static_cast<int>(call.beta_mode), ", must be 0 to 2");
  if (!known(call.activation, Activation::kSigmoid))
    return invalid("activation: is ", static_cast<int>(call.activation),
                   ", must be none, silu or sigmoid");
  if (call.gate_mode == GateMode::kSoftplus && !call.A_log.data)
    return invalid("A_log: required by gate softplus");
  if (call.gate_mode == GateMode::kBounded)
    KDA_RETURN_IF_ERROR(check_lower_bound(call.lower_bound));
  KDA_RETURN_IF_ERROR(check_scale(call.scale));
  KDA_RETURN_IF_ERROR(check_first_slot(call.first_slot, call.num_slots));
  return check_eps("norm_eps", call.norm_eps);
}

/// Checks what the host can read of a call: rates and slots.
Status check_decode_values(const FusedDecode& call) {
  if (call.device != DeviceKind::kCpu) return {};
  if (call.A_log.data)
    KDA_RETURN_IF_ERROR(check_rates(call.gate_mode, call.A_log.data, call.A_log.dtype,
                                    call.A_log.strides[0], call.num_heads));
  if (!call.slots) return {};
  return check_slot_values("slots", call.slots, call.num_sequences, call.first_slot, call.num_slots,
                           true);
}

}  // namespace

Status check_fused_decode(const FusedDecode& call, const Memory& memory) {
  KDA_RETURN_IF_ERROR(check_decode_sizes(call));
  const int64_t N = call.num_sequences, T = call.num_tokens, H = call.num_heads, D = call.head_dim;
  const Shape rows = {N, T, H * D, 1}, heads = {N, T, H, D};
  std::vector<NamedView> read = {{"g", &call.g, heads, false, true},
                                 {"beta", &call.beta, {N, T, H, 1}, false, true},
                                 {"A_log", &call.A_log, {H, 1, 1, 1}},
                                 {"dt_bias", &call.dt_bias, {H * D, 1, 1, 1}},
                                 {"norm_weight", &call.norm_weight, {D, 1, 1, 1}},
                                 {"output_gate", &call.output_gate, heads}};
  std::vector<NamedView> views = {{"state", &call.state, {call.num_slots, H, D, D}, true, true},
                                  {"y", &call.y, heads, true, true}};
  std::vector<NamedView> inputs;  // states of convolutions
  struct Names {
    const FusedDecode::Part* part;
    const char *x, *weight, *bias, *state;
  };
  for (const Names& of : {Names{&call.q, "q.x", "q.weight", "q.bias", "q.state"},
                          Names{&call.k, "k.x", "k.weight", "k.bias", "k.state"},
                          Names{&call.v, "v.x", "v.weight", "v.bias", "v.state"}}) {
    read.push_back({of.x, &of.part->x, rows, false, true});
    read.push_back({of.weight, &of.part->weight, {H * D, call.width, 1, 1}, false, true});
    read.push_back({of.bias, &of.part->bias, {H * D, 1, 1, 1}});
    inputs.push_back(
        {of.state, &of.part->state, {call.num_slots, H * D, call.state_width, 1}, true, true});
  }
  for (const NamedView* given : {&read[2], &read[3]})
    if (given->view->data && given->view->dtype != DType::kFloat32)
      return invalid(given->name, ": type is ", dtype_name(given->view->dtype), ", must be fp32");
  views.insert(views.begin(), read.begin(), read.end());
  KDA_RETURN_IF_ERROR(memory.check_each(views));
  KDA_RETURN_IF_ERROR(memory.check_each(inputs));
  KDA_RETURN_IF_ERROR(memory.check("slots", call.slots));
  KDA_RETURN_IF_ERROR(memory.check("has_state", call.has_state));
  // States of q, k and v lie between each other where channels are innermost.
  for (const NamedView& state : inputs) {
    views.push_back(state);
    KDA_RETURN_IF_ERROR(check_overlaps(views));
    views.pop_back();
  }
  const NamedArray arrays[] = {{"slots", call.slots, N * 4}, {"has_state", call.has_state, N}};
  KDA_RETURN_IF_ERROR(check_overlaps(views, arrays));
  KDA_RETURN_IF_ERROR(check_overlaps(inputs, arrays));
  if (call.state.dtype == DType::kFloat16 && call.state.data)
    return invalid("state: type is fp16, must be fp32 or bf16");
  return check_decode_values(call);
}

Status decline_fused_decode(const FusedDecode& call) {
  if (call.head_dim != 128)
    return unsupported(cat("head_dim: is ", call.head_dim, ", one kernel has 128 alone"));
  if (call.num_sequences == 0 || call.num_slots == 0) return {};
  const TensorView& state = call.state;
  const int64_t D = call.head_dim, vector = 16 / dtype_size(state.dtype);
  const bool aligned = reinterpret_cast<std::uintptr_t>(state.data) % 16 == 0 &&
                       (call.num_slots == 1 || state.strides[0] % vector == 0) &&
                       (call.num_heads == 1 || state.strides[1] % vector == 0);
  if (state.strides[3] != 1 || state.strides[2] != D || !aligned)
    return unsupported("state: heads must be dense and aligned to 16 bytes for one kernel");
  return {};
}

}  // namespace kda
