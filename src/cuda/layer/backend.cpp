// SPDX-License-Identifier: Apache-2.0
// The row of the operations around KDA on CUDA.
#include "cuda/launch/built.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/layer/launches.hpp"
#include "cuda/layer/sizes.hpp"
#include "cuda/rows.hpp"

namespace kda::cuda::layer {
namespace {

constexpr registry::LayerRow::Checks kChecks = {.call = if_built<check_stream>(),
                                                .pointer = if_built<check_pointer>()};

}  // namespace

const registry::LayerRow kLayer = {.device = DeviceKind::kCuda,
                                   .unavailable = unavailable,
                                   .short_conv = if_built<short_conv>(),
                                   .short_conv_backward = if_built<short_conv_backward>(),
                                   .gated_rms_norm = if_built<gated_rms_norm>(),
                                   .gated_rms_norm_backward = if_built<gated_rms_norm_backward>(),
                                   .fused_decode = if_built<fused_decode>(),
                                   .short_conv_workspace = short_conv_workspace,
                                   .gated_rms_norm_workspace = gated_rms_norm_workspace,
                                   .device_checks = &kChecks};

}  // namespace kda::cuda::layer
