// SPDX-License-Identifier: Apache-2.0
// The calls around KDA in its layer: the row of the device, checks, the row's function.
#include "core/guard.hpp"
#include "core/text.hpp"
#include "registry/rows.hpp"
#include "run/check_layer.hpp"

namespace kda {
namespace {

/// body(row, memory), once the device and the stream are known to be good.
template <class Call, class Body>
Status on_row(const Call& call, const Body& body) noexcept {
  return guarded([&] {
    const registry::LayerRow* row = registry::layer_row(call.device);
    if (!row)
      return invalid("device: is ", static_cast<int>(call.device), ", must be the CPU or CUDA");
    if (const char* reason = row->unavailable())
      return Status(StatusCode::kUnavailable, cat("cuda: ", reason));
    if (row->device_checks && !call.trusted)
      KDA_RETURN_IF_ERROR(row->device_checks->call(call.stream));
    const bool asks = row->device_checks && !call.trusted;
    return body(*row, Memory{asks ? row->device_checks->pointer : nullptr});
  });
}

template <class Call>
std::size_t bytes_of(const Call& call,
                     std::size_t (*registry::LayerRow::*bytes)(const Call&) noexcept) noexcept {
  const registry::LayerRow* row = registry::layer_row(call.device);
  return row && row->*bytes ? (row->*bytes)(call) : 0;
}

/// The memory of a backward that adds up gradients of weights.
Status check_workspace(const Memory& memory, const void* workspace, std::size_t given,
                       std::size_t needed) {
  if (needed == 0) return {};
  if (!workspace) return invalid("workspace: pointer is null, needs ", needed, " bytes");
  if (given < needed) return invalid("workspace: has ", given, " bytes, needs ", needed);
  if (reinterpret_cast<std::uintptr_t>(workspace) % alignof(float) != 0)
    return invalid("workspace: pointer is not aligned to ", alignof(float), " bytes");
  return memory.check("workspace", workspace);
}

}  // namespace

Status short_conv(const ShortConv& call) noexcept {
  return on_row(call, [&](const registry::LayerRow& row, const Memory& memory) {
    KDA_RETURN_IF_ERROR(check_short_conv(call, memory));
    return row.short_conv(call);
  });
}

std::size_t short_conv_backward_workspace(const ShortConv& call) noexcept {
  return bytes_of(call, &registry::LayerRow::short_conv_workspace);
}

Status short_conv_backward(const ShortConv& call, const ShortConvGradients& gradients) noexcept {
  return on_row(call, [&](const registry::LayerRow& row, const Memory& memory) {
    KDA_RETURN_IF_ERROR(check_short_conv_backward(call, gradients, memory));
    if (gradients.dweight.data || gradients.dbias.data)
      KDA_RETURN_IF_ERROR(check_workspace(memory, call.workspace, call.workspace_bytes,
                                          short_conv_backward_workspace(call)));
    return row.short_conv_backward(call, gradients);
  });
}

Status gated_rms_norm(const GatedRmsNorm& call) noexcept {
  return on_row(call, [&](const registry::LayerRow& row, const Memory& memory) {
    KDA_RETURN_IF_ERROR(check_gated_rms_norm(call, memory));
    return row.gated_rms_norm(call);
  });
}

std::size_t gated_rms_norm_backward_workspace(const GatedRmsNorm& call) noexcept {
  return bytes_of(call, &registry::LayerRow::gated_rms_norm_workspace);
}

Status gated_rms_norm_backward(const GatedRmsNorm& call,
                               const GatedRmsNormGradients& gradients) noexcept {
  return on_row(call, [&](const registry::LayerRow& row, const Memory& memory) {
    KDA_RETURN_IF_ERROR(check_gated_rms_norm_backward(call, gradients, memory));
    if (gradients.dweight.data)
      KDA_RETURN_IF_ERROR(check_workspace(memory, call.workspace, call.workspace_bytes,
                                          gated_rms_norm_backward_workspace(call)));
    return row.gated_rms_norm_backward(call, gradients);
  });
}

Status fused_decode(const FusedDecode& call) noexcept {
  return on_row(call, [&](const registry::LayerRow& row, const Memory& memory) {
    KDA_RETURN_IF_ERROR(check_fused_decode(call, memory));
    KDA_RETURN_IF_ERROR(decline_fused_decode(call));
    if (!row.fused_decode)
      return Status(StatusCode::kUnsupported,
                    "device: is the CPU, where a step is short_conv, decode and gated_rms_norm");
    return row.fused_decode(call);
  });
}

}  // namespace kda
