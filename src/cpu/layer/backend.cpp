// SPDX-License-Identifier: Apache-2.0
#include "cpu/blocked/blocked.hpp"
#include "cpu/layer/layer.hpp"

namespace kda::cpu::layer {
namespace {

const Kernels& best() { return *blocked::best_kernels().layer; }

}  // namespace

const registry::LayerRow kLayer = {
    .device = DeviceKind::kCpu,
    .unavailable = []() noexcept -> const char* { return nullptr; },
    .short_conv = [](const ShortConv& call) { return short_conv(best(), call); },
    .short_conv_backward =
        [](const ShortConv& call, const ShortConvGradients& gradients) {
          return short_conv_backward(best(), call, gradients);
        },
    .gated_rms_norm = [](const GatedRmsNorm& call) { return gated_rms_norm(best(), call); },
    .gated_rms_norm_backward =
        [](const GatedRmsNorm& call, const GatedRmsNormGradients& gradients) {
          return gated_rms_norm_backward(best(), call, gradients);
        }};

}  // namespace kda::cpu::layer
