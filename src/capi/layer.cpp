// SPDX-License-Identifier: Apache-2.0
// The operations around KDA in the C ABI: short convolution, gated RMS norm, a decode step.
#include <cstddef>

#include "capi/handles.hpp"
#include "capi/structs.hpp"
#include "core/text.hpp"

namespace kda::capi {
namespace {

TensorView view_of(const kda_tensor& given) {
  TensorView view{given.data, static_cast<DType>(given.dtype)};
  for (std::size_t i = 0; is_described(given) && i < 4; ++i) view.strides[i] = given.strides[i];
  return view;
}

/// Where a call runs.
template <class Given, class Call>
void set_place(const Given& given, Call* call) {
  call->device = static_cast<DeviceKind>(given.device);
  call->stream = given.stream;
  call->trusted = given.trusted != 0;
  call->workspace = given.workspace;
  call->workspace_bytes = given.workspace_bytes;
}

ConvState conv_state_of(const kda_state& given) {
  return {view_of(given.tensor), given.num_slots, given.indices};
}

Status read_short_conv(const kda_short_conv_call* given, ShortConv* call) {
  kda_short_conv_call c{};
  KDA_RETURN_IF_ERROR(read_struct(given, "call", &c));
  *call = {.batch = c.batch,
           .num_tokens = c.num_tokens,
           .channels = c.channels,
           .width = c.width,
           .activation = static_cast<Activation>(c.activation),
           .x = view_of(c.x),
           .y = view_of(c.y),
           .weight = view_of(c.weight),
           .bias = view_of(c.bias),
           .cu_seqlens = c.cu_seqlens,
           .cu_seqlens_dtype = static_cast<DType>(c.cu_seqlens_dtype),
           .num_sequences = c.num_sequences,
           .state_width = c.state_width,
           .initial_state = conv_state_of(c.initial_state),
           .final_state = conv_state_of(c.final_state),
           .has_state = c.has_state,
           .first_slot = c.first_slot,
           .num_threads = c.num_threads};
  set_place(c, call);
  return {};
}

Status read_norm(const kda_gated_rms_norm_call* given, GatedRmsNorm* call) {
  kda_gated_rms_norm_call c{};
  KDA_RETURN_IF_ERROR(read_struct(given, "call", &c));
  *call = {.rows = {c.rows[0], c.rows[1], c.rows[2]},
           .channels = c.channels,
           .eps = c.eps,
           .activation = static_cast<Activation>(c.activation),
           .x = view_of(c.x),
           .y = view_of(c.y),
           .gate = view_of(c.gate),
           .weight = view_of(c.weight),
           .num_threads = c.num_threads};
  set_place(c, call);
  return {};
}

FusedDecode::Part part_of(const kda_fused_decode_part& given) {
  return {view_of(given.x), view_of(given.weight), view_of(given.bias), view_of(given.state)};
}

Status read_fused_decode(const kda_fused_decode_call* given, FusedDecode* call) {
  kda_fused_decode_call c{};
  KDA_RETURN_IF_ERROR(read_struct(given, "call", &c));
  *call = {.num_sequences = c.num_sequences,
           .num_tokens = c.num_tokens,
           .num_heads = c.num_heads,
           .head_dim = c.head_dim,
           .width = c.width,
           .q = part_of(c.q),
           .k = part_of(c.k),
           .v = part_of(c.v),
           .state_width = c.state_width,
           .g = view_of(c.g),
           .beta = view_of(c.beta),
           .gate_mode = static_cast<GateMode>(c.gate_mode),
           .beta_mode = static_cast<BetaMode>(c.beta_mode),
           .lower_bound = c.lower_bound,
           .scale = c.scale,
           .A_log = view_of(c.A_log),
           .dt_bias = view_of(c.dt_bias),
           .state = view_of(c.state),
           .state_layout = static_cast<StateLayout>(c.state_layout),
           .num_slots = c.num_slots,
           .slots = c.slots,
           .first_slot = c.first_slot,
           .has_state = c.has_state,
           .activation = static_cast<Activation>(c.activation),
           .qk_l2norm = c.qk_l2norm != 0,
           .norm = c.norm != 0,
           .norm_eps = c.norm_eps,
           .norm_weight = view_of(c.norm_weight),
           .output_gate = view_of(c.output_gate),
           .y = view_of(c.y),
           .stream = c.stream,
           .device = static_cast<DeviceKind>(c.device),
           .trusted = c.trusted != 0};
  return {};
}

}  // namespace
}  // namespace kda::capi

using namespace kda::capi;

extern "C" {

kda_status kda_short_conv(const kda_short_conv_call* call) {
  return guarded_call([&] {
    kda::ShortConv conv;
    KDA_RETURN_IF_ERROR(read_short_conv(call, &conv));
    return kda::short_conv(conv);
  });
}

kda_status kda_short_conv_backward(const kda_short_conv_call* call,
                                   const kda_short_conv_gradients* gradients) {
  return guarded_call([&] {
    kda::ShortConv conv;
    KDA_RETURN_IF_ERROR(read_short_conv(call, &conv));
    kda_short_conv_gradients g{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &g));
    return kda::short_conv_backward(conv, {.dy = view_of(g.dy),
                                           .d_final_state = view_of(g.d_final_state),
                                           .dx = view_of(g.dx),
                                           .dweight = view_of(g.dweight),
                                           .dbias = view_of(g.dbias),
                                           .d_initial_state = view_of(g.d_initial_state)});
  });
}

kda_status kda_short_conv_backward_workspace(const kda_short_conv_call* call, size_t* bytes) {
  return guarded_call([&] {
    kda::ShortConv conv;
    KDA_RETURN_IF_ERROR(read_short_conv(call, &conv));
    if (!bytes) return kda::invalid("bytes: is null");
    *bytes = kda::short_conv_backward_workspace(conv);
    return kda::Status{};
  });
}

kda_status kda_gated_rms_norm(const kda_gated_rms_norm_call* call) {
  return guarded_call([&] {
    kda::GatedRmsNorm norm;
    KDA_RETURN_IF_ERROR(read_norm(call, &norm));
    return kda::gated_rms_norm(norm);
  });
}

kda_status kda_gated_rms_norm_backward(const kda_gated_rms_norm_call* call,
                                       const kda_gated_rms_norm_gradients* gradients) {
  return guarded_call([&] {
    kda::GatedRmsNorm norm;
    KDA_RETURN_IF_ERROR(read_norm(call, &norm));
    kda_gated_rms_norm_gradients g{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &g));
    return kda::gated_rms_norm_backward(norm, {.dy = view_of(g.dy),
                                               .dx = view_of(g.dx),
                                               .dgate = view_of(g.dgate),
                                               .dweight = view_of(g.dweight)});
  });
}

kda_status kda_gated_rms_norm_backward_workspace(const kda_gated_rms_norm_call* call,
                                                 size_t* bytes) {
  return guarded_call([&] {
    kda::GatedRmsNorm norm;
    KDA_RETURN_IF_ERROR(read_norm(call, &norm));
    if (!bytes) return kda::invalid("bytes: is null");
    *bytes = kda::gated_rms_norm_backward_workspace(norm);
    return kda::Status{};
  });
}

kda_status kda_fused_decode(const kda_fused_decode_call* call) {
  return guarded_call([&] {
    kda::FusedDecode decode;
    KDA_RETURN_IF_ERROR(read_fused_decode(call, &decode));
    return kda::fused_decode(decode);
  });
}

}  // extern "C"
