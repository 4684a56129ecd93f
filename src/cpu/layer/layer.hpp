// SPDX-License-Identifier: Apache-2.0
// The layer's operations with the kernels of one instruction set; the row takes the fastest that
// the machine runs.
#pragma once

#include "cpu/layer/kernels.hpp"
#include "kda/gated_rms_norm.hpp"
#include "kda/short_conv.hpp"
#include "registry/rows.hpp"

namespace kda::cpu::layer {

Status short_conv(const Kernels& kernels, const ShortConv& call) noexcept;
Status short_conv_backward(const Kernels& kernels, const ShortConv& call,
                           const ShortConvGradients& gradients) noexcept;
Status gated_rms_norm(const Kernels& kernels, const GatedRmsNorm& call) noexcept;
Status gated_rms_norm_backward(const Kernels& kernels, const GatedRmsNorm& call,
                               const GatedRmsNormGradients& gradients) noexcept;

extern const registry::LayerRow kLayer;

}  // namespace kda::cpu::layer
